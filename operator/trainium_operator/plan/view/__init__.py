"""Sort the observation: workers, members, their nodes, the size that is asked for, how far the run has come."""
