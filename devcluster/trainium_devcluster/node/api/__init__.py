"""Read, watch and write Kubernetes objects as JSON."""
