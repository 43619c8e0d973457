"""Choose what is trained: adapters beside frozen weights, or the weights that patterns name."""
