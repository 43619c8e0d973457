"""Prometheus metrics of the operator, and the dashboards that are drawn from them."""
