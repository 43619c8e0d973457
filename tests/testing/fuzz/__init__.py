"""Hostile input: cases as JSON that is changed at random, and targets that run them against the operator."""
