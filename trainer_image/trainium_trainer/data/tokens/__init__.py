"""From text to tokens: the tokenizer, its special tokens, how a text begins."""
