"""Many processes, one fit: row shards and the few collectives. One process runs the same code without any of them."""
