"""What the cluster holds, in memory and read for the plan."""
