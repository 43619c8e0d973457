"""Share state among the agents of one generation: the store, its watcher, the exit barrier and the agreed stop."""
