"""What is known of a job as typed values: pure functions of what the API server holds, the time given."""
