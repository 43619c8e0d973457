"""Find out which peers can be measured with the given interpreter."""

from __future__ import annotations

import json
import subprocess

TRANSFORMERS = "transformers.Trainer"
TRL = "trl's DPOTrainer"
_NEEDED = {
    TRANSFORMERS: ("transformers", "accelerate", "torch"),
    TRL: ("trl", "transformers", "accelerate", "peft", "torch"),
}
_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def state_of_peers(python: str) -> dict[str, dict[str, str]]:
    """Return the versions of each peer, or under `missing` why it is not measured."""
    every = sorted({name for names in _NEEDED.values() for name in names})
    asked = subprocess.run([python, "-c", _VERSIONS, *every], capture_output=True, text=True, timeout=120, check=True)
    versions: dict[str, str] = json.loads(asked.stdout)
    states = {}
    for peer, needed in _NEEDED.items():
        absent = [name for name in needed if name not in versions]
        states[peer] = {name: versions[name] for name in needed if name in versions}
        if absent:
            states[peer]["missing"] = f"{' and '.join(absent)} not installed beside the peers"
    return states
