"""Runs of models and optimizers: comparison, benchmark, cross-validation, search of settings, and their pages."""
