"""Helpers that know nothing of models: argument checks, files, tensors on disk, memory, threads, compiled code."""
