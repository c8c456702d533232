"""Rank 1's channel to a rank 0 that says what the test wants."""

from __future__ import annotations

from collections.abc import Sequence

from zero_infinity.comm.topics import Topic


class Scripted:
    """`of_first` is the number that rank 0 says, `text_of_first` the text; `error` is raised instead."""

    def __init__(self, of_first: int = 0, text_of_first: str = "", error: Exception | None = None) -> None:
        self._of_first, self._text, self._error = of_first, text_of_first, error
        self.topics: list[Topic] = []
        self.texts: list[str] = []

    def agree(self, topic: Topic, say: Sequence[int]) -> list[list[int]]:
        if self._error is not None:
            raise self._error
        self.topics.append(topic)
        return [[self._of_first], list(say)]

    def tell(self, _: Topic, text: str) -> list[str]:
        self.texts.append(text)
        return [self._text, text]
