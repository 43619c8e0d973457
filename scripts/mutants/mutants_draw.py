# ruff: noqa: INP001 - a script
"""Draws a seeded sample of mutants: copies of a source file with one small fault each, made by cosmic-ray's operators.

Usage, in the environment of mutants.sh: python scripts/mutants/mutants_draw.py --seed 1 --sample 250 --out FILE FOLDER
FILE gets JSON: how many there are, and the drawn ones, each with its whole source.

What is left out, because it says nothing about tests: annotations, decorators, `TYPE_CHECKING`, `==` for `is` and the
like (the members of an enum are the same by both), and operators that only end in a TypeError. cosmic-ray changes no
texts. A mutant that compiles to the same code as the original is none.
Invariant: whether a mutant is drawn depends on its own line, seed and sample's share, so that after an edit elsewhere
nearly the same ones are drawn.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

_BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "BitOr_BitAnd", "BitAnd_BitOr")
_COMPARISON = (
    *("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is"),
    *("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
)
_OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in _BINARY),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISON),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub", "AddNot", "NumberReplacer"),
    *("ReplaceOrWithAnd", "ReplaceAndWithOr", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "ZeroIterationForLoop"),
)
_BETWEEN_OPERANDS = {"arith_expr", "term", "expr", "and_expr"}
"""Where a sign stands between two operands: elsewhere it unpacks (`**labels`)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a mutant may be made: the how-manieth place of an operator in a file, and its rank in the draw."""

    file: str
    operator: str
    occurrence: int
    line: int
    rank: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One drawn mutant; `source` is the whole file with the fault."""

    file: str
    operator: str
    line: int
    before: str
    after: str
    source: str


def main() -> int:
    """Write the sample; 2 when nothing can be drawn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sample", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    files = sorted(arguments.folder.rglob("*.py"))
    places = sorted((place for file in files for place in _places(file, arguments.seed)), key=lambda place: place.rank)
    if not places:
        sys.stderr.write(f"mutants: no code to change in {arguments.folder}; name a folder of Python files\n")
        return 2
    drawn: list[Mutant] = []
    for place in places:
        if len(drawn) == arguments.sample:
            break
        mutant = _mutant(place)
        if mutant is not None and mutant.source not in {other.source for other in drawn}:
            drawn.append(mutant)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    said = {"folder": str(arguments.folder), "seed": arguments.seed, "places": len(places)}
    arguments.out.write_text(json.dumps(said | {"mutants": [asdict(mutant) for mutant in drawn]}))
    return 0


def _places(file: Path, seed: int) -> Iterator[Place]:
    source = file.read_text()
    lines = source.splitlines()
    excluded = _excluded(ast.parse(source))
    nodes = list(ast_nodes(get_ast(source)))
    provider = OperatorProvider()
    for name in _OPERATORS:
        operator = provider[name]()
        positions = ((node, start) for node in nodes for start, _ in operator.mutation_positions(node))
        seen: Counter[str] = Counter()
        for occurrence, (node, start) in enumerate(positions):
            text = lines[start[0] - 1].strip()
            seen[text] += 1
            if any(low <= start < high for low, high in excluded) or _is_another_operators(name, node):
                continue
            said = f"{seed} {file} {name} {text} {seen[text]}"
            yield Place(str(file), name, occurrence, start[0], hashlib.sha256(said.encode()).hexdigest())


def _is_another_operators(name: str, node: Any) -> bool:
    """Whether the change is none, or one that another operator makes too."""
    if name.startswith("ReplaceBinaryOperator"):
        return node.parent.type not in _BETWEEN_OPERANDS
    if name == "AddNot":
        condition = node.children[2] if node.type == "test" else node.children[1]
        return condition.type in {"comparison", "not_test"}
    return False


def _excluded(tree: ast.Module) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The spans, by line and column, of annotations, decorators and conditions on `TYPE_CHECKING`."""
    found: list[ast.expr | None] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found += [node.returns, *node.decorator_list]
            case ast.ClassDef():
                found += node.decorator_list
            case ast.arg() | ast.AnnAssign():
                found.append(node.annotation)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                found.append(node.test)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in found
        if node is not None
    ]


def _mutant(place: Place) -> Mutant | None:
    original = Path(place.file).read_text()
    source = mutate_code(original, OperatorProvider()[place.operator](), place.occurrence)
    if source is None or _compiled(source) == _compiled(original):
        return None
    was, now = original.splitlines()[place.line - 1], source.splitlines()[place.line - 1]
    return Mutant(place.file, place.operator, place.line, was.strip(), now.strip(), source)


def _compiled(source: str) -> str:
    return ast.dump(ast.parse(source))


if __name__ == "__main__":
    sys.exit(main())
