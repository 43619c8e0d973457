"""The weights of a base model in a Hugging Face folder, read box by box, so that no rank holds the whole model."""
