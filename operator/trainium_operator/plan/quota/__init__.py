"""What is asked of a queue for the job, told to it and given back."""
