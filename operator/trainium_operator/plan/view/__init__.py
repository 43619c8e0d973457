"""Sort the observation: workers, members, their nodes, the requested size, the progress of the run."""
