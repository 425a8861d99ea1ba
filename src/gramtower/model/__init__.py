"""The estimator: from pairs to a model that recommends, saved and loaded without pickle."""
