# ruff: noqa: INP001 - a script
"""A mypy plugin that types `model.replaced(field=value, ...)`: only fields of the model, each with its own type.

Python cannot express this for a method of a base class; mypy has the same rule built in for `dataclasses.replace`.
Invariant: without the plugin the code means the same and is only checked less. Named in `[tool.mypy]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy.nodes import ARG_NAMED_OPT, Var
from mypy.plugin import Plugin
from mypy.types import Instance, get_proper_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mypy.nodes import TypeInfo
    from mypy.plugin import MethodSigContext
    from mypy.types import FunctionLike, Type

_METHOD = ".replaced"
_BASE = "trainium_contract.base.ContractModel"


class ReplacedPlugin(Plugin):
    """Gives `replaced` the model's own fields as keywords."""

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """Return the hook of every method of that name."""
        return _signature if fullname.endswith(_METHOD) else None


def _signature(context: MethodSigContext) -> FunctionLike:
    model = get_proper_type(context.type)
    signature = context.default_signature
    if not isinstance(model, Instance) or not any(base.fullname == _BASE for base in model.type.mro):
        return signature
    fields = dict(_fields(model.type))
    return signature.copy_modified(
        arg_types=list(fields.values()),
        arg_kinds=[ARG_NAMED_OPT] * len(fields),
        arg_names=list(fields),
    )


def _fields(model: TypeInfo) -> Iterator[tuple[str, Type]]:
    """Names and types of the fields, those of the bases first."""
    for base in reversed(model.mro):
        if base.fullname == _BASE or not any(each.fullname == _BASE for each in base.mro):
            continue
        for name, symbol in base.names.items():
            node = symbol.node
            if isinstance(node, Var) and _is_field(name, node) and node.type is not None:
                yield name, node.type


def _is_field(name: str, node: Var) -> bool:
    return not node.is_classvar and not name.startswith(("_", "model_"))


def plugin(_version: str) -> type[Plugin]:
    """Entry point of mypy."""
    return ReplacedPlugin
