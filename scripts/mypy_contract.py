# ruff: noqa: INP001 - a script
"""Check fields of the contract's models in mypy, where Python's types cannot express them.

- `model.replaced(field=value, ...)` takes only fields of the model, with their types, like mypy's rule for
  `dataclasses.replace`.
- `part.text("field")` of a `StatusReader[Model]` takes only wire names of the model's fields; `part.part("field")` and
  `part.parts("field")` return parts of the field's model.

Without the plugin mypy only checks less. `[tool.mypy]` names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy.nodes import ARG_NAMED_OPT, Var
from mypy.plugin import Plugin
from mypy.types import Instance, LiteralType, TupleType, UnionType, get_proper_type
from pydantic.alias_generators import to_camel

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy.nodes import TypeInfo
    from mypy.plugin import MethodContext, MethodSigContext
    from mypy.types import FunctionLike, Type

_BASE = "trainium_contract.base.ContractModel"
_PART = "trainium_contract.views.status_reader.StatusReader."
_NAME = "field"


class ContractPlugin(Plugin):
    """Types the methods of models and of status parts by the model's fields."""

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """Return the hook of `replaced`, and of every method of a part that takes a name."""
        if fullname.endswith(".replaced"):
            return _signature_of_replaced
        return _signature_of_part if fullname.startswith(_PART) else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Return the hook of methods that return a part."""
        return _answer if fullname in {_PART + "part", _PART + "parts"} else None


def _signature_of_replaced(context: MethodSigContext) -> FunctionLike:
    model = get_proper_type(context.type)
    if not isinstance(model, Instance) or not any(base.fullname == _BASE for base in model.type.mro):
        return context.default_signature
    fields = _fields(model.type)
    return context.default_signature.copy_modified(
        arg_types=list(fields.values()), arg_kinds=[ARG_NAMED_OPT] * len(fields), arg_names=list(fields)
    )


def _signature_of_part(context: MethodSigContext) -> FunctionLike:
    signature, fields = context.default_signature, _fields_of_part(context.type)
    if not fields or _NAME not in signature.arg_names:
        return signature
    at = signature.arg_names.index(_NAME)
    text = context.api.named_generic_type("builtins.str", [])
    names = UnionType.make_union([LiteralType(name, text) for name in fields])
    types = [names if each == at else known for each, known in enumerate(signature.arg_types)]
    return signature.copy_modified(arg_types=types)


def _answer(context: MethodContext) -> Type:
    """Return the part with the model of the requested field."""
    answer = get_proper_type(context.default_return_type)
    given = get_proper_type(context.arg_types[0][0]) if context.arg_types and context.arg_types[0] else None
    if isinstance(given, Instance):
        given = given.last_known_value
    model = _model(_fields_of_part(context.type).get(str(given.value))) if isinstance(given, LiteralType) else None
    if model is None or not isinstance(answer, Instance):
        return context.default_return_type
    if answer.type.fullname + "." == _PART:
        return answer.copy_modified(args=[model])
    (each,) = (get_proper_type(one) for one in answer.args)
    assert isinstance(each, Instance), each
    return answer.copy_modified(args=[each.copy_modified(args=[model])])


def _model(of: Type | None) -> Instance | None:
    """Return the model in the type of a field: the model, an optional, or a tuple of it."""
    found = get_proper_type(of)
    if isinstance(found, UnionType):
        return next((model for each in found.items if (model := _model(each)) is not None), None)
    if isinstance(found, TupleType):
        found = found.partial_fallback
    if isinstance(found, Instance) and found.type.fullname == "builtins.tuple":
        return _model(found.args[0])
    return found if isinstance(found, Instance) and _is_model(found.type) else None


def _fields_of_part(part: Type) -> dict[str, Type]:
    """Return the types of all fields of a part's model by wire name; empty if the model is unknown."""
    found = get_proper_type(part)
    model = get_proper_type(found.args[0]) if isinstance(found, Instance) and found.args else None
    fields = _fields(model.type) if isinstance(model, Instance) else {}
    return {to_camel(name): kind for name, kind in fields.items()}


def _fields(model: TypeInfo) -> dict[str, Type]:
    """Return the types of the fields by name, those of the bases first."""
    return {
        name: symbol.node.type
        for base in reversed(model.mro)
        if _is_model(base)
        for name, symbol in base.names.items()
        if isinstance(symbol.node, Var) and symbol.node.type is not None and _is_field(name, symbol.node)
    }


def _is_field(name: str, node: Var) -> bool:
    return not node.is_classvar and not name.startswith(("_", "model_"))


def _is_model(kind: TypeInfo) -> bool:
    return kind.fullname != _BASE and any(base.fullname == _BASE for base in kind.mro)


def plugin(_version: str) -> type[Plugin]:
    """Return the plugin; mypy's entry point."""
    return ContractPlugin
