"""The one loop that runs every method: limits, history, callbacks, checkpoints."""
