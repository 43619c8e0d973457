"""Request quota from a queue of Kueue, and use what it grants."""
