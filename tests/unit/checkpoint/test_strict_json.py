from __future__ import annotations

from pathlib import Path

import pytest

import zero_infinity as zi
from zero_infinity.checkpoint.strict_json import JsonFields, parse, read_bytes

PATH = Path("/x/file.json")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b'{"a": 1, "a": 1}', "the name 'a' appears twice"),
        (b'{"a": {"b": 1, "b": 2}}', "the name 'b' appears twice"),
        (b'{"a": -Infinity}', "-Infinity is not valid JSON"),
        (b"3", "it is a int, not a JSON object"),
        (b"[" * 100_000, "damaged"),
        (b"\xff", "damaged"),
    ],
)
def test_one_meaning_or_an_error_that_names_the_file(data: bytes, problem: str) -> None:
    with pytest.raises(zi.CheckpointError, match=problem) as caught:
        parse(data, PATH)
    assert str(PATH) in str(caught.value)


def test_fields() -> None:
    fields = JsonFields({"a": "b", "n": 3, "l": [1, 2], "t": ["x"], "o": {}}, "here")
    assert (fields.text("a"), fields.count("n"), fields.counts("l")) == ("b", 3, (1, 2))
    assert (fields.texts("t"), fields.table("o"), fields.items("l")) == (("x",), {}, [1, 2])
    with pytest.raises(zi.CheckpointError, match="here is damaged: 'zz' is None, not int"):
        fields.count("zz")
    with pytest.raises(zi.CheckpointError, match="'l' has items that are not strings"):
        fields.texts("l")
    with pytest.raises(zi.CheckpointError, match="-1 is not a valid number"):
        JsonFields({"n": -1}, "here").count("n")


def test_a_file_that_is_missing_or_too_large(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(zi.CheckpointError, match="a is larger than 4 B"):
        read_bytes(tmp_path / "a", 4)
    with pytest.raises(zi.CheckpointError, match="b is missing"):
        read_bytes(tmp_path / "b", 4)
    with pytest.raises(zi.StorageError, match="cannot be read"):
        read_bytes(tmp_path, 4)
