"""Only the description of a workload asks whether a job has `spec.trainer` or `spec.program`."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDERS = ("agent", "client", "contract", "devcluster", "operator", "simulator", "trainer_image", "worker")
KINDS = ("program", "trainer")
BRANCHES = {
    "agent/trainium_agent/workload/rank_spec.py": 1,  # from the environment to the workload
    "contract/trainium_contract/job.py": 2,  # from the resource to the workload
    "contract/trainium_contract/views/workload.py": 1,  # from the stored object to its view
    "simulator/trainium_simulator/job.py": 1,  # the preset with endless steps
}


def find_branches(source: str) -> set[int]:
    """Return the lines that ask which of the two a job has."""
    tree = ast.parse(source)
    asserted = {each for node in ast.walk(tree) if isinstance(node, ast.Assert) for each in ast.walk(node)}
    nodes = [node for node in ast.walk(tree) if node not in asserted]
    names = KINDS if "ProgramSpec" in source or "TrainerSpec" in source else ()
    return {tested.lineno for node in nodes for tested in find_tested(node) if is_kind(tested, names)}


def find_tested(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that are tested for being given."""
    match node:
        case ast.Compare(left=left, comparators=[ast.Constant(value=None)]):
            yield left
        case ast.BoolOp(values=values):
            yield from values
        case ast.If(test=test) | ast.IfExp(test=test) | ast.UnaryOp(op=ast.Not(), operand=test):
            yield test
        case ast.Call(func=ast.Name(id="read_mapping"), args=[_, ast.Constant(value="program")]):
            yield ast.copy_location(ast.Attribute(node, "program"), node)


def is_kind(expression: ast.expr, names: tuple[str, ...]) -> bool:
    match expression:
        case ast.Attribute(attr=name):
            return name in KINDS
        case ast.Name(id=name):
            return name in names
    return False


def test_a_branch_is_found_in_each_form() -> None:
    for line in (
        "if spec.program is None: pass",
        "a = b.trainer or c",
        "if not spec.program: pass",
        "a if s.trainer else b",
    ):
        assert find_branches(line) == {1}, line
    assert find_branches("from x import ProgramSpec\nif program is not None: pass") == {2}
    assert not find_branches("program = which(name)\nif program is None: pass")


def test_no_other_file_asks_whether_a_job_has_a_trainer_or_a_program() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).glob("trainium_*/**/*.py")]
    counts = {str(file.relative_to(ROOT)): len(find_branches(file.read_text(encoding="utf-8"))) for file in files}
    assert {file: count for file, count in counts.items() if count} == BRANCHES
    assert sum(BRANCHES.values()) <= 5
