"""Fits and lists on engines that run elsewhere: Spark, Ray, and everything that speaks Arrow, such as DuckDB."""
