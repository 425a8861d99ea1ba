"""What is minimised: the objective over all pairs, its gradient and its curvature, in O(m + n)."""
