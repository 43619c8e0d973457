"""Changes, the jobs that they concern, and when a job is planned."""
