"""Prometheus metrics of the operator, and the dashboards for them."""
