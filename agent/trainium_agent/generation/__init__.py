"""Share state among the agents of one generation: the store, its watcher and the exit barrier."""
