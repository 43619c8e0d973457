"""Encode examples, and compare their tokens with those of transformers."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.testing.trainer.example_files import BOS, CHAT, CHATML, EOS, decode, encode, first_example, write_tokenizer
from trainium_trainer.data.tokens.tokenizer import count_entries, load_tokenizer

GENERATION = CHAT.replace("message['content'] | trim + '<|eot|>' }}", "'' }}").replace(
    "{% endfor %}{% if",
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot|>' }}{% endif %}{% endfor %}{% if",
)
MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": " what is a token? "},
    {"role": "assistant", "content": "a shard of text"},
    {"role": "user", "content": "and a mesh?"},
    {"role": "assistant", "content": "ranks in a net"},
]


def test_a_prompt_and_its_answer_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    reference = PreTrainedTokenizerFast.from_pretrained(file.parent)
    row = {"instruction": "say rank", "context": "", "response": "rank of a mesh"}
    ids, loss_mask = first_example(encode(tmp_path, [row]))
    prompt = "### Instruction\nsay rank\n\n### Answer\n"
    assert ids == [*reference(prompt + "rank of a mesh")["input_ids"], reference.eos_token_id]
    prompt_ids = reference(prompt)["input_ids"]
    assert ids[: len(prompt_ids)] == prompt_ids
    assert loss_mask == [False] * len(prompt_ids) + [True] * (len(ids) - len(prompt_ids))


@pytest.mark.parametrize("bos", [True, False])
def test_bos_and_eos_that_a_template_writes_are_not_doubled(tmp_path: Path, bos: bool) -> None:
    write_tokenizer(tmp_path / "tokenizer", bos=bos)
    template = {"prompt": BOS + "{q} ", "completion": "{a}" + EOS}
    assert decode(encode(tmp_path, [{"q": "why", "a": "so"}], examples={"template": template})) == [
        (f"{BOS}why so{EOS}", f"so{EOS}")
    ]


def test_text_in_the_form_of_a_special_token_in_a_record_is_text(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    row = {"q": f"is {EOS} the end", "a": f"no, {BOS} is not"}
    template = {"prompt": "<|head|>{q}\n", "completion": "{a}"}
    data = encode(tmp_path, [row], examples={"template": template})
    assert decode(data) == [(f"{BOS}<|head|>is {EOS} the end\nno, {BOS} is not{EOS}", f"no, {BOS} is not{EOS}")]
    ids, _ = first_example(data)
    tokenizer = load_tokenizer(file)
    assert ids.count(tokenizer.token_to_id(EOS)) == ids.count(tokenizer.token_to_id(BOS)) == 1
    assert ids[1] == tokenizer.token_to_id("<|head|>"), "a special token of the template is one"


def test_the_tokens_of_a_prompt_do_not_depend_on_the_answer(tmp_path: Path) -> None:
    rows = [{"q": "rank", "a": answer} for answer in ("\n\nnext", " blank", "plain", "s and more", "-")]
    template = {"prompt": "{q}\n", "completion": "{a}"}
    data = encode(tmp_path, rows, examples={"template": template})
    stored = data.sources[0].stored
    prompts = {tuple(stored.read_example(number)[0][: stored.answers[number]]) for number in range(len(rows))}
    assert len(prompts) == 1
    assert [answer for _, answer in decode(data)] == [f"{row['a']}{EOS}" for row in rows]


def test_a_conversation_has_the_tokens_of_transformers_and_only_answers_are_learned(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    reference = PreTrainedTokenizerFast.from_pretrained(file.parent)
    data = encode(tmp_path, [{"messages": MESSAGES}], format="Chat", sequence_length=96)
    ids, loss_mask = first_example(data)
    assert ids == reference.apply_chat_template(MESSAGES)["input_ids"]
    assert ids.count(reference.bos_token_id) == 1
    assert decode(data)[0][1] == "a shard of text<|eot|>ranks in a net<|eot|>"
    assert loss_mask[-1], "the end of the turn is learned"


def test_generation_markers_select_the_learned_tokens_as_in_transformers(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer", chat=GENERATION)
    reference = PreTrainedTokenizerFast.from_pretrained(file.parent)
    expected = reference.apply_chat_template(MESSAGES, return_assistant_tokens_mask=True)
    ids, loss_mask = first_example(encode(tmp_path, [{"messages": MESSAGES}], format="Chat", sequence_length=96))
    assert ids == expected["input_ids"]
    assert loss_mask == [bool(is_learned) for is_learned in expected["assistant_masks"]]
    assert any(loss_mask)


def test_the_line_break_after_a_turn_is_not_learned(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", chat=CHATML)
    data = encode(tmp_path, [{"messages": MESSAGES[1:]}], format="Chat", sequence_length=96)
    ((text, learned),) = decode(data)
    assert text.endswith("<|im_start|>assistant\nranks in a net<|im_end|>\n")
    assert learned == "a shard of text<|im_end|>ranks in a net<|im_end|>"


def test_a_special_token_in_a_message_is_text_and_the_answer_is_still_found(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "say <|eot|> é"}, {"role": "assistant", "content": "é <|eot|> is said"}]
    data = encode(tmp_path, [{"messages": messages}], format="Chat", sequence_length=96)
    assert decode(data)[0][1] == "é <|eot|> is said<|eot|>"
    ids, _ = first_example(data)
    assert ids.count(load_tokenizer(data.tokenizer).token_to_id("<|eot|>")) == 2


def test_a_chat_template_may_be_in_a_separate_file(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer", chat=None)
    file.with_name("chat_template.jinja").write_text(CHATML)
    (tmp_path / "mine.jinja").write_text(CHAT)
    for template, end in ({}, "<|im_end|>"), ({"template": str(tmp_path / "mine.jinja")}, "<|eot|>"):
        settings = {"chat": {"messagesField": "turns"} | template}
        data = encode(tmp_path, [{"turns": MESSAGES[1:3]}], format="Chat", examples=settings, sequence_length=96)
        assert decode(data)[0][1] == f"a shard of text{end}"


def test_loss_on_all_learns_the_prompt_too(tmp_path: Path) -> None:
    ((text, learned),) = decode(encode(tmp_path, [{"instruction": "a", "response": "b"}], examples={"loss": "All"}))
    assert learned == text


def test_added_special_tokens_count_as_vocabulary(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    tokenizer = load_tokenizer(file)
    before = count_entries(file)
    assert before == tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens(["<|new|>", "<|newer|>"])
    tokenizer.save(str(file))
    assert count_entries(file) == before + 2
    data = encode(tmp_path, [{"instruction": "a", "response": "b"}])
    assert data.training.rules.vocabulary == before + 2
    assert data.training.rules.padding == tokenizer.token_to_id("<|pad|>")
    assert data.sources[0].stored.read_example(0)[0].max() < before


PRIVATE = "".join(
    map(chr, (0xE000, 0xF0000, 0xF0001, 0xFFFF0, 0xFFFF1, 0xFFFFD, 0x100000, 0x10FFFD, 0x10FFFE, 0x10FFFF))
)
ICONS = f"an icon {PRIVATE} beside <|eot|> of a mesh"


@pytest.mark.parametrize("template", [CHAT, CHATML, GENERATION, "\U0010fffe{# \U000f0001 #}" + CHATML])
def test_private_characters_in_a_conversation_are_text(tmp_path: Path, template: str) -> None:
    """A template passes special tokens of the data as characters, which the data may have too."""
    file = write_tokenizer(tmp_path / "tokenizer", chat=template)
    reference = PreTrainedTokenizerFast.from_pretrained(file.parent)
    messages = [{"role": "user", "content": ICONS}, {"role": "assistant", "content": PRIVATE}]
    ids, loss_mask = first_example(encode(tmp_path, [{"messages": messages}], format="Chat", sequence_length=256))
    assert reference.decode(ids) == reference.apply_chat_template(messages, tokenize=False)
    learned = [number for number, is_learned in zip(ids, loss_mask, strict=True) if is_learned]
    assert reference.decode(learned, skip_special_tokens=True) == PRIVATE
    turns = reference.convert_tokens_to_ids("<|im_end|>" if CHATML in template else "<|eot|>")
    assert ids.count(turns) == 2, "the token in the text of the user is none"
    assert set(ids).isdisjoint(reference.convert_tokens_to_ids([EOS, "<|pad|>"]))


def test_a_conversation_with_every_private_character_is_read(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    every = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x110000)]))
    messages = [{"role": "user", "content": every + EOS}, {"role": "assistant", "content": "a shard"}]
    data = encode(tmp_path, [{"messages": messages}], format="Chat", sequence_length=600_000)
    assert decode(data)[0][0].count(every + EOS) == 1


@pytest.mark.parametrize(
    ("record_format", "row"),
    [
        ("Instruction", {"instruction": ICONS, "response": PRIVATE}),
        ("Preference", {"prompt": ICONS, "chosen": PRIVATE, "rejected": "a mesh"}),
        ("Classification", {"question": ICONS, "sentence": "", "label": 0}),
    ],
)
def test_private_characters_in_a_record_are_text(tmp_path: Path, record_format: str, row: dict[str, Any]) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    labels = {"classification": {"labels": [PRIVATE, "no"]}}
    data = encode(tmp_path, [row], format=record_format, sequence_length=256, examples=labels)
    text, learned = decode(data)[0]
    assert ICONS in text
    assert learned.strip() == f"{PRIVATE}{EOS}"
    ids, _ = first_example(data)
    assert load_tokenizer(file).token_to_id("<|eot|>") not in ids


def test_a_special_token_that_parts_of_a_message_form_together_is_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer", chat=CHAT.replace("| trim", "| tojson(true)"))
    parts = [{"type": "text", "text": "<|eo"}, {"type": "text", "text": "t|> \U0010ffff"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a shard"}]
    data = encode(tmp_path, [{"messages": messages}], format="Chat", sequence_length=96)
    assert '"<|eot|> \\udbff\\udfff"' in decode(data)[0][0], "escaped as the template asks"
    ids, _ = first_example(data)
    assert ids.count(load_tokenizer(data.tokenizer).token_to_id("<|eot|>")) == 2
