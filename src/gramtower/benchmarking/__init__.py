"""Models side by side on the same split: baselines, towers and the caller's own, with intervals, times and memory."""
