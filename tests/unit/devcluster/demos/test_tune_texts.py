"""The texts of the second demo: what is read out of a library, and which questions and answers are made of it."""

from __future__ import annotations

import json
from pathlib import Path

from trainium_devcluster.tune.library import Function, Module, standard_library
from trainium_devcluster.tune.texts import documentation, examples, held_out, pairs, summary

SOURCE = '''
"""About shapes."""

def area(width: int, height=1, *rest, key=lambda left, right: left, **options):
    """Return the area. It is never negative.

    More.
    """

class Circle:
    class Part:
        async def turn(self, by, /):
            """Turn this part
            by an angle."""

    @classmethod
    def unit(cls):
        return 1

def broken(): pass
'''


def named(name: str, text: str, arguments: str = "a, b=1", owner: str = "") -> Function:
    names = tuple(part.partition("=")[0].strip() for part in arguments.split(",") if part)
    return Function(name, owner, arguments, names, text)


def modules(*, held: bool, count: int = 1) -> list[str]:
    """Names of modules of one side."""
    return [name for name in (f"module{number}" for number in range(1000)) if held_out(name) is held][:count]


def test_a_library_is_read_without_annotations_and_owners(tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "__init__.py").write_text(SOURCE)
    (found,) = standard_library(tmp_path)
    assert (found.name, found.text) == ("shapes", "About shapes.")
    assert [(each.owner, each.signature, each.names) for each in found.functions] == [
        (
            "",
            "area(width, height=1, *rest, key=lambda left, right: left, **options)",
            ("width", "height", "rest", "key", "options"),
        ),
        ("Circle.Part", "turn(by, /)", ("by",)),
        ("Circle", "unit()", ()),
        ("", "broken()", ()),
    ]
    assert found.functions[1].text == "Turn this part\nby an angle."


def test_files_that_cannot_be_parsed_and_tests_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("def one(): 'One.'")
    (tmp_path / "bad.py").write_text("def (:")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "trial.py").write_text("def two(): 'Two.'")
    assert [module.name for module in standard_library(tmp_path)] == ["good"]


def test_a_library_of_this_python_has_what_everybody_knows() -> None:
    modules = standard_library(Path(json.__file__).parent)
    (package,) = [module for module in modules if module.name == "__init__"]
    assert {"dumps", "loads"} <= {function.name for function in package.functions}
    made = examples(modules)
    assert made.training
    assert {each["module"] for each in made.training}.isdisjoint(each["module"] for each in made.held_out)


def test_a_summary_is_the_first_sentence_on_one_line() -> None:
    assert summary("Return the area\nof it. It is never negative.\n\nMore.") == "Return the area of it."
    assert summary("Without an end\n\nMore.") == "Without an end"
    assert summary("Like os.path, but faster. Yes.") == "Like os.path, but faster."


def test_documentation_reads_as_help_does_and_lacks_what_is_held_out() -> None:
    (seen,), (kept,) = modules(held=False), modules(held=True)
    function = named("area", "Return the area.", owner="Circle")
    texts = documentation([Module(seen, "About.", (function,)), Module(kept, "Secret.", ())], {"if": "A topic."})
    topic, text = texts
    assert topic == "A topic."
    assert text.split("\n\n") == [
        f"Help on module {seen}:",
        "    About.",
        "Help on function area in class Circle:",
        "area(a, b=1)\n    Return the area.",
    ]


def test_each_public_function_with_a_docstring_gives_four_questions() -> None:
    (seen,) = modules(held=False)
    functions = (
        named("area", "Return the area of it. More."),
        named("_hidden", "Return what nobody asks for."),
        named("inner", "Return what nobody asks for.", owner="_Hidden"),
        named("silent", ""),
        named("long", "Return what has too many arguments.", arguments="a" * 90),
    )
    made = examples([Module(seen, "", functions)])
    assert made.held_out == ()
    assert {(one["kind"], one["context"], one["response"]) for one in made.training} == {
        ("signature", "Return the area of it.", "area(a, b=1)"),
        ("purpose", "area(a, b=1)", "Return the area of it."),
        ("arguments", "area(a, b=1)", "a, b"),
        ("count", "area(a, b=1)", "2"),
    }
    assert len(made.training) == 4


def test_no_question_is_asked_twice_and_none_of_training_is_held_out() -> None:
    one, two = modules(held=False, count=2)
    (kept,) = modules(held=True)
    known, fresh = named("area", "Return the area of it."), named("fresh", "Return something new.")
    made = examples([Module(kept, "", (known, fresh)), Module(one, "", (known,)), Module(two, "", (known,))])
    assert len(made.training) == 4
    assert {each["module"] for each in made.training} == {one}
    assert sorted(each["kind"] for each in made.held_out) == ["arguments", "count", "purpose", "signature"]
    assert all("fresh" in each["context"] + each["instruction"] for each in made.held_out)


def test_of_very_many_questions_some_are_trained_on_by_chance_and_none_of_them_is_held_out() -> None:
    (seen,) = modules(held=False)
    functions = tuple(named(f"area{number}", f"Return the area number {number}.") for number in range(900))
    made = examples([Module(seen, "", functions)])
    assert len({(each["instruction"], each["context"]) for each in made.training}) == len(made.training) == 3000
    assert len({each["kind"] for each in made.training[:100]}) == 4
    assert made == examples([Module(seen, "", functions)]), "the same each time"
    assert made.held_out == ()


def test_a_pair_has_the_right_answer_and_that_to_another_question_of_its_kind() -> None:
    rows = [
        {"kind": kind, "instruction": f"ask {number}", "context": "c", "response": answer}
        for number, (kind, answer) in enumerate([("count", "1"), ("purpose", "Walks."), ("count", "2"), ("count", "2")])
    ]
    assert list(pairs(rows)) == [{"prompt": "ask 2\nc\n", "chosen": "2", "rejected": "1"}]
