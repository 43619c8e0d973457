"""Translate jobs of other platforms and commands of torchrun into TrainingJobs; `importer.py` chooses the format.

Each format has a file that reads its fields into a `SourceJob`; `convert.py` turns that into a TrainingJob.
"""
