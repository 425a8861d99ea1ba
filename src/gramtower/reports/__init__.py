"""Pages of a fit and of a tuning; that of a comparison is in compare/."""
