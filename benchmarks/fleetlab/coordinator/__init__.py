"""The coordinator without a cluster, its floor, and its attackers."""
