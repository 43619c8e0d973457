"""The way to the operator's coordinator, and what is told there."""
