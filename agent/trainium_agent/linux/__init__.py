"""Query and control processes through Linux, beyond Python's library."""
