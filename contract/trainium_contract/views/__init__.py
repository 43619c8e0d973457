"""What is known of a job as typed values, for whoever shows it: pure functions of what the API server holds."""
