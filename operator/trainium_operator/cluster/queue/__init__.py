"""What has changed, which job it concerns, and when that job is planned."""
