"""Derive the configuration of containers from a pod's spec, and refuse unsupported fields."""
