"""The nodes of a running cluster, each a process of its own."""
