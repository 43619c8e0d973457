"""Decide which workers train: ranks, generations, sizes."""
