"""`functools.cached_property` without the lock that Python 3.11 takes at each first use: that was a fifth of a plan.

Python 3.12 has dropped the lock, so this file can go once 3.11 is no longer supported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 - used as a decorator
        """A property whose first value stays in the instance's dictionary, where later reads find it first."""

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self._function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._function(instance)
            return value


__all__ = ["cached_property"]
