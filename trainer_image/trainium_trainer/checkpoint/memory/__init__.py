"""The memory tier: snapshots on the node, and their copies on another one."""
