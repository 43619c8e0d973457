"""Text that is tokenized during training."""
