"""Compare loss curves and exported models with `transformers` and torch's AdamW, row by row."""
