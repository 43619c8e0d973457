"""The second demo: a base model, LoRA through faults, a merged model, and its answers before and after.

Invariants: as the first demo it does only what a person could do, and measures from the files that a run leaves; every
text is made from the standard library of the Python that runs it, and nothing of a module that is held out is trained
on, neither by the base nor by the adapter.
"""
