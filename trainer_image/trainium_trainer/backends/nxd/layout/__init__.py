"""Where the values of a model lie on the ranks of backend Nxd; neither torch nor NxD, the same on every rank."""
