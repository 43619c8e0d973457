"""The parts of `status` of a TrainingJob: for people (`public.py`), and for the operator alone (`internal.py`)."""
