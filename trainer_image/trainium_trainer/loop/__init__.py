"""The training loop: steps, the learning rate, the request to leave, the history, what follows the last step."""
