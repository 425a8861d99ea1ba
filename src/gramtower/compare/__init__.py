"""Figures, tables and one page from the saved histories of a comparison, and from nothing else."""
