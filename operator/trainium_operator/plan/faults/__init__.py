"""What a sign stands for: its cause, who is to blame, which budget it uses; one table, and the look-ups in it."""
