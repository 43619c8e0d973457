"""Find out which peers can be measured with the given interpreter."""

from __future__ import annotations

import json
import subprocess

TRANSFORMERS = "transformers.Trainer"
TRL = "trl's DPOTrainer"
TORCHTITAN = "torchtitan"
_NEEDED = {
    TRANSFORMERS: ("transformers", "accelerate", "torch"),
    TRL: ("trl", "transformers", "accelerate", "peft", "torch"),
    TORCHTITAN: ("torchtitan",),
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
# What its trainer does first (torchtitan/trainer.py): take the local device of the kind that it has found.
_TITAN_DEVICE = """
from torchtitan.tools import utils
utils.device_module.set_device(utils.get_local_device())
"""
_SECONDS = 120.0


def state_of_peers(python: str, device: str) -> dict[str, dict[str, str]]:
    """Return the versions of each peer, or under `missing` or `unable` why it is not measured."""
    every = sorted({name for names in _NEEDED.values() for name in names})
    asked = subprocess.run(
        [python, "-c", _VERSIONS, *every], capture_output=True, text=True, timeout=_SECONDS, check=True
    )
    versions: dict[str, str] = json.loads(asked.stdout)
    states = {}
    for peer, needed in _NEEDED.items():
        absent = [name for name in needed if name not in versions]
        states[peer] = {name: versions[name] for name in needed if name in versions}
        if absent:
            states[peer]["missing"] = f"{' and '.join(absent)} not installed beside the peers"
    if "missing" not in states[TORCHTITAN]:
        states[TORCHTITAN]["unable"] = _why_not_torchtitan(python, device)
    return states


def _why_not_torchtitan(python: str, device: str) -> str:
    """Return the error of torchtitan on this machine."""
    if device != "cpu":
        return "this benchmark has no run of it on a device"
    tried = subprocess.run(
        ["env", "LOCAL_RANK=0", python, "-c", _TITAN_DEVICE],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if tried.returncode == 0:
        return "it found an accelerator, so it would not train on the CPU"
    return f"it does not start on a CPU: {tried.stderr.strip().splitlines()[-1]}"
