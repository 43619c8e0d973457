"""Refuse unusable data in one sentence with the value, its place and the remedy."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.example_files import make_config, make_records, open_encoded, write_records, write_tokenizer
from trainium_contract.exit_codes import ExitCode
from trainium_trainer.exits import UserError

GOOD = {"instruction": "do", "context": "", "response": "done", "category": "open_qa"}


def refusal(tmp_path: Path, rows: Any, **settings: Any) -> str:
    """Return the error for records or a source; write a tokenizer without a chat template unless there is one."""
    if not (tmp_path / "tokenizer").exists():
        write_tokenizer(tmp_path / "tokenizer", chat=None)
    source = write_records(tmp_path / "d.jsonl", rows) if isinstance(rows, list) else rows
    with pytest.raises(UserError) as refused:
        open_encoded(make_config(tmp_path, source, **settings))
    assert refused.value.code is ExitCode.USER_ERROR
    return str(refused.value)


def chat(*contents: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in contents]}


@pytest.mark.parametrize(
    ("row", "settings", "sentence"),
    [
        ({"instruction": "do"}, {}, "line 2: has no field 'response', which data.examples.template.completion names"),
        (GOOD | {"response": " \n"}, {}, "line 2: the answer is empty"),
        (["not", "an", "object"], {}, "line 2: has no field 'instruction', .* every record is a JSON object"),
        ({**GOOD, "response": "\ud800"}, {}, "line 2: holds half a surrogate pair"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_by_its_line(
    tmp_path: Path, row: Any, settings: dict[str, Any], sentence: str
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"d.jsonl {sentence}.*more such records than data.maxBadLines 0 lets pass"):
        open_encoded(make_config(tmp_path, path, max_bad_lines=0, **settings))
    data = open_encoded(make_config(tmp_path, path, max_bad_lines=1, **settings))
    assert (data.report.examples, data.report.skipped) == (1, 1)


def test_a_template_with_an_unknown_field_names_the_nearest_one(tmp_path: Path) -> None:
    message = refusal(tmp_path, [GOOD] * 3, examples={"template": {"prompt": "{instructon}\n"}})
    assert "holds no example: 3 records were skipped, the first:" in message
    assert "has no field 'instructon', which data.examples.template.prompt names (it has 'instruction'," in message


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("a {b", "data.examples.template.prompt: expected '}' before end of string: write {{ and }}"),
        ("{instruction!r}", "{instruction!r} is no plain field"),
        ('{"a": 1}', '{"a": 1} is no plain field'),
        ("{}", "{} is no plain field"),
    ],
)
def test_an_invalid_template_is_refused(tmp_path: Path, prompt: str, sentence: str) -> None:
    assert sentence in refusal(tmp_path, [GOOD], examples={"template": {"prompt": prompt}})


def test_an_invalid_template_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text('{"prompt": "{instruction}"}')
    message = refusal(tmp_path, [GOOD])
    assert "template.json: is no template: write an object with the texts `prompt` and" in message


@pytest.mark.parametrize("label", [2, -1, "maybe", 0.5, None])
def test_a_label_outside_the_list_is_refused(tmp_path: Path, label: Any) -> None:
    message = refusal(tmp_path, [{"question": "a", "sentence": "b", "label": label}], format="Classification")
    assert re.search(r"line 1: the label '.*' is neither one of .* \(entailment, not_entailment\)", message)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (
            "def f(record):\n    return record['no']\n",
            "raised KeyError: 'no' (FILE line 2) for DATA line 1: correct",
        ),
        ("def f(record):\n    return 3\n", "returned 3 for DATA line 1: return a dictionary with the texts"),
        ("def f(record):\n    return {'prompt': 'a'}\n", "returned a dictionary with 'prompt' for DATA line 1"),
        ("def f(record:\n", "cannot be imported: SyntaxError: "),
        ("import nothing_of_that_name\n", "cannot be imported: ModuleNotFoundError: "),
        ("def g(record):\n    return None\n", "has no function 'f': correct the name"),
        ("def f(record):\n    return None\n", "left all of its 1 records out"),
        ("def f(record):\n    return {'messages': [{'role': 'user'}]}\n", "returned messages, but there is no chat"),
    ],
)
def test_a_function_that_fails_is_named_with_file_and_line(tmp_path: Path, code: str, sentence: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    message = refusal(tmp_path, [GOOD], format="Function", examples={"function": f"{file}:f"})
    assert sentence.replace("FILE", str(file)).replace("DATA", str(tmp_path / "d.jsonl")) in message
    assert "\n" not in message


@pytest.mark.parametrize("function", ["/nowhere/mine.py:f", "no.such.module:f"])
def test_a_missing_function_is_refused(tmp_path: Path, function: str) -> None:
    message = refusal(tmp_path, [GOOD], format="Function", examples={"function": function})
    assert re.search(rf"data.examples.function {function}: there is no (such file|module)", message)


def test_a_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, [chat(("user", "a"), ("assistant", "b"))], format="Chat")
    assert re.search(r"needs a chat template, but beside .*tokenizer.json is none: give data.exam", message)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (chat(("user", "a")), "no message is the assistant's"),
        (chat(("user", "a"), ("assistant", "")), "the answer is empty"),
        ({"messages": "hello"}, "the field 'messages' is no list of messages with `role` and `content`"),
        ({"messages": []}, "the field 'messages' is no list of messages"),
        ({"conversation": []}, "has no field 'messages', which data.examples.chat.messagesField names"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_refused(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    assert f"line 1: {sentence}" in refusal(tmp_path, [row], format="Chat")


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for %}", "chat.jinja line 1: is no chat template"),
        ("{{ raise_exception('roles must take turns') }}", "refuses the messages (roles must take turns)"),
        ("{{ ''.__class__.__mro__ }}", "refuses the messages (access to attribute '__class__'"),
        ("{{ messages | length }}: {{ messages[-1].content }}", "changes what comes before an answer"),
    ],
)
def test_a_chat_template_that_fails_or_leaves_its_sandbox_is_refused(
    tmp_path: Path, template: str, sentence: str
) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    examples = {"chat": {"template": str(tmp_path / "chat.jinja")}}
    assert sentence in refusal(tmp_path, [chat(("user", "a"), ("assistant", "b"))], format="Chat", examples=examples)


def test_examples_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, make_records(5), sequence_length=8)
    assert "all of its 5 examples are longer than data.sequenceLength 8 (the shortest " in message


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ({"category": "poetry"}, "of the 6 records none has category: poetry (found: open_qa, information_extraction)"),
        ({"categry": "open_qa"}, "none of the 6 records has the field 'categry'"),
        ({"category": "open_qa", "context": "no"}, "none has context: no (found: "),
    ],
)
def test_a_filter_that_leaves_nothing_is_refused(tmp_path: Path, where: dict[str, str], sentence: str) -> None:
    assert sentence in refusal(tmp_path, make_records(6), examples={"where": where})


def test_a_tokenizer_whose_files_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", eos_token="<|other|>")
    assert "has no entry for eos_token '<|other|>' of the tokenizer_config.json" in refusal(tmp_path, [GOOD])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("d.txt", "running text\n", "is running text, which has no records"),
        ("d.jsonl", "", "holds no record"),
        ("d.jsonl", "{oops\n", "1 records were skipped, the first: .* line 1: not JSON"),
    ],
)
def test_files_without_records_are_refused(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    (tmp_path / name).write_text(content)
    assert re.search(sentence, refusal(tmp_path, tmp_path / name))


def test_sources_and_settings_that_examples_do_not_support_are_refused(tmp_path: Path) -> None:
    assert "data.source python-docs: is running text" in refusal(tmp_path, "python-docs")
    online = refusal(tmp_path, make_records(9), tokenization="Online")
    assert "data.tokenization is Online, but data.format Instruction is always encoded" in online
    no_validation = refusal(tmp_path, make_records(9), validation={"fraction": 0.0001})
    assert "d.jsonl has no example to hold back: raise data.validation.fraction" in no_validation
    no_training = refusal(tmp_path, make_records(9), validation={"fraction": 0.9999})
    assert "all of its examples are held back: lower data.validation.fraction" in no_training


def test_refused_data_leave_nothing_in_the_cache(tmp_path: Path) -> None:
    assert "the answer is empty" in refusal(tmp_path, [GOOD | {"response": ""}])
    assert not list((tmp_path / "cache").glob("examples-*"))
