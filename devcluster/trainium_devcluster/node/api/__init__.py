"""Kubernetes objects as JSON, and how a node reads, follows and writes them."""
