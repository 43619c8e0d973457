"""The layout of a model's values on the ranks of backend Nxd, computed equally on every rank without torch and NxD."""
