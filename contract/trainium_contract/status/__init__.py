"""What the operator writes in `status` of a TrainingJob: for people (`shown.py`), and for itself (`memory.py`)."""
