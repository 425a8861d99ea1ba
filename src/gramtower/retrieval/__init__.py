"""Retrieval: the best right entities for left ones."""
