"""Begin documents, examples and prompts with BOS according to `data.bos`, in every form of the data."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from tests.testing.trainer.data_files import decode_all
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
from trainium_trainer import cli
from trainium_trainer.data.batches.samples import Share
from trainium_trainer.data.dataset import open_data
from trainium_trainer.data.examples.held_out import build_prompts
from trainium_trainer.data.loader import open_loader
from trainium_trainer.data.prepared.text_sources import TextInputs
from trainium_trainer.data.tokens.tokenizer import load_tokenizer
from trainium_trainer.evaluate.prompts import encode_prompts
from trainium_trainer.exits import UserError

DOCUMENTS = [f"say rank {number} of a mesh " + "token " * (number % 7) for number in range(30)]
TEXT_SPECIALS = (BOS, EOS, PAD, END_OF_TEXT)
CONVERSATION = {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "a shard"}]}


def write_documents(tmp_path: Path) -> Path:
    return write_records(tmp_path / "d.jsonl", [{"text": text} for text in DOCUMENTS])


def text_config(tmp_path: Path, source: Path, **settings: Any) -> DataConfig:
    return make_config(tmp_path, source, format="Text", sequence_length=16, **settings)


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
def test_an_example_begins_by_the_rule_whatever_tokenizer_and_template_write(
    tmp_path: Path, rule: str, adds_bos: bool, in_template: str, expected: str
) -> None:
    write_tokenizer(tmp_path / "tokenizer", bos=adds_bos)
    source = write_records(tmp_path / "d.jsonl", [{"q": "why", "a": "so"}])
    template = {"prompt": in_template + "{q} ", "completion": "{a}"}
    config = make_config(tmp_path, source, bos=rule, examples={"template": template})
    data = open_encoded(config)
    assert decode(data) == [(f"{expected}why so{EOS}", f"so{EOS}")]
    ids, _ = data.sources[0].stored.read_example(0)
    answer = int(data.sources[0].stored.answers[0])
    assert build_prompts(config, [{"q": "why"}])[0][1] == tuple(ids[:answer].tolist()), "evaluation has the same prompt"


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
def test_a_conversation_begins_by_the_rule_and_only_the_answer_is_learned(
    tmp_path: Path, rule: str, template: str, expected: str
) -> None:
    turns = "{% for message in messages %}{{ '<|head|>' + message['content'] + '<|eot|>' }}{% endfor %}"
    turns += "{% if add_generation_prompt %}{{ '<|head|>' }}{% endif %}"
    write_tokenizer(tmp_path / "tokenizer", chat=template + turns)
    ((text, learned),) = decode(encode(tmp_path, [CONVERSATION], format="Chat", bos=rule))
    assert text == f"{expected}<|head|>what<|eot|><|head|>a shard<|eot|>"
    assert learned == "a shard<|eot|>"


def test_a_class_label_is_learned_after_the_same_bos_prefix(tmp_path: Path) -> None:
    row = {"question": "who", "sentence": "she", "label": 1}
    ((text, learned),) = decode(encode(tmp_path, [row], format="Classification", bos="Never"))
    assert text.startswith("question: who")
    assert learned == f" not_entailment{EOS}"


def test_documents_begin_with_the_token_by_the_rule_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextInputs, "block_bytes", 300)
    file = write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    plain = "".join(f"{text}{END_OF_TEXT}" for text in DOCUMENTS)
    with_bos = "".join(f"{BOS}{text}{END_OF_TEXT}" for text in DOCUMENTS)
    data_by_rule = {rule: open_data(text_config(tmp_path, source, bos=rule), 4) for rule in ("Auto", "Always", "Never")}
    assert {rule: decode_all(data) for rule, data in data_by_rule.items()} == {
        "Auto": plain,
        "Always": with_bos,
        "Never": plain,
    }
    assert data_by_rule["Auto"].identity == data_by_rule["Never"].identity != data_by_rule["Always"].identity
    tokenizer = load_tokenizer(file)
    tokenizer.encode_special_tokens = False
    table = pa.table({"text": [tokenizer.encode(BOS + text, add_special_tokens=False).ids for text in DOCUMENTS]})
    parquet.write_table(table, tmp_path / "ids.parquet")
    configs = {rule: text_config(tmp_path, tmp_path / "ids.parquet", bos=rule) for rule in ("Auto", "Always", "Never")}
    decoded = {rule: decode_all(open_data(config, 4)) for rule, config in configs.items()}
    assert decoded == {"Auto": with_bos, "Always": with_bos, "Never": plain}, (
        "token ids of a source are treated like text"
    )


def test_one_long_document_begins_once_whatever_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextInputs, "block_bytes", 200)
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    (tmp_path / "d.txt").write_text("\n".join(DOCUMENTS))
    text = decode_all(open_data(text_config(tmp_path, tmp_path / "d.txt", bos="Always"), 4))
    assert text == BOS + "\n".join(DOCUMENTS) + END_OF_TEXT


def test_text_that_is_tokenised_while_training_begins_alike(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    identities = set()
    for rule, start in (("Auto", ""), ("Always", BOS)):
        data = open_data(text_config(tmp_path, source, bos=rule, tokenization="Online"), 1)
        identities.add(data.identity)
        with closing(open_loader(data, Share(global_size=1, micro_size=1, dp_rank=0, dp_size=1))) as loader:
            ids = [token for step in range(6) for token in loader.read_batch(step).micro_batches[0].inputs[0].tolist()]
        text = load_tokenizer(data.tokenizer).decode(ids, skip_special_tokens=False)
        assert text.startswith(f"{start}{DOCUMENTS[0]}{END_OF_TEXT}{start}{DOCUMENTS[1]}{END_OF_TEXT}{start}")
    assert len(identities) == 2


def test_prepared_text_records_its_rule_for_bos_and_is_refused_under_another_rule(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS, bos=False)
    source = write_documents(tmp_path)
    for name, rule in (("with", "Always"), ("without", "Auto")):
        command = ["prepare-data", "--source", str(source), "--output", str(tmp_path / name), "--workers", "1"]
        completed = CliRunner().invoke(cli.app, [*command, "--tokenizer", str(tmp_path / "tokenizer"), "--bos", rule])
        assert completed.exit_code == 0, completed.output
    assert decode_all(open_data(text_config(tmp_path, tmp_path / "with", bos="Always", tokenizer={}), 4)).startswith(
        BOS
    )
    assert decode_all(open_data(text_config(tmp_path, tmp_path / "with", tokenizer={}), 4)).startswith(BOS), (
        "the rule of the preparation"
    )
    assert "bos_tokens" not in json.loads((tmp_path / "without" / "manifest.json").read_text())
    with pytest.raises(UserError, match=r"was prepared without BOS tokens, but data.bos is Always: leave out data.bos"):
        open_data(text_config(tmp_path, tmp_path / "without", bos="Always", tokenizer={}), 4)
    with pytest.raises(UserError, match=r"was prepared with BOS tokens, but data.bos is Never"):
        open_data(text_config(tmp_path, tmp_path / "with", bos="Never", tokenizer={}), 4)


def test_a_prompt_of_running_text_begins_as_documents_do(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    tokenizer = load_tokenizer(file)
    plain = tuple(tokenizer.encode("say", add_special_tokens=False).ids)
    ids = {
        rule: encode_prompts(["say"], text_config(tmp_path, source, bos=rule))[0].prompt_ids
        for rule in ("Auto", "Always", "Never")
    }
    assert ids == {"Auto": (), "Always": (tokenizer.token_to_id(BOS), *plain), "Never": plain}


@pytest.mark.parametrize("record_format", ["Text", "Instruction"])
def test_a_tokenizer_without_the_token_is_refused(tmp_path: Path, record_format: str) -> None:
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
    write_tokenizer(tmp_path / "tokenizer", specials=TEXT_SPECIALS)
    source = write_documents(tmp_path)
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps({"data": text_config(tmp_path, source, bos="Always").to_wire()}))
    assert cli.run(["show-data", "--config", str(run), "--samples", "2"]) == 0
    printed = capsys.readouterr().out
    assert BOS in printed
    assert "BOS token   Always" in printed
