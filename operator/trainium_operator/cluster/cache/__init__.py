"""Copies of the cluster's objects, in memory and parsed for the plan."""
