"""Who is lost, and why; whether the job has failed. Answers only: nothing is changed here."""
