"""Seeded batches of tokens for a model of one's own: rows of JSON lines, or windows of text, through a tokenizer.

Batch `i` depends only on the seed and `i`, as that of `text.py`. Memory is bounded: of JSON lines only their places are
kept; a row is read and tokenized when its batch comes.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_tokenizer import NOT_LEARNT, Row, RowReader
from zero_infinity.models.text import Text

_BYTES_PER_TOKEN = 8  # read for a window at first; more, if that is not enough


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What the model is called with, and the number of tokens whose prediction is learnt."""

    inputs: dict[str, Tensor]
    num_learnt: int


class Rows(Protocol):
    """Where rows come from."""

    def choose(self, seed: int, number: int) -> Row:
        """Return the `number`-th row of the endless sequence that `seed` gives."""
        ...

    def describe(self) -> str:
        """Return how much data there is; the same on every rank."""
        ...


class JsonLines:
    """Rows of JSON lines files: each once in an epoch, in a new order every time."""

    def __init__(self, files: Sequence[Path], reader: RowReader) -> None:
        self._files = list(files)
        self._reader = reader
        self._places = array("q")  # file, byte, line of each row
        for number, file in enumerate(self._files):
            self._find_rows(number, file)
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])
        if not self._places:
            raise ConfigError(f"data: there is no row in {', '.join(map(str, files))}")

    def __len__(self) -> int:
        return len(self._places) // 3

    def _find_rows(self, number: int, file: Path) -> None:
        try:
            with file.open("rb") as lines:
                start = 0
                for line_number, line in enumerate(lines, start=1):
                    if line.strip():
                        self._places.extend((number, start, line_number))
                    start += len(line)
        except OSError as error:
            raise ConfigError(f"data: {file} cannot be read: {error.strerror}") from None

    def choose(self, seed: int, number: int) -> Row:
        epoch, index = divmod(number, len(self))
        if self._order[0] != (seed, epoch):
            order = list(range(len(self)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            self._order = (seed, epoch), order
        return self.row(self._order[1][index])

    def row(self, index: int) -> Row:
        """Return a row by its number in the files."""
        file_number, start, line = self._places[3 * index : 3 * index + 3]
        file = self._files[file_number]
        place = f"data: {file}, line {line}"
        with file.open("rb") as lines:
            lines.seek(start)
            text = lines.readline()
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON: {error}\n  fix:   one object on each line") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{place} is not an object\n  fix:   one object on each line")
        return self._reader.read(values, place)

    def describe(self) -> str:
        return f"{len(self):,} rows"


class TextWindows:
    """Windows of a text that start anywhere in it."""

    def __init__(self, text: Text, tokenizer: Any, length: int) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._length = length

    def choose(self, seed: int, number: int) -> Row:
        start = random.Random(f"{seed}/{number}").randrange(self._text.num_bytes)
        wanted = self._length * _BYTES_PER_TOKEN
        while True:
            data = self._text.read(start, min(wanted, self._text.num_bytes - start))
            tokens: list[int] = self._tokenizer(data.decode("utf-8", "ignore"), add_special_tokens=False)["input_ids"]
            # The last token may be a part of a longer one.
            if len(tokens) > self._length or (start + len(data) == self._text.num_bytes and len(tokens) > 1):
                return Row(tokens[: self._length], tokens[: self._length])
            if start + len(data) == self._text.num_bytes:
                if start == 0:
                    raise ConfigError("data: the text has fewer than two tokens\n  fix:   --data with more text")
                start = max(0, start - wanted)
            wanted *= 2

    def describe(self) -> str:
        return f"{self._text.num_bytes:,} bytes of text"


@dataclass(slots=True)
class TokenBatches:
    """Endless batches of rows. `position` is the number of the next batch."""

    rows: Rows
    batch: int
    length: int  # longer rows are cut
    pad: int
    seed: int = 0
    position: int = 0
    # Each rank takes its own slice of the batch of `num_ranks * batch` that a single rank would take.
    rank: int = 0
    num_ranks: int = 1

    def __iter__(self) -> Iterator[TokenBatch]:
        return self

    def __next__(self) -> TokenBatch:
        first = (self.position * self.num_ranks + self.rank) * self.batch
        rows = [self.rows.choose(self.seed, number) for number in range(first, first + self.batch)]
        self.position += 1
        return self._batch([Row(row.tokens[: self.length], row.labels[: self.length]) for row in rows])

    def _batch(self, rows: list[Row]) -> TokenBatch:
        length = max(2, *(len(row.tokens) for row in rows))
        tokens = torch.full((len(rows), length), self.pad)
        labels = torch.full((len(rows), length), NOT_LEARNT)
        mask = torch.zeros((len(rows), length), dtype=torch.long)
        for number, row in enumerate(rows):
            tokens[number, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.long)
            labels[number, : len(row.tokens)] = torch.tensor(row.labels, dtype=torch.long)
            mask[number, : len(row.tokens)] = 1
        # The model shifts labels by one: nothing predicts the first token.
        num_learnt = int((labels[:, 1:] != NOT_LEARNT).sum())
        if not num_learnt:
            labels = tokens  # a mean over nothing is not a number; this loss counts as nothing
        return TokenBatch({"input_ids": tokens, "attention_mask": mask, "labels": labels}, num_learnt)
