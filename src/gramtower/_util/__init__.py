"""What the machine offers: memory, threads, compiled code, streams, the precision of products."""
