"""Run a Kubernetes cluster for development on one machine: a real control plane, pods as processes, and faults."""
