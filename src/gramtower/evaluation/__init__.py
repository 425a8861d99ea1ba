"""How good a model is, and how sure one can be of it: cross-validation, and intervals around metrics."""
