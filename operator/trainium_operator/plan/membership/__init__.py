"""Decide who trains: ranks, generations, sizes."""
