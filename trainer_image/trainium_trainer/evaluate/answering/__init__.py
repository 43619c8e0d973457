"""Query a model: open its folder, load it, generate answers, and compute the likelihood of given answers."""
