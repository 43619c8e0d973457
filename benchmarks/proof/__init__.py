"""Kill real ranks of a small model at chosen points; each run must end on the reference curve."""
