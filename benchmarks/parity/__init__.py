"""Loss curves and exported models against `transformers` and torch's AdamW, row by row."""
