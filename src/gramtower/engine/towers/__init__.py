"""Towers: the functions f and g, their parameters θ, and their derivatives along and against a direction."""
