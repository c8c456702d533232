"""Strict JSON from untrusted files: duplicate names, NaN and wrong types are errors with a place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.checkpoint.regular_files import open_regular
from zero_infinity.errors import CheckpointError, StorageError

Kind = TypeVar("Kind")

_MAX_NAME = 4096  # characters; a module path of a hundred levels has a tenth of that


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file that should be small."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise StorageError(error.errno, f"{path} cannot be read: {error.strerror}", str(path)) from None
    if len(data) > limit:
        raise CheckpointError(f"{path} is larger than {format_bytes(limit)}, the limit for such a file")
    return data


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object; duplicate names, NaN and infinities, and excessive nesting are errors."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it is a {type(value).__name__}, not a JSON object")
    return value


class JsonFields:
    """The fields of a JSON object. Each accessor raises if the field is missing or has another type."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise CheckpointError(f"{where} is damaged: it is a {type(value).__name__}, not a JSON object")
        self.values: dict[str, Any] = value
        self.where = where

    def text(self, name: str) -> str:
        return self._of_type(name, str)

    def count(self, name: str) -> int:
        return as_count(self._of_type(name, int), f"{self.where}, {name!r}")

    def counts(self, name: str) -> tuple[int, ...]:
        return tuple(as_count(item, f"{self.where}, {name!r}") for item in self._of_type(name, list))

    def texts(self, name: str) -> tuple[str, ...]:
        items = self._of_type(name, list)
        if not all(isinstance(item, str) for item in items):
            raise CheckpointError(f"{self.where} is damaged: {name!r} has items that are not strings")
        return tuple(items)

    def table(self, name: str) -> dict[str, Any]:
        return self._of_type(name, dict)

    def items(self, name: str) -> list[Any]:
        return self._of_type(name, list)

    def _of_type(self, name: str, kind: type[Kind]) -> Kind:
        value = self.values.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f"{self.where} is damaged: {name!r} is {_shown(value)}, not {kind.__name__}")
        return value


def as_count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise CheckpointError(f"{where}: {_shown(value)} is not a valid number of bytes or elements")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {_shown(name)} appears twice")
        if len(name) > _MAX_NAME:
            raise ValueError(f"a name of {len(name):,} characters, {_shown(name)}")
        result[name] = value
    return result


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not valid JSON")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
