"""Render typed values as text for people (rich) and as JSON for programs.

Pure: width, colour and time are arguments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainium_client.render import tables as tables


def __getattr__(name: str) -> Any:
    """Import `tables` at its first use, so that commands which print JSON do not load rich."""
    if name != "tables":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
