"""The memory tier: parts of the state of a step in files in memory, and their copies on other nodes.

A part is opaque: a name, a layout and bytes. Users are `trainium_worker.dcp` and the trainer of this project.
"""
