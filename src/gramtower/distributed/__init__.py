"""Training with several processes: row shards, collectives, and their files; with one process they do nothing."""
