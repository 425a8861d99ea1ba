"""Optimization methods, assembled from named parts: where the gradient comes from, which way, how far."""
