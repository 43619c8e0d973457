"""What the end of a training process stands for, and what this pod does about it."""
