"""Claim devices (dynamic resource allocation) instead of extended resources."""
