"""Find failed members and their causes, and decide whether the job has failed. Nothing is changed here."""
