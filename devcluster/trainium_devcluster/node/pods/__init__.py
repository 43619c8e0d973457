"""Run pods and their containers, as a kubelet does."""
