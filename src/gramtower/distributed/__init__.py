"""One fit by many processes: row shards and the few collectives, which do nothing in a single process."""
