"""The model, its division over ranks, and reading and writing of `config.json`."""
