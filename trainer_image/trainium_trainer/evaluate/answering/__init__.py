"""Asking a model: its folder, loading it, answers to prompts, and how likely it finds given ones."""
