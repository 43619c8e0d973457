"""Hostile input: cases as JSON that is changed at random, and what plays them against real parts of the operator."""
