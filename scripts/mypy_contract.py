"""Check fields of the contract's models in mypy, where Python's types cannot express them.

- `model.replaced(field=value, ...)` takes only fields of the model, with their types, as mypy checks
  `dataclasses.replace`.
- `reader.read_text("field")` of a `StatusReader[Model]` takes only wire names of the model's fields;
  `reader.read_part("field")` and `reader.read_parts("field")` return readers of the field's model.

Without the plugin, mypy skips these checks. It is enabled in `[tool.mypy]`.
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

_BASE_MODEL = "trainium_contract.base.ContractModel"
_READER_PREFIX = "trainium_contract.views.status_reader.StatusReader."
_FIELD_ARGUMENT = "field"


class ContractPlugin(Plugin):
    """Types the methods of models and of status readers by the fields of the model."""

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        """Return the hook of `replaced` and of the methods of a status reader."""
        if fullname.endswith(".replaced"):
            return _replace_signature
        return _create_reader_signature if fullname.startswith(_READER_PREFIX) else None

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Return the hook of the methods that return a status reader."""
        return _infer_return_type if fullname in {_READER_PREFIX + "read_part", _READER_PREFIX + "read_parts"} else None


def _replace_signature(context: MethodSigContext) -> FunctionLike:
    model = get_proper_type(context.type)
    if not isinstance(model, Instance) or not any(base.fullname == _BASE_MODEL for base in model.type.mro):
        return context.default_signature
    fields = _list_model_fields(model.type)
    return context.default_signature.copy_modified(
        arg_types=list(fields.values()), arg_kinds=[ARG_NAMED_OPT] * len(fields), arg_names=list(fields)
    )


def _create_reader_signature(context: MethodSigContext) -> FunctionLike:
    signature, fields = context.default_signature, _list_wire_fields(context.type)
    if not fields or _FIELD_ARGUMENT not in signature.arg_names:
        return signature
    string = context.api.named_generic_type("builtins.str", [])
    types = list(signature.arg_types)
    types[signature.arg_names.index(_FIELD_ARGUMENT)] = UnionType.make_union(
        [LiteralType(name, string) for name in fields]
    )
    return signature.copy_modified(arg_types=types)


def _infer_return_type(context: MethodContext) -> Type:
    """Return a reader, or a tuple of readers, of the model of the requested field."""
    default = get_proper_type(context.default_return_type)
    field = get_proper_type(context.arg_types[0][0]) if context.arg_types and context.arg_types[0] else None
    if isinstance(field, Instance):
        field = field.last_known_value
    if not isinstance(field, LiteralType) or not isinstance(default, Instance):
        return context.default_return_type
    model = _find_nested_model(_list_wire_fields(context.type).get(str(field.value)))
    if model is None:
        return context.default_return_type
    if default.type.fullname + "." == _READER_PREFIX:
        return default.copy_modified(args=[model])
    reader = get_proper_type(default.args[0])
    assert isinstance(reader, Instance), reader
    return default.copy_modified(args=[reader.copy_modified(args=[model])])


def _find_nested_model(field: Type | None) -> Instance | None:
    """Return the model in the type of a field: the model, an optional, or a tuple of it."""
    kind = get_proper_type(field)
    if isinstance(kind, UnionType):
        return next((model for item in kind.items if (model := _find_nested_model(item)) is not None), None)
    if isinstance(kind, TupleType):
        kind = kind.partial_fallback
    if isinstance(kind, Instance) and kind.type.fullname == "builtins.tuple":
        return _find_nested_model(kind.args[0])
    return kind if isinstance(kind, Instance) and _is_model(kind.type) else None


def _list_wire_fields(reader: Type) -> dict[str, Type]:
    """Return the types of all fields of a reader's model by wire name; empty if the model is unknown."""
    kind = get_proper_type(reader)
    model = get_proper_type(kind.args[0]) if isinstance(kind, Instance) and kind.args else None
    fields = _list_model_fields(model.type) if isinstance(model, Instance) else {}
    return {to_camel(name): field for name, field in fields.items()}


def _list_model_fields(model: TypeInfo) -> dict[str, Type]:
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
    return kind.fullname != _BASE_MODEL and any(base.fullname == _BASE_MODEL for base in kind.mro)


def plugin(_version: str) -> type[Plugin]:
    """Return the plugin; mypy's entry point."""
    return ContractPlugin
