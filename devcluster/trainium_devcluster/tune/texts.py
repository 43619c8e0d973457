"""Create the texts of the demo: documentation for the base, questions and answers for the adapter.

Guarantees:
- A hash of its name decides whether a module is held out, from both.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pydoc_data.topics
import re
import shutil
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainium_devcluster.tune.base import open_base_model
from trainium_devcluster.tune.library import read_standard_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from trainium_devcluster.tune.library import Function, Module

_HELD_OUT_ONE_IN = 8
"""One in this number of modules is held out."""
_ANSWER_LENGTHS = range(15, 121)
"""Lengths of a summary, in characters, that is used as an answer."""
_MAX_SIGNATURE_LENGTH = 80
"""Limit of a signature in a question, in characters."""
_MAX_TRAINING_QUESTIONS = 3000
"""More questions hardly change the figures."""
_MAX_TRAINING_PAIRS = 600
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)")


def is_held_out(module: str) -> bool:
    """Return whether a module is held out from base and adapter."""
    return int.from_bytes(hashlib.sha256(module.encode()).digest()[:4]) % _HELD_OUT_ONE_IN == 0


def read_documentation(modules: Iterable[Module], topics: Mapping[str, str]) -> Iterator[str]:
    """Yield the output of `help()`: the topics of the language, then each module that is not held out."""
    for _, text in sorted(topics.items()):
        yield text
    for module in modules:
        if not is_held_out(module.name):
            yield "\n\n".join(_iterate_help(module))


def _iterate_help(module: Module) -> Iterator[str]:
    """Yield the parts of a module's documentation."""
    yield f"Help on module {module.name}:\n\n{textwrap.indent(module.text, '    ')}".rstrip()
    for function in module.functions:
        owner = f"class {function.owner}" if function.owner else f"module {module.name}"
        text = textwrap.indent(function.text, "    ")
        yield f"Help on function {function.name} in {owner}:\n\n{function.signature}\n{text}".rstrip()


@dataclass(frozen=True, slots=True)
class Examples:
    """Records of instruction, context and response, with the kind of question and the module."""

    training: tuple[dict[str, str], ...]
    held_out: tuple[dict[str, str], ...]


def create_examples(modules: Sequence[Module]) -> Examples:
    """Create questions about public functions with a docstring.

    No question appears twice, and no held-out question appears in training, even if functions are alike.
    """
    seen_questions: set[tuple[str, str]] = set()
    training = list(
        _iterate_distinct_questions((module for module in modules if not is_held_out(module.name)), seen_questions)
    )
    held_out = list(
        _iterate_distinct_questions((module for module in modules if is_held_out(module.name)), seen_questions)
    )
    return Examples(
        tuple(sorted(training, key=_shuffle_key)[:_MAX_TRAINING_QUESTIONS]), tuple(sorted(held_out, key=_shuffle_key))
    )


def _shuffle_key(record: Mapping[str, str]) -> bytes:
    """Return a sort key of a reproducible random order."""
    return hashlib.sha256(f"{record['instruction']}\0{record['context']}".encode()).digest()


def _iterate_distinct_questions(
    modules: Iterable[Module], seen_questions: set[tuple[str, str]]
) -> Iterator[dict[str, str]]:
    for module in modules:
        for function in module.functions:
            for record in _create_questions(function):
                question = record["instruction"], record["context"]
                if question not in seen_questions:
                    seen_questions.add(question)
                    yield {**record, "module": module.name}


def _create_questions(function: Function) -> Iterator[dict[str, str]]:
    text = find_first_sentence(function.text)
    signature = function.signature
    if not function.is_public or len(text) not in _ANSWER_LENGTHS or len(signature) > _MAX_SIGNATURE_LENGTH:
        return
    yield _record("signature", f"Write the signature of the function {function.name}.", text, signature)
    yield _record("purpose", "Say what the function does.", signature, text)
    names = function.names
    yield _record("arguments", "List the arguments of the function.", signature, ", ".join(names) or "none")
    yield _record("count", "How many arguments does the function have?", signature, str(len(names)))


def _record(kind: str, instruction: str, context: str, response: str) -> dict[str, str]:
    return {"kind": kind, "instruction": instruction, "context": context, "response": response}


def find_first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n", 1)[0].split())
    match = _SENTENCE.match(paragraph)
    return match.group() if match else paragraph


def prepare(folder: Path, log: Callable[[str], None]) -> None:
    """Write the files that the job mounts to a folder. Raises ClusterError."""
    modules = read_standard_library()
    base = open_base_model(read_documentation(modules, pydoc_data.topics.topics), log)
    shutil.copytree(base.folder, folder / "base")
    questions = create_examples(modules)
    _write(folder / "train.jsonl", questions.training)
    _write(folder / "held-out.jsonl", questions.held_out)
    _write(folder / "pairs.jsonl", itertools.islice(create_preference_pairs(questions.training), _MAX_TRAINING_PAIRS))
    _write(folder / "held-out-pairs.jsonl", create_preference_pairs(questions.held_out))
    origin = "from the cache" if base.cached else f"trained in {base.seconds:.0f} s"
    log(f"base model {origin}; {len(questions.training):,} training questions, {len(questions.held_out):,} held out")


def create_preference_pairs(records: Iterable[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield pairs with trl's columns: the correct answer, and that to the previous question of its kind."""
    previous_answers: dict[str, str] = {}
    for record in records:
        kind, answer = record["kind"], record["response"]
        other = previous_answers.get(kind, answer)
        previous_answers[kind] = answer
        if other != answer:
            prompt = f"{record['instruction']}\n{record['context']}\n"
            yield {"prompt": prompt, "chosen": answer, "rejected": other}


def _write(file: Path, records: Iterable[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
