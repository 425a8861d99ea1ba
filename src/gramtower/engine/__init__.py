"""The objective over all pairs: kernels over observed ones, towers, and value, gradient and curvature."""
