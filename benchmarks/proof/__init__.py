"""The recovery proof: real ranks of a small model, killed at chosen points, must end on the reference curve."""
