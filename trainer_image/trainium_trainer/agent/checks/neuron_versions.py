"""Whether the node's Neuron driver and the image's Neuron runtime work with each other.

Invariants: what cannot be read says nothing; it stops nothing, because the runtime itself refuses for certain, and only
then. A node that got a newer image of its own shows here before `nrt_init` fails without a reason.

Source of the rules: release notes of the Neuron SDK 2.30 (runtime 2.32 does not work with a driver up to 2.26) and 2.31
(the driver 2.29 needs a runtime from 2.33 on). Neither has been seen on a device by this project.
"""

from __future__ import annotations

import re
from pathlib import Path

DRIVER = Path("/sys/module/neuron/version")
PACKAGES = Path("/var/lib/dpkg/status")
_RUNTIME = "aws-neuronx-runtime-lib"
_MOST_BYTES = 16 << 20
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})")
_STANZA = re.compile(rf"^Package: {_RUNTIME}\n(?:.+\n)*?Version: (\S+)$", re.MULTILINE)

Version = tuple[int, int]


def mismatch(driver: Version | None, runtime: Version | None) -> str:
    """PURE. Why the two do not work together, and what to do; empty where they do or one is not known."""
    if driver is None or runtime is None:
        return ""
    pair = f"the node's Neuron driver {_told(driver)} and the image's runtime {_told(runtime)}"
    if driver <= (2, 26) and runtime >= (2, 32):
        return f"{pair} do not work together: this runtime needs a driver above 2.26; update the node (its AMI)."
    if driver >= (2, 29) and runtime < (2, 33):
        return f"{pair} do not work together: this driver needs a runtime from 2.33 on; use an image that has one."
    return ""


def driver_version(path: Path = DRIVER) -> Version | None:
    """Of the kernel's module; None without one."""
    return _version(_read(path))


def runtime_version(path: Path = PACKAGES) -> Version | None:
    """Of the image's package; None where it was installed in another way."""
    found = _STANZA.search(_read(path))
    return _version(found[1]) if found else None


def _version(text: str) -> Version | None:
    found = _VERSION.match(text.strip())
    return (int(found[1]), int(found[2])) if found else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _told(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
