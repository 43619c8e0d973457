"""The model, how it is divided over ranks, and `config.json` in and out."""
