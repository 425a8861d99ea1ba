"""The same models under other libraries' names, so that a script changes one import."""
