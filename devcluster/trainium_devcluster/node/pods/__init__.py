"""The life of a pod and of its containers, as a kubelet leads it."""
