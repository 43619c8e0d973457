"""Text that is tokenised while training."""
