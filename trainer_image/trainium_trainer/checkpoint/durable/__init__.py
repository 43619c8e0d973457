"""The durable tier: when a save is due, what each rank writes, and how the save is committed."""
