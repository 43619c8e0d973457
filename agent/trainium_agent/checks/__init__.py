"""Check whether this pod and its node can train: before it joins, and in pairs when a node hides a fault."""
