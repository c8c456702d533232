"""Tokenizers of folders, and rows as tokens and labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.trainers import save_pretrained_folder

from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_tokenizer import NOT_LEARNT, RowReader, read_tokenizer

KEEPS = "{% for m in messages %}{{ m['role'][0] | replace('u', 'w1') | replace('a', 'w2') }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
FORGETS = "{{ messages[-1]['content'] }}"
CHAT = [
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": "w6 w7"},
    {"role": "user", "content": "w8"},
    {"role": "assistant", "content": "w9"},
]
# "[PAD]" is 0 and ends a text, "[UNK]" is 1, "w0" is 2.
A, U = 2 + 2, 1 + 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    save_pretrained_folder(folder)
    return read_tokenizer(folder)


def labels(row: Any) -> list[int | None]:
    return [None if label == NOT_LEARNT else label for label in row.labels]


def test_answers_are_learnt_without_what_prompts_them(tokenizer: Any) -> None:
    tokenizer.chat_template = KEEPS
    row = RowReader(tokenizer).read({"messages": CHAT}, "here")
    assert row.tokens == [U, 7, A, 8, 9, U, 10, A, 11]
    assert labels(row) == [None, None, None, 8, 9, None, None, None, 11]
    assert RowReader(tokenizer, everything=True).read({"conversations": CHAT}, "here").labels == row.tokens
    assert RowReader(tokenizer).read({"prompt": CHAT[:3], "completion": CHAT[3:]}, "here") == row


def test_completions_and_texts_end(tokenizer: Any) -> None:
    row = RowReader(tokenizer).read({"prompt": "w1 w2", "completion": "w3"}, "here")
    assert (row.tokens, labels(row)) == ([3, 4, 5, 0], [None, None, 5, 0])
    row = RowReader(tokenizer).read({"text": "w1 w2"}, "here")
    assert (row.tokens, row.labels) == ([3, 4, 0], [3, 4, 0])


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (FORGETS, {"messages": CHAT}, "does not keep earlier messages"),
        (None, {"messages": CHAT}, "has no chat template"),
        ("{{ messages[0]['content'].missing() }}", {"messages": CHAT}, "does not fit the chat template"),
        (KEEPS, {"question": "w1"}, "here has 'question'"),
        (KEEPS, {"text": 5}, "here has 'text'"),
        (KEEPS, {}, "here has no names"),
    ],
)
def test_what_cannot_be_read_is_told(template: str | None, row: dict[str, Any], message: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        RowReader(tokenizer).read(row, "here")


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no config.json"):
        read_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="has no tokenizer that can be read"):
        read_tokenizer(tmp_path)
