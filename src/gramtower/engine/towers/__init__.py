"""Towers: the functions f and g, their parameters θ, and their jvps and vjps."""
