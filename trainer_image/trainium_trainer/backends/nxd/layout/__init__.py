"""Where the values of a Llama lie on the ranks of backend Nxd; neither torch nor NxD, the same on every rank."""
