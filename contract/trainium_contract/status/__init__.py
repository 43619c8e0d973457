"""The parts of `status` of a TrainingJob: public ones (`public.py`), and the operator's own (`internal.py`)."""
