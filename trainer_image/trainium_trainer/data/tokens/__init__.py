"""The tokenizer, its special tokens, and the encoding of text."""
