"""Read records, templates and tokenizers of other programs, and compare with `transformers`."""

import errno
import json
import logging
import os
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

from tests.testing.trainer.example_files import (
    CHAT,
    CHATML,
    CLOSED,
    EOS,
    decode,
    encode,
    first_example,
    make_config,
    open_encoded,
    write_records,
    write_tokenizer,
)
from trainium_contract.trainer.data import TokenizerConfig
from trainium_trainer import cli
from trainium_trainer.data import cache
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.examples.chat import read_today
from trainium_trainer.data.examples.held_out import build_prompts, read_held_out
from trainium_trainer.data.revisions import RECORD_NAME, RunRevisions
from trainium_trainer.exits import StorageError, UnreadableError, UserError, retry_files_on_restart
from trainium_trainer.storage.posix import PosixStorage

BLANK = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'user: ' + m['content'] + ' ' }}{% else %}"
    "{{ 'model: ' + m['content'] + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'model: ' }}"
    "{% endif %}"
)
MARKED = BLANK.replace(
    "m['content'] + eos_token }}", "'' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}"
)
TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHAT.replace(
    "message['content'] | trim", "(message.tool_calls | tojson if message.tool_calls else message['content'] | trim)"
)
ONE_TURN = [{"role": "user", "content": "is a rank a mesh"}, {"role": "assistant", "content": "rank"}]
TWO_TURNS = [*ONE_TURN, {"role": "user", "content": "and a token"}, {"role": "assistant", "content": "token"}]
CALLS = [{"type": "function", "function": {"name": "rank", "arguments": {"mesh": "a"}}}]
TOOL_CALL: list[dict[str, Any]] = [
    {"role": "user", "content": "which rank"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "the third"},
]
TOOL = {"type": "function", "function": {"name": "rank", "parameters": {"type": "object"}}}


def chat_config(
    tmp_path: Path, rows: list[dict[str, Any]], template: str = CHAT, record_format: str = "Chat", **settings: Any
) -> Any:
    (tmp_path / "chat.jinja").write_text(template)
    examples = {"chat": {"template": str(tmp_path / "chat.jinja")}}
    return make_config(
        tmp_path,
        write_records(tmp_path / "d.jsonl", rows),
        format=record_format,
        examples=examples,
        sequence_length=256,
        **settings,
    )


def write_prepending_tokenizer(folder: Path) -> None:
    """Write a tokenizer that puts a blank before a text, like that of Llama 2."""
    write_tokenizer(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    specials = [token["content"] for token in document["added_tokens"]]
    letters = [chr(code) for code in range(32, 127)] + ["▁", "▁r", "▁ra", "▁ran", "▁rank", "\n"]
    vocabulary = {text: number for number, text in enumerate(dict.fromkeys([*specials, *letters]))}
    merges = [("▁", "r"), ("▁r", "a"), ("▁ra", "n"), ("▁ran", "k")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("write", [write_tokenizer, write_prepending_tokenizer])
@pytest.mark.parametrize("template", [BLANK, MARKED, CHAT])
@pytest.mark.parametrize("messages", [ONE_TURN, TWO_TURNS])
def test_a_conversation_has_the_prompt_of_transformers_and_all_answers_are_learned(
    tmp_path: Path, write: Any, template: str, messages: list[dict[str, Any]]
) -> None:
    write(tmp_path / "tokenizer")
    reference = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    options: dict[str, Any] = {"chat_template": template, "tokenize": True, "return_dict": True}
    prompt_ids = reference.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)["input_ids"]
    expected = reference.apply_chat_template(messages, return_assistant_tokens_mask=template is MARKED, **options)

    config = chat_config(tmp_path, [{"messages": messages}], template)
    ids, loss_mask = first_example(open_encoded(config))

    assert ids[: len(prompt_ids)] == prompt_ids
    assert build_prompts(config, [{"messages": messages[:-1]}])[0][1] == tuple(prompt_ids)
    assert loss_mask[len(prompt_ids) :] == [True] * (len(ids) - len(prompt_ids)), "the last answer and its end"
    if ids == expected["input_ids"] and template is MARKED:
        assert loss_mask == [bool(is_learned) for is_learned in expected["assistant_masks"]]
    ((_, learned),) = decode(open_encoded(config))
    if template is not CHAT:
        assert learned.replace(" ", "").endswith(f"{messages[-1]['content']}{EOS}".replace(" ", ""))
    assert learned.count(messages[1]["content"]) == 1


def test_no_blank_is_added_before_an_answer(tmp_path: Path) -> None:
    write_prepending_tokenizer(tmp_path / "tokenizer")
    template = {"prompt": "{q} ", "completion": "{a}"}
    data = encode(tmp_path, [{"q": "which", "a": "rank"}], examples={"template": template})
    assert decode(data)[0][0].endswith(f"which rank{EOS}")


@pytest.mark.parametrize("key", ["added_tokens_decoder", "added_tokens.json", "additional_special_tokens"])
def test_tokens_that_only_the_settings_add_are_encoded_as_in_transformers(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder, specials=("<|begin|>", "<|endoftext|>", "<|pad|>"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    attributes = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added = {
        str(420 + number): {"content": text} | attributes for number, text in enumerate(("<|im_start|>", "<|im_end|>"))
    }
    contents = [token["content"] for token in added.values()]
    if key == "added_tokens.json":
        (folder / key).write_text(json.dumps(dict(zip(contents, map(int, added), strict=True))))
    else:
        settings |= {key: added if key == "added_tokens_decoder" else contents}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    reference = AutoTokenizer.from_pretrained(folder)
    encoded = reference.apply_chat_template(ONE_TURN, chat_template=template, tokenize=True, return_dict=True)
    ids, _ = first_example(open_encoded(chat_config(tmp_path, [{"messages": ONE_TURN}], template)))
    assert ids == encoded["input_ids"]
    assert ids.count(reference.convert_tokens_to_ids("<|im_start|>")) == 2


def decode_lines_and_parquet(tmp_path: Path, rows: pa.Table, config: Any) -> list[tuple[str, str]]:
    """Return the examples of JSON lines; check that the rows in Parquet have the same examples."""
    parquet.write_table(rows, tmp_path / "d.parquet")
    lines, table = open_encoded(config), open_encoded(config.model_copy(update={"source": str(tmp_path / "d.parquet")}))
    assert decode(table) == decode(lines)
    for read, expected in zip(table.sources, lines.sources, strict=True):
        assert read.held_back.tolist() == expected.held_back.tolist()
        assert read.stored.records.tolist() == expected.stored.records.tolist(), "held back alike"
    return decode(lines)


def test_chats_with_tools_are_the_same_from_parquet(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    rows = [
        {"messages": TOOL_CALL, "tools": json.dumps([TOOL])},
        {"messages": [{"role": "user", "content": "a mesh"}, {"role": "assistant", "content": "no"}], "tools": None},
        {"messages": ONE_TURN},
    ]
    config = chat_config(tmp_path, rows, TOOLS, validation={"fraction": 0.3, "split": "Tail"})
    examples = decode_lines_and_parquet(tmp_path, pa.Table.from_pylist(rows), config)
    assert len(examples) == 3
    reference = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    rendered = reference.apply_chat_template(TOOL_CALL, tools=[TOOL], chat_template=TOOLS, tokenize=False)
    assert examples[0][0] == rendered
    assert examples[0][1].count("rank") == 1, "the call is learned too"


def test_instructions_are_the_same_from_parquet_with_fields_that_rows_leave_out(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    rows: list[dict[str, Any]] = [
        {"q": "why", "hint": "net", "a": "so"},
        {"q": "what", "a": "that"},
        {"a": "nothing was asked"},
        {"q": "not answered", "hint": "x"},
    ]
    template = {"prompt": "{q} {hint}\n", "completion": "{a}"}
    source = write_records(tmp_path / "d.jsonl", rows)
    config = make_config(tmp_path, source, examples={"template": template}, max_bad_lines=2)
    assert len(decode_lines_and_parquet(tmp_path, pa.Table.from_pylist(rows), config)) == 2


def test_values_of_tables_are_the_same_as_from_json(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    at = datetime(2024, 5, 1, 12, 30, tzinfo=UTC)
    values: dict[str, tuple[Any, Any]] = {
        "day": (pa.array([at.date()]), "2024-05-01"),
        "at": (pa.array([at]), "2024-05-01T12:30:00Z"),
        "nanoseconds": (pa.array([at], pa.timestamp("ns", "UTC")), "2024-05-01T12:30:00Z"),
        "naive": (pa.array([at.replace(tzinfo=None)]), "2024-05-01T12:30:00"),
        "east": (pa.array([at], pa.timestamp("ms", "+02:00")), "2024-05-01T14:30:00+02:00"),
        "clock": (pa.array([at.time()]), "12:30:00"),
        "length": (pa.array([timedelta(seconds=90)]), 90),
        "short": (pa.array([timedelta(milliseconds=1500)]), 1.5),
        "price": (pa.array([Decimal("12.50")]), 12.5),
        "whole": (pa.array([Decimal(7)], pa.decimal128(9, 2)), 7),
        "long": (pa.array([Decimal("1234567890123456789.123456789")]), "1234567890123456789.123456789"),
        "half": (pa.array([np.float16(0.5)]), 0.5),
        "count": (pa.array([3], pa.int8()), 3),
        "none": (pa.array([float("nan")]), None),
        "endless": (pa.array([float("-inf")]), None),
        "binary": (pa.array([b"abc"]), "abc"),
        "picture": (pa.array([b"\xff\x00"]), "/wA="),
        "category": (pa.array(["x"]).dictionary_encode(), "x"),
        "number": (pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16))), str(UUID(int=0))),
        "nested": (pa.array([{"days": [at.date()], "price": Decimal("0.10")}]), {"days": ["2024-05-01"], "price": 0.1}),
    }
    table = pa.table({name: array for name, (array, _) in values.items()} | {"a": ["yes"]})
    source = write_records(tmp_path / "d.jsonl", [{name: value for name, (_, value) in values.items()} | {"a": "yes"}])
    template = {"prompt": " ".join(f"{name} {{{name}}}" for name in values) + "\n", "completion": "{a}"}
    config = make_config(tmp_path, source, examples={"template": template}, sequence_length=512)
    assert decode_lines_and_parquet(tmp_path, table, config)


def test_tool_arguments_in_a_map_are_an_object(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    arguments = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())})
    message = pa.struct({"role": pa.string(), "content": pa.string(), "tool_calls": pa.list_(arguments)})
    row = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": "1"}}]},
    ]
    table = pa.table({"messages": pa.array([row], pa.list_(message))})
    assert decode_lines_and_parquet(tmp_path, table, chat_config(tmp_path, [{"messages": row}], TOOLS))


@pytest.mark.parametrize("record_format", ["Chat", "Text"])
def test_a_run_that_would_skip_more_than_a_hundredth_stops_unless_configured_otherwise(
    tmp_path: Path, record_format: str
) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=("<|begin|>", "<|endoftext|>", "<|pad|>"))
    bad = {"messages": [], "text": None}
    rows: list[dict[str, Any]] = [{"messages": ONE_TURN, "text": "a rank of a mesh"}] * 60 + [bad]
    config = chat_config(tmp_path, rows, record_format=record_format)
    sentence = r"1 of its 61 records cannot be used, more than 1%, the first: .*d.jsonl line 61: .*set data.maxBadLines"
    with pytest.raises(UserError, match=sentence):
        open_data(config, 1)
    assert open_data(config.model_copy(update={"max_bad_lines": 1}), 1)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    with pytest.raises(UserError, match=r"1 of its 61 records cannot be used, more than 1%.*d.parquet row 61: "):
        open_data(config.model_copy(update={"source": str(tmp_path / "d.parquet")}), 1)
    write_records(tmp_path / "d.jsonl", [*rows[:-1] * 2, bad])
    assert open_data(config, 1), "1 of 121"


@pytest.mark.parametrize("template", [CHAT, MARKED])
def test_an_answer_of_weight_0_is_not_learned(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    messages = [{**TWO_TURNS[0]}, {**TWO_TURNS[1], "weight": 0}, *TWO_TURNS[2:]]
    ((_, learned),) = decode(open_encoded(chat_config(tmp_path, [{"messages": messages}], template)))
    assert learned.startswith("token")
    with pytest.raises(UserError, match="all of the assistant's messages have the weight 0"):
        open_encoded(chat_config(tmp_path, [{"messages": messages[:2]}], template))


def test_content_in_parts_is_the_text_of_the_parts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    expected = decode(open_encoded(chat_config(tmp_path, [{"messages": TWO_TURNS}])))
    parts = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in TWO_TURNS]
    assert decode(open_encoded(chat_config(tmp_path, [{"messages": parts}]))) == expected
    parts[0]["content"] = [TWO_TURNS[0]["content"][:7], {"type": "input_text", "text": TWO_TURNS[0]["content"][7:]}]
    assert decode(open_encoded(chat_config(tmp_path, [{"messages": parts}]))) == expected
    parts[0]["content"] = [{"type": "image", "url": "x"}]
    with pytest.raises(UserError, match=r"line 1: the content has a part of type 'image', which a model of text"):
        open_encoded(chat_config(tmp_path, [{"messages": parts}]))


def test_unused_fields_of_records_are_reported_with_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    rows = [
        {"messages": [{**turn, "mood": "glad"} for turn in ONE_TURN], "id": 1, "tools": [TOOL]},
        {"messages": ONE_TURN},
    ]
    config = chat_config(tmp_path, rows)
    assert open_encoded(config).report.counts.unused == {"id": 1, "tools": 1, "messages[].mood": 1}
    (tmp_path / "run.yaml").write_text(json.dumps({"data": config.to_wire()}))
    command = ["show-data", "--config", str(tmp_path / "run.yaml"), "--set", "batch.globalSize=1", "--samples", "1"]
    assert cli.run([*command, "--ids", "--borders"]) == 0
    output = capsys.readouterr().out
    assert "not used    id (1), tools (1), messages[].mood (1)" in output
    assert "│" in output
    assert "ids: " in output


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("\n{{ 1 // (messages | length - 2) }}", "ZeroDivisionError: integer division or modulo by zero) in line 2 of"),
        ("{{ messages[0].content.index('absent') }}", "ValueError: substring not found) in line 1 of"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str) in line 1 of'),
    ],
)
def test_errors_of_a_chat_template_are_reported_in_one_sentence(tmp_path: Path, template: str, reason: str) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(UserError) as refused:
        open_encoded(chat_config(tmp_path, [{"messages": ONE_TURN}], template))
    assert f"d.jsonl line 1: the chat template refuses the messages ({reason}" in str(refused.value)
    assert "chat.jinja" in str(refused.value)


def test_a_function_that_exits_the_process_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\ndef examples(record):\n    sys.exit(3)\n")
    with pytest.raises(UserError, match=r"raised SystemExit: 3 \(.*mine.py line 3\) for .*d.jsonl line 1"):
        encode(tmp_path, [{"q": 1}], format="Function", examples={"function": f"{tmp_path}/mine.py:examples"})


def test_documents_end_with_the_folders_eos_token_where_the_vocabulary_has_no_common_one(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    write_tokenizer(folder, specials=("<|begin|>", "<|stop|>", "<|pad|>"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"eos_token": None, "bos_token": None, "pad_token": None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = write_records(tmp_path / "d.jsonl", [{"text": "a rank of a mesh " * 20}] * 3)
    data: dict[str, Any] = {
        "source": str(source),
        "tokenizer": {"path": str(folder)},
        "cacheDirectory": f"{tmp_path}/c",
    }
    (tmp_path / "run.yaml").write_text(json.dumps({"data": data}))
    assert cli.run(["check", "--config", str(tmp_path / "run.yaml")]) == 64
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|stop|>"}))
    assert cli.run(["check", "--config", str(tmp_path / "run.yaml")]) == 0
    assert cli.run(["show-data", "--config", str(tmp_path / "run.yaml")]) == 0
    target = str(tmp_path / "prepared")
    assert cli.run(["prepare-data", "--source", str(source), "--tokenizer", str(folder), "--output", target]) == 0
    assert cli.run(["show-data", "--config", str(tmp_path / "run.yaml"), "--set", f"data.source={target}",
                    "--set", "data.tokenizer={}"]) == 0  # fmt: skip


# ---- an unwritable cache --------------------------------------------------------------------------------------------


@pytest.fixture
def unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that no user can write to, beside a temporary folder of this test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(cache, "_create_temporary_folder", lambda: tmp_path / "temporary")
    (tmp_path / "cache").mkdir(exist_ok=True)
    open_path, make_folder = type(tmp_path).open, type(tmp_path).mkdir

    def refuse(path: Path) -> None:
        if path.is_relative_to(tmp_path / "cache"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def open_or_refuse(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            refuse(path)
        return open_path(path, mode, *arguments, **options)

    def make_or_refuse(path: Path, *arguments: Any, **options: Any) -> None:
        if not path.exists():
            refuse(path)
        make_folder(path, *arguments, **options)

    monkeypatch.setattr(type(tmp_path), "open", open_or_refuse)
    monkeypatch.setattr(type(tmp_path), "mkdir", make_or_refuse)
    return tmp_path / "cache"


@pytest.mark.parametrize("record_format", ["Chat", "Text"])
def test_an_unwritable_cache_is_read_and_missing_data_are_prepared_elsewhere(
    tmp_path: Path, record_format: str, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=("<|begin|>", "<|endoftext|>", "<|pad|>"))
    rows = [{"messages": ONE_TURN, "text": "a rank of a mesh " * 30}] * 9
    config = chat_config(tmp_path, rows, record_format=record_format, validation={"fraction": 0.5, "split": "Tail"})
    before = open_data(config, 1).identity
    request.getfixturevalue("unwritable_cache")
    assert open_data(config, 1).identity == before
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "the cache has all data"
    other = config.model_copy(update={"sequence_length": 128, "tokenizer": TokenizerConfig()})
    assert open_data(other, 1).identity
    assert "cannot be used (Permission denied)" in caplog.text
    assert "it is only a cache: what is not in it is made again in" in caplog.text
    assert list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize(("restarted", "kind"), [(False, UnreadableError), (True, StorageError)])
def test_missing_data_are_a_storage_error_only_where_this_run_has_read_them(
    tmp_path: Path, *, restarted: bool, kind: type[Exception]
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    with (
        pytest.raises(kind, match=r"data.source .*missing: there is no such file"),
        retry_files_on_restart(restarted=restarted),
    ):
        open_data(make_config(tmp_path, tmp_path / "missing"), 1)
    with pytest.raises(UserError, match="holds no example"), retry_files_on_restart(restarted=restarted):
        open_data(chat_config(tmp_path, [{"messages": []}]), 1)


def test_held_out_prompts_end_where_the_answer_begins(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    config = chat_config(tmp_path, [{"messages": TWO_TURNS}] * 4, BLANK, validation={"fraction": 0.5, "split": "Tail"})
    prompt_ids = build_prompts(config, [{"messages": TWO_TURNS[:-1]}])[0][1]
    assert {example.prompt_ids for example in read_held_out(config).examples} == {prompt_ids}


# ---- chat templates that rewrite what comes before an answer ---------------------------------------------------------

QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content or '' %}{% if m.role == 'assistant' %}"
    "{% set reasoning = m.reasoning_content or '' %}{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}{{ content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENED = QWEN3.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
R1 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|tail|>' }}{% if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1] + '<|eot|>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|tail|><think>\n' }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{{ '<|head|>' + m.role }}{% if m.role == 'assistant' %}{% if loop.last and m.thinking %}"
    "{{ '<|tail|>analysis:' + m.thinking + '<|im_end|><|head|>assistant' }}{% endif %}{% endif %}"
    "{{ '<|tail|>' + m.content }}{{ '<|eot|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant' }}{% endif %}"
)
LAST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% endif %}{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|head|>' + (system + '\n' if loop.last and system is defined else '') + m.content + '<|tail|>' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
)
NO_END = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{{ '<|head|>\n<think>' }}"
    "{% if loop.index0 > ns.last and parts | length > 1 %}{{ parts[0][7:] | trim }}{% endif %}"
    "{{ '</think>\n' + parts[-1] | trim }}{% else %}{{ '<|tail|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>' }}{% endif %}"
)
"""A template without an end of a turn, as that of GLM."""
THOUGHTS = "<think>\nan odd rank\n</think>\n\nthe third"


@pytest.mark.parametrize(
    ("template", "answers", "learned"),
    [
        (QWEN3, ["rank", "token"], "rank<|im_end|><think>\n\n</think>\n\ntoken<|im_end|>"),
        (QWEN3, [THOUGHTS, THOUGHTS], f"the third<|im_end|>{THOUGHTS}<|im_end|>"),
        (OPENED, ["rank", "token"], "rank<|im_end|>\n</think>\n\ntoken<|im_end|>"),
        (OPENED, [THOUGHTS, THOUGHTS], f"the third<|im_end|>{THOUGHTS[8:]}<|im_end|>"),
        (R1, ["rank", "token"], "rank<|eot|>token<|eot|>"),
        (R1, ["<rank", "<t>"], "<rank<|eot|><t><|eot|>"),
        (R1, [THOUGHTS, THOUGHTS], "\n\nthe third<|eot|>\n\nthe third<|eot|>"),
        (CHANNELS, ["rank", "token"], "<|tail|>rank<|im_end|><|tail|>token<|eot|>"),
        (LAST_SYSTEM, ["rank", "token"], f" rank{EOS} token{EOS}"),
        (CLOSED, ["rank", "token"], "</think>rank<|im_end|></think>token<|im_end|>"),
        (NO_END, ["rank", "token"], "\n<think></think>\nrank\n<think></think>\ntoken"),
        (NO_END, [THOUGHTS, THOUGHTS], "\n<think></think>\nthe third\n<think>an odd rank</think>\nthe third"),
    ],
)
def test_answers_are_found_where_a_template_rewrites_what_comes_before_them(
    tmp_path: Path, template: str, answers: list[str], learned: str
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer").parent
    turns = [{"role": "user", "content": "a mesh"}, {"role": "user", "content": "and a net"}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}]
    for turn, answer in zip(turns, answers, strict=True):
        messages += [turn, {"role": "assistant", "content": answer}]
    reference = AutoTokenizer.from_pretrained(folder)
    rendered = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    ids = reference.apply_chat_template(messages, chat_template=template, return_dict=True)["input_ids"]
    data = open_encoded(chat_config(tmp_path, [{"messages": messages}], template))
    assert decode(data) == [(rendered, learned)]
    assert first_example(data)[0] == ids
    dropped = {"messages[].content before </think>": 1} if template is R1 and answers[0] is THOUGHTS else {}
    assert data.report.counts.unused == dropped


def test_an_answer_is_found_where_the_template_refuses_the_messages_up_to_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    asked = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no question') }}"
    messages = [{"role": "assistant", "content": "Welcome"}, *ONE_TURN]
    ((_, learned),) = decode(
        open_encoded(chat_config(tmp_path, [{"messages": messages}], asked + "{% endif %}" + CHATML))
    )
    assert learned == "Welcome<|im_end|>" + ONE_TURN[1]["content"] + "<|im_end|>"


def test_a_reasoning_that_the_template_leaves_out_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    messages = [ONE_TURN[0], {"role": "assistant", "content": THOUGHTS}]
    open_encoded(chat_config(tmp_path, [{"messages": messages}], R1))
    assert "the chat template leaves out the reasoning of 1 record, which is not learned: give" in caplog.text


@pytest.mark.parametrize("template", [QWEN3, OPENED])
def test_the_calls_of_tools_and_the_answer_after_them_are_learned(tmp_path: Path, template: str) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    ((_, learned),) = decode(open_encoded(chat_config(tmp_path, [{"messages": TOOL_CALL}], template)))
    call = '<tool_call>{"name": "rank", "arguments": {"mesh": "a"}}</tool_call><|im_end|>'
    opened = "" if template is OPENED else "<think>\n"
    assert learned == f"{call}{opened}\n</think>\n\nthe third<|im_end|>"


PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
COMPARED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m['content'] is none %}{{ m.tool_calls | tojson }}"
    "{% else %}{{ '' + m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
)


def test_a_content_of_null_is_left_out_as_by_transformers(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", chat=PLAIN).parent
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(TOOL_CALL, tokenize=False)
    ((text, learned),) = decode(open_encoded(chat_config(tmp_path, [{"messages": TOOL_CALL}], PLAIN)))
    assert text == expected
    assert "None" not in learned


def test_a_template_that_compares_a_content_with_null_gets_null(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    ((_, learned),) = decode(open_encoded(chat_config(tmp_path, [{"messages": TOOL_CALL}], COMPARED)))
    assert '"name": "rank"' in learned


@pytest.mark.parametrize("form", ["settings", "files"])
def test_records_with_tools_use_the_template_for_them(tmp_path: Path, form: str) -> None:
    named = {"default": CHAT, "tool_use": TOOLS}
    listed = [{"name": name, "template": text} for name, text in named.items()]
    folder = write_tokenizer(tmp_path / "tokenizer", chat=None, chat_template=listed).parent
    reference = AutoTokenizer.from_pretrained(folder)
    if form == "files":
        reference.save_pretrained(folder)
        assert (folder / "additional_chat_templates/tool_use.jinja").is_file()
    rows: list[dict[str, Any]] = [{"messages": TOOL_CALL, "tools": [TOOL]}, {"messages": ONE_TURN}]
    expected = [reference.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False) for row in rows]
    data = encode(tmp_path, rows, format="Chat", sequence_length=256)
    assert [text for text, _ in decode(data)] == expected
    assert data.report.counts.unused == {}


# ---- what a template finds as in transformers -----------------------------------------------------------------------


def test_templates_have_the_functions_and_filters_of_transformers(tmp_path: Path) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from trainium_trainer.data.examples import chat

    theirs, ours = _compile_jinja_template("").environment, chat._create_environment()
    for part in ("globals", "filters", "tests"):
        assert set(getattr(theirs, part)) - set(getattr(ours, part)) == set(), part
    assert {name for extension in ours.extensions.values() for name in extension.tags} == {
        name for extension in theirs.extensions.values() for name in extension.tags
    }
    reference = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "tokenizer").parent)
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% set ns.n = ns.n + 1 %}{{ dict(a=m.role, e='é') | tojson(true, 2, [', ', '; '], true) }}"
        "{{ m.reasoning_content }}"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
        "{{ ns.n }}{{ strftime_now('%d %B %Y') }}{{ '<tags>' | tojson }}"
    )
    messages = [ONE_TURN[0], ONE_TURN[1] | {"thinking": "hm"}]
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert decode(open_encoded(chat_config(tmp_path, [{"messages": messages}], template)))[0][0] == expected


def test_a_run_keeps_the_date_of_its_first_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    dated = chat_config(tmp_path, [{"messages": ONE_TURN}], "{{ strftime_now('%d %b %Y') }}" + CHAT)
    first = RunRevisions(PosixStorage(tmp_path / "run"))
    pinned = first.pin(dated)
    first.write()
    assert pinned.examples.chat.date == read_today()
    record = tmp_path / "run" / RECORD_NAME
    record.write_text(record.read_text().replace(read_today(), "2024-02-29"))
    again = RunRevisions(PosixStorage(tmp_path / "run")).pin(dated)
    assert decode(open_encoded(again))[0][0].startswith("29 Feb 2024")
    assert open_encoded(again).identity != open_encoded(pinned).identity
    given = dated.model_copy(update={"examples": again.examples.model_copy(update={"chat": again.examples.chat})})
    assert RunRevisions(PosixStorage(tmp_path / "other")).pin(given).examples.chat.date == "2024-02-29"
    plain = chat_config(tmp_path, [{"messages": ONE_TURN}])
    assert RunRevisions(PosixStorage(tmp_path / "run")).pin(plain) is plain


THINKING = CHAT.replace("<|tail|>\n\n' }}{% endif %}", "<|tail|>\n\n<think>' }}{% endif %}")
READING = CHAT.replace(
    "message['content'] |",
    "(message.content.split('</think>')[-1] if '</think>' in message.content else message.content) |",
)


@pytest.mark.parametrize("template", [CHAT, THINKING, READING])
def test_tokens_that_were_added_as_special_are_tokens_in_records(tmp_path: Path, template: str) -> None:
    specials = ("<|begin|>", "<|end|>", "<|pad|>", "<|eot|>", "<|head|>", "<|tail|>", "<think>", "</think>")
    folder = write_tokenizer(tmp_path / "tokenizer", specials=specials, chat=template).parent
    reference = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "user", "content": "what <think> is"},
        {"role": "assistant", "content": f"<think>a net</think>is no <|eot|>, no {EOS}"},
    ]
    data = encode(tmp_path, [{"messages": messages}], format="Chat", sequence_length=256)
    ids, _ = first_example(data)
    expected = reference.apply_chat_template(messages, return_dict=True)["input_ids"]
    for token in ("<think>", "</think>"):
        number = reference.convert_tokens_to_ids(token)
        assert ids.count(number) == expected.count(number)
    assert ids.count(reference.convert_tokens_to_ids("<|eot|>")) == 2, "the ends of messages are text in records"
    assert reference.eos_token_id not in ids


def test_show_data_compares_the_tokens_of_the_sample_with_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    for content, differs in (("say it", False), ("say <|eot|> twice", True)):
        config = chat_config(tmp_path, [{"messages": [ONE_TURN[0] | {"content": content}, ONE_TURN[1]]}])
        (tmp_path / "run.yaml").write_text(json.dumps({"data": config.to_wire()}))
        assert cli.run(["show-data", "--config", f"{tmp_path}/run.yaml", "--set", "batch.globalSize=1"]) == 0
        output = capsys.readouterr().out
        assert ("warning: transformers' AutoTokenizer gives the first text" in output) == differs
