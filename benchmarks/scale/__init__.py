"""What a job of many ranks costs: simulated at 8 to 16,384 ranks, held against real worlds at 8 to 256."""
