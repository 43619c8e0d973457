"""The memory tier: parts of the state of a step in files in memory, their copies on other nodes, and their way back.

A part is opaque: a name, a layout and bytes. Users are `trainium_worker.dcp` and the trainer of this project.
"""
