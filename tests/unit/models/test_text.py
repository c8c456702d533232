from __future__ import annotations

import os
import sysconfig
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
import torch

from zero_infinity import ConfigError, StorageError
from zero_infinity.models.text import ByteBatches, Text, collect, standard_library


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three text files (one empty, one in a folder) among things that are none."""
    for name, content in {
        "b.txt": b"bbbbb",
        "a/z.md": "zäz".encode(),
        "empty.txt": b"",
        "a.txt": b"aaa",
        "image.png": b"\x89PNG\0\0",
        ".hidden": b"hidden",
        ".git/config": b"hidden",
        "__pycache__/a.txt": b"cache",
        "lib/site-packages/p.py": b"package",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return tmp_path


def whole(text: Text) -> bytes:
    return bytes(text.read(0, text.num_bytes))


def test_a_folder_is_its_text_files_in_order(folder: Path) -> None:
    text = collect([folder])
    assert [str(file.relative_to(folder)) for file in text.files] == ["a.txt", "b.txt", "a/z.md"]
    assert whole(text) == b"aaabbbbb" + "zäz".encode()


def test_files_keep_the_order_in_which_they_are_named_and_count_once(folder: Path) -> None:
    text = collect([folder / "b.txt", folder / "a.txt", folder / "b.txt"])
    assert whole(text) == b"bbbbbaaa"


def test_a_file_that_is_named_may_be_anything(folder: Path) -> None:
    assert whole(collect([folder / "image.png"])) == b"\x89PNG\0\0"


def test_windows_go_over_the_ends_of_files(tmp_path: Path) -> None:
    contents = [bytes([number]) * (number + 1) for number in range(7)]
    files = []
    for number, content in enumerate(contents):
        files.append(tmp_path / str(number))
        files[-1].write_bytes(content)
    text = Text.from_files(files)
    everything = b"".join(contents)
    assert text.num_bytes == len(everything)
    for start in range(len(everything)):
        for end in range(start, len(everything) + 1):
            assert bytes(text.read(start, end - start)) == everything[start:end]


def test_a_batch_is_windows_and_the_byte_after(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)))
    inputs, targets = next(ByteBatches(collect([file]), batch=5, seq=16))
    assert inputs.shape == targets.shape == (5, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)
    assert len(set(inputs[:, 0].tolist())) > 1


def test_the_shortest_text_and_its_last_byte_are_used(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcd")
    inputs, targets = next(ByteBatches(collect([file]), batch=1, seq=3))
    assert bytes(inputs[0].tolist()) == b"abc"
    assert bytes(targets[0].tolist()) == b"bcd"
    starts = {next(ByteBatches(collect([file]), 1, 2, seed=seed))[0][0, 0].item() for seed in range(20)}
    assert starts == {ord("a"), ord("b")}


def same(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_batches_depend_on_seed_and_position_alone() -> None:
    text = standard_library()
    batches = list(islice(ByteBatches(text, 2, 64, seed=3), 4))
    again = ByteBatches(text, 2, 64, seed=3)
    assert all(same(batch, next(again)) for batch in batches)
    assert again.position == 4
    resumed = ByteBatches(text, 2, 64, seed=3, position=2)
    assert same(next(resumed), batches[2])
    assert not same(batches[0], batches[1])
    assert not same(next(ByteBatches(text, 2, 64, seed=4)), batches[0])


def test_the_default_is_the_source_of_the_standard_library() -> None:
    text = standard_library()
    library = Path(sysconfig.get_path("stdlib"))
    assert library / "argparse.py" in text.files
    assert all(file.suffix == ".py" and "site-packages" not in file.parts for file in text.files)
    assert text.num_bytes > 5_000_000
    assert text == standard_library()


def test_memory_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as handle:
        handle.truncate(1 << 33)  # sparse: 8 GiB that take no space
    tracemalloc.start()
    try:
        next(ByteBatches(collect([file]), 4, 256))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_too_short(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abcd")
    with pytest.raises(ConfigError, match="the data is 4 B of text, but a sequence takes 5 bytes"):
        ByteBatches(collect([file]), batch=1, seq=4)


def test_no_text_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / 'missing'} does not exist"):
        collect([tmp_path / "missing"])
    with pytest.raises(ConfigError, match=f"there is no text in {tmp_path}"):
        collect([tmp_path])
    with pytest.raises(ConfigError, match="/dev/null is neither a file nor a folder"):
        collect([Path("/dev/null")])


def test_a_file_that_shrinks_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(100))
    batches = ByteBatches(collect([file]), batch=1, seq=50)
    file.write_bytes(bytes(10))
    with pytest.raises(ConfigError, match=f"{file} has become shorter"):
        next(batches)


def test_a_file_that_goes_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(100))
    batches = ByteBatches(collect([file]), batch=1, seq=50)
    os.remove(file)
    with pytest.raises(StorageError, match="cannot be read: No such file") as caught:
        next(batches)
    assert caught.value.filename == str(file)
