"""The training loop: steps, the learning rate, stop requests, the history, and the stages after the last step."""
