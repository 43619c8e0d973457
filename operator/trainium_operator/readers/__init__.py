"""What kubelets, Prometheus and people read from the operator; none of it changes anything."""
