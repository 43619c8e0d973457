"""Run the nodes of a cluster, each as a separate process."""
