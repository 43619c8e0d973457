"""Clusters that tests run on, and clients of their pods and jobs."""
