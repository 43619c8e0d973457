"""Worker processes of the training process, started without a fork."""
