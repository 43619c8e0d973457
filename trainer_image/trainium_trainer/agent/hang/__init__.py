"""Ranks that stand still: who notices, who is to blame, what is done."""
