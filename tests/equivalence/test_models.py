"""Models of many kinds train bit-identically to plain PyTorch, wherever their states live."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.compare import FITS_RAM, MINIMAL, SETTINGS, Setting, adamw, compare, minimal_memory, training
from support.device import IS_CPU
from support.models import CASES, mean_square, mlp, vectors

import zero_infinity as zi
from zero_infinity.policy import chunk_size, homes

_SMALL_BYTES = homes._SMALL_BYTES
_MIN_CHUNK_BYTES = chunk_size.MIN_CHUNK_BYTES


# On the test device a model in `make test` is all on the device, or in as little memory as possible.
CHOSEN = [s if IS_CPU or s in (FITS_RAM, MINIMAL) else pytest.param(s, marks=pytest.mark.long) for s in SETTINGS]


@pytest.mark.half
@pytest.mark.parametrize("setting", CHOSEN, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_five_steps_are_bit_identical(name: str, setting: Setting, tmp_path: Path) -> None:
    case = CASES[name]
    stats = compare(case.make, training(case.batch, case.loss), adamw, setting, tmp_path)
    assert stats.num_steps == 5


@pytest.mark.parametrize("name", ["mlp", "gpt2", "tied"])
def test_one_byte_less_than_the_minimum_is_refused(name: str, tmp_path: Path) -> None:
    make = CASES[name].make
    minimum = minimal_memory(make, adamw)
    model = make()
    with pytest.raises(zi.CapacityError, match="memory="):
        # Or else layers would be used in tiles.
        zi.prepare(model, adamw(model), zi.Config(memory=minimum - 1, nvme=tmp_path, tile_above="1GiB"))
    zi.prepare(model, adamw(model), zi.Config(memory=minimum, nvme=tmp_path))


WAITING = (
    [*CASES] if IS_CPU else [pytest.param(c, marks=[] if c in ("tied", "t5") else pytest.mark.long) for c in CASES]
)


@pytest.mark.parametrize("name", WAITING)
def test_gradients_that_wait_for_step_stream_too(name: str, tmp_path: Path) -> None:
    """update="after_backward" retains every gradient in blocks."""
    case = CASES[name]
    compare(case.make, training(case.batch, case.loss, num_steps=3), adamw, MINIMAL, tmp_path, update="after_backward")


def test_checksums_and_striping_change_no_number(tmp_path: Path) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    case = CASES["gpt2"]
    compare(case.make, training(case.batch, case.loss), adamw, MINIMAL, drives, verify=True)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_usual_block_sizes(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own rules for what is small and how large a chunk is, on a model that is large enough for them."""
    monkeypatch.setattr(homes, "_SMALL_BYTES", _SMALL_BYTES)
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", _MIN_CHUNK_BYTES)
    make = lambda: mlp(width=384, depth=5)
    compare(make, training(vectors(384, 4), mean_square, num_steps=4), adamw, setting, tmp_path)
