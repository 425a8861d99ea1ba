"""A fitted model behind HTTP: server, batching, indexes, and the page at ``/``. See docs/serving.md."""
