"""How a plan becomes writes, and what bounds them."""
