"""What Linux says about processes and does for them, beyond Python's own library."""
