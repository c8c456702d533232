"""Batches of rows: each row once in an epoch, ranks share what one would have, and windows of text."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_tokenizer import NOT_LEARNT, Row
from zero_infinity.models.text import Text
from zero_infinity.models.token_batches import JsonLines, TextWindows, TokenBatches


class Numbers:
    """Reads a row of `n` as n tokens n, of which the first is not learnt."""

    def read(self, row: Any, place: str) -> Row:
        tokens = [row["n"]] * row["n"]
        return Row(tokens, [NOT_LEARNT, *tokens[1:]])


class Words:
    """A tokenizer: the number of each word."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def lines(folder: Path, *counts: int) -> JsonLines:
    files = [folder / f"{number}.jsonl" for number in range(2)]
    half = len(counts) // 2
    for file, part in zip(files, (counts[:half], counts[half:]), strict=True):
        file.write_text("\n".join(["", *(json.dumps({"n": count}) for count in part)]))
    return JsonLines(files, Numbers())  # type: ignore[arg-type]


def batches(rows: Any, **settings: int) -> TokenBatches:
    return TokenBatches(rows, **{"batch": 2, "length": 8, "pad": 0} | settings)


def test_each_row_comes_once_in_an_epoch_in_a_new_order(tmp_path: Path) -> None:
    rows = lines(tmp_path, 2, 3, 4, 5, 6, 7)
    assert rows.describe() == "6 rows"
    epochs = [[rows.choose(0, 6 * epoch + n).tokens[0] for n in range(6)] for epoch in range(3)]
    assert all(sorted(epoch) == [2, 3, 4, 5, 6, 7] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != [rows.choose(1, n).tokens[0] for n in range(6)]


def test_a_batch_is_padded_and_cut(tmp_path: Path) -> None:
    batch = next(batches(lines(tmp_path, 3, 5), length=4))
    by_first = {int(row[0]): number for number, row in enumerate(batch.inputs["input_ids"])}
    three, five = by_first[3], by_first[5]
    assert batch.inputs["input_ids"][three].tolist() == [3, 3, 3, 0]
    assert batch.inputs["attention_mask"][three].tolist() == [1, 1, 1, 0]
    assert batch.inputs["labels"][three].tolist() == [NOT_LEARNT, 3, 3, NOT_LEARNT]
    assert batch.inputs["input_ids"][five].tolist() == [5, 5, 5, 5]
    assert batch.num_learnt == 2 + 3


def test_nothing_to_learn_is_counted_as_nothing(tmp_path: Path) -> None:
    batch = next(batches(lines(tmp_path, 1, 1)))
    assert batch.num_learnt == 0
    assert not (batch.inputs["labels"] == NOT_LEARNT).any()


def test_ranks_share_what_one_rank_would_have_and_go_on_from_a_position(tmp_path: Path) -> None:
    rows = lines(tmp_path, *range(2, 10))
    one = batches(rows, batch=4)
    two = [batches(rows, rank=rank, num_ranks=2) for rank in range(2)]
    for _ in range(3):
        whole = next(one).inputs["input_ids"][:, 0].tolist()
        assert whole == [n for part in two for n in next(part).inputs["input_ids"][:, 0].tolist()]
    again = batches(rows, batch=4, position=2)
    assert next(again).inputs["input_ids"][:, 0].tolist() == whole


def test_windows_have_whole_tokens_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(" ".join(str(n) for n in range(1000, 1400)))
    windows = TextWindows(Text.from_files([path]), Words(), 12)
    assert windows.describe() == "1,999 bytes of text"
    lengths = Counter()
    for number in range(200):
        tokens = windows.choose(0, number).tokens
        lengths[len(tokens)] += 1
        start = tokens[1]  # the first one may begin in the middle of a number
        assert tokens[1:] == list(range(start, start + len(tokens) - 1))
    assert lengths[12] > 150
    assert min(lengths) >= 2
    batch = next(batches(windows, length=12))
    assert batch.num_learnt == int((batch.inputs["attention_mask"][:, 1:] == 1).sum())
    assert torch.equal(batch.inputs["labels"][0], batch.inputs["input_ids"][0])


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]\n", "line 1 is not an object"), ("\n{\n", "line 2 is not JSON"), ("\n", "there is no row in")],
)
def test_a_damaged_file_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        JsonLines([tmp_path / "x.jsonl"], Numbers()).row(0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be read"):
        JsonLines([tmp_path / "none.jsonl"], Numbers())  # type: ignore[arg-type]


def test_a_text_of_one_token_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("7")
    windows = TextWindows(Text.from_files([tmp_path / "text"]), Words(), 4)
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        windows.choose(0, 0)
