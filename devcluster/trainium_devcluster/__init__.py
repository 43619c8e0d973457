"""A Kubernetes cluster for development on one machine: real control plane, nodes that run pods as processes, faults."""
