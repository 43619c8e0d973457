"""Run the second demo: a base model, LoRA through faults, a merged model, and its answers before and after.

Guarantees:
- Like the first demo it uses only a user's tools, and measures from the files of a run.
- All texts come from the standard library of the running Python; neither base nor adapter trains on a held-out module.
"""
