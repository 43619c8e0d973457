"""Choose the trained parameters: adapters of frozen weights, or the weights that match patterns."""
