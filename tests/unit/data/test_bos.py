"""`data.bos`: how documents, examples and prompts begin, in every form of the data."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from tests.testing.trainer.example_files import (
    BOS,
    END_OF_TEXT,
    EOS,
    PAD,
    decode,
    encode,
    make_config,
    open_encoded,
    write_records,
    write_tokenizer,
)
from trainium_contract.trainer.data import DataConfig
from trainium_trainer.cli import app
from trainium_trainer.data.batches.micro_batches import Share
from trainium_trainer.data.batches.samples import Samples
from trainium_trainer.data.dataset import Dataset, open_data
from trainium_trainer.data.examples.held_out import build_prompts
from trainium_trainer.data.loader import open_loader
from trainium_trainer.data.prepared import text_sources
from trainium_trainer.data.tokens.tokenizer import load_tokenizer
from trainium_trainer.evaluate.questions import encode_training_prompts
from trainium_trainer.exits import UserError

DOCUMENTS = [f"say rank {number} of a mesh " + "token " * (number % 7) for number in range(30)]
TEXT_SPECIALS = (BOS, EOS, PAD, END_OF_TEXT)
CONVERSATION = {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "a shard"}]}


def write_documents(tmp_path: Path) -> Path:
    return write_records(tmp_path / "d.jsonl", [{"text": text} for text in DOCUMENTS])


def text_config(tmp_path: Path, source: Path, **more: Any) -> DataConfig:
    return make_config(tmp_path, source, format="Text", sequence_length=16, **more)


def decoded_run(data: Dataset) -> str:
    """Decode all tokens of a source that is tokenized ahead."""
    assert isinstance(data.training, Samples)
    (part,) = data.training.parts
    ids = part.sequence.read(0, part.sequence.tokens)
    return str(load_tokenizer(data.tokenizer).decode(ids.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize(
    ("rule", "adds_bos", "in_template", "expected"),
    [
        ("Auto", True, "", BOS),
        ("Auto", False, "", ""),
        ("Auto", False, BOS, BOS),
        ("Always", True, "", BOS),
        ("Always", False, "", BOS),
        ("Always", False, BOS, BOS),
        ("Never", True, "", ""),
        ("Never", True, BOS, ""),
        ("Never", False, BOS, ""),
    ],
)
def test_an_example_begins_by_the_rule_whether_or_not_others_write_its_beginning(
    tmp_path: Path, rule: str, adds_bos: bool, in_template: str, expected: str
) -> None:
    write_tokenizer(tmp_path / "tokenizer", bos=adds_bos)
    source = write_records(tmp_path / "d.jsonl", [{"q": "why", "a": "so"}])
    template = {"prompt": in_template + "{q} ", "completion": "{a}"}
    given = make_config(tmp_path, source, bos=rule, examples={"template": template})
    data = open_encoded(given)
    assert decode(data) == [(f"{expected}why so{EOS}", f"so{EOS}")]
    ids, _ = data.sources[0].stored.example(0)
    answer = int(data.sources[0].stored.answers[0])
    assert build_prompts(given, [{"q": "why"}])[0][1] == tuple(ids[:answer].tolist()), (
        "an evaluation asks with the same"
    )


@pytest.mark.parametrize(
    ("rule", "template", "expected"),
    [
        ("Auto", "{{ bos_token }}", BOS),
        ("Auto", "", ""),
        ("Always", "", BOS),
        ("Always", "{{ bos_token }}", BOS),
        ("Never", "{{ bos_token }}", ""),
    ],
)
def test_a_conversation_begins_by_the_rule_and_the_same_is_learned(
    tmp_path: Path, rule: str, template: str, expected: str
) -> None:
    turns = "{% for message in messages %}{{ '<|head|>' + message['content'] + '<|eot|>' }}{% endfor %}"
    turns += "{% if add_generation_prompt %}{{ '<|head|>' }}{% endif %}"
    write_tokenizer(tmp_path / "tokenizer", chat=template + turns)
    ((text, learned),) = decode(encode(tmp_path, [CONVERSATION], format="Chat", bos=rule))
    assert text == f"{expected}<|head|>what<|eot|><|head|>a shard<|eot|>"
    assert learned == "a shard<|eot|>"


def test_a_class_label_is_learned_after_the_same_beginning(tmp_path: Path) -> None:
    row = {"question": "who", "sentence": "she", "label": 1}
    ((text, learned),) = decode(encode(tmp_path, [row], format="Classification", bos="Never"))
    assert text.startswith("question: who")
    assert learned == f" not_entailment{EOS}"


def test_documents_begin_with_the_token_when_asked_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "BLOCK_BYTES", 300)
    file = write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    plain = "".join(f"{text}{END_OF_TEXT}" for text in DOCUMENTS)
    with_bos = "".join(f"{BOS}{text}{END_OF_TEXT}" for text in DOCUMENTS)
    found = {rule: open_data(text_config(tmp_path, source, bos=rule), 4) for rule in ("Auto", "Always", "Never")}
    assert {rule: decoded_run(data) for rule, data in found.items()} == {
        "Auto": plain,
        "Always": with_bos,
        "Never": plain,
    }
    assert found["Auto"].identity == found["Never"].identity != found["Always"].identity
    tokenizer = load_tokenizer(file)
    tokenizer.encode_special_tokens = False
    table = pa.table({"text": [tokenizer.encode(BOS + text, add_special_tokens=False).ids for text in DOCUMENTS]})
    parquet.write_table(table, tmp_path / "ids.parquet")
    rules = {rule: text_config(tmp_path, tmp_path / "ids.parquet", bos=rule) for rule in ("Auto", "Always", "Never")}
    ours = {rule: decoded_run(open_data(given, 4)) for rule, given in rules.items()}
    assert ours == {"Auto": with_bos, "Always": with_bos, "Never": plain}, "ids of a tokenized source are treated alike"


def test_one_long_document_begins_once_whatever_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "BLOCK_BYTES", 200)
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    (tmp_path / "d.txt").write_text("\n".join(DOCUMENTS))
    text = decoded_run(open_data(text_config(tmp_path, tmp_path / "d.txt", bos="Always"), 4))
    assert text == BOS + "\n".join(DOCUMENTS) + END_OF_TEXT


def test_text_that_is_tokenised_while_training_begins_alike(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    identities = set()
    for rule, begin in (("Auto", ""), ("Always", BOS)):
        data = open_data(text_config(tmp_path, source, bos=rule, tokenization="Online"), 1)
        identities.add(data.identity)
        loader = open_loader(data, Share(global_size=1, micro_size=1, dp_rank=0, dp_size=1))
        try:
            ids = [token for step in range(6) for token in loader.batch_at(step).micro_batches[0].inputs[0].tolist()]
        finally:
            loader.close()
        text = load_tokenizer(data.tokenizer).decode(ids, skip_special_tokens=False)
        assert text.startswith(f"{begin}{DOCUMENTS[0]}{END_OF_TEXT}{begin}{DOCUMENTS[1]}{END_OF_TEXT}{begin}")
    assert len(identities) == 2


def test_prepared_text_names_its_rule_for_bos_and_is_refused_under_another_rule(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS, bos=False)
    source = write_documents(tmp_path)
    for name, rule in (("with", "Always"), ("without", "Auto")):
        command = ["prepare-data", "--source", str(source), "--output", str(tmp_path / name), "--workers", "1"]
        done = CliRunner().invoke(app, [*command, "--tokenizer", str(tmp_path / "tokenizer"), "--bos", rule])
        assert done.exit_code == 0, done.output
    none: dict[str, Any] = {"tokenizer": {}}
    assert decoded_run(open_data(text_config(tmp_path, tmp_path / "with", bos="Always", **none), 4)).startswith(BOS)
    assert decoded_run(open_data(text_config(tmp_path, tmp_path / "with", **none), 4)).startswith(BOS), (
        "as it was prepared"
    )
    assert "beginning" not in json.loads((tmp_path / "without" / "manifest.json").read_text())
    with pytest.raises(UserError, match=r"was prepared without BOS tokens, but data.bos is Always: leave out data.bos"):
        open_data(text_config(tmp_path, tmp_path / "without", bos="Always", **none), 4)
    with pytest.raises(UserError, match=r"was prepared with BOS tokens, but data.bos is Never"):
        open_data(text_config(tmp_path, tmp_path / "with", bos="Never", **none), 4)


def test_a_prompt_of_running_text_begins_as_documents_do(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    tokenizer = load_tokenizer(file)
    plain = tuple(tokenizer.encode("say", add_special_tokens=False).ids)
    ids = {
        rule: encode_training_prompts(text_config(tmp_path, source, bos=rule), ["say"])[0].prompt_ids
        for rule in ("Auto", "Always", "Never")
    }
    assert ids == {"Auto": (), "Always": (tokenizer.token_to_id(BOS), *plain), "Never": plain}


@pytest.mark.parametrize("record_format", ["Text", "Instruction"])
def test_a_tokenizer_without_the_token_is_refused_in_a_sentence(tmp_path: Path, record_format: str) -> None:
    row = {"text": "a b c", "instruction": "a", "response": "b"}
    source = write_records(tmp_path / "d.jsonl", [row] * 40)
    write_tokenizer(tmp_path / "tokenizer", specials=(END_OF_TEXT,), bos=False)
    sentence = r"data.bos is Always, but the tokenizer .*tokenizer.json has no BOS token: set data.bos to Auto or Never"
    with pytest.raises(UserError, match=sentence):
        open_data(make_config(tmp_path, source, format=record_format, sequence_length=16, bos="Always"), 4)


def test_a_token_that_also_ends_documents_is_refused_for_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=(END_OF_TEXT,), bos=False, bos_token=END_OF_TEXT)
    source = write_documents(tmp_path)
    with pytest.raises(UserError, match="also ends documents"):
        open_data(text_config(tmp_path, source, bos="Always"), 4)


def test_show_data_shows_the_token_and_the_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trainium_trainer import cli

    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"data": text_config(tmp_path, source, bos="Always").to_wire()}))
    assert cli.run(["show-data", "--config", str(run), "--samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert BOS in printed
    assert "BOS token   Always" in printed
