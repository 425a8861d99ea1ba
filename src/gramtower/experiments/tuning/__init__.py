"""Choosing a model's settings on a validation part of the training data: `gramtower tune` and `TwoTower.tune`.

optuna proposes settings and keeps the log; it is imported when a search begins (``pip install "gramtower[tune]"``).
"""
