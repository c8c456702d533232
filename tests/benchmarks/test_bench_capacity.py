from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.patience import SECONDS

from benchmarks.__main__ import main
from benchmarks.capacity import Trainee, Trial, Way, largest
from benchmarks.control_group import control_group
from benchmarks.turns.messages import Race, Setting
from zero_infinity.errors import ConfigError

MIB = 1 << 20


@pytest.fixture
def groups() -> None:
    try:
        with control_group(64 * MIB):
            pass
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fits", range(13))
def test_the_largest_is_found_by_halving(fits: int) -> None:
    tried: list[int] = []

    def attempt(_: Way, layers: int, limit: int | None) -> Trial:
        tried.append(layers)
        assert limit == 7
        return Trial(layers, layers, (), 1.0, 1.0, None, None if layers <= fits else "too large")

    found = largest(Way("any"), 12, 7, attempt)
    assert (found.largest.layers if found.largest else 0) == fits
    assert (found.failed.layers if found.failed else None) == (fits + 1 if fits < 12 else None)
    assert tried[0] == 12
    assert len(tried) == len(set(tried)) <= 5


@pytest.mark.long
def test_a_model_that_the_kernel_kills_trains_within_the_same_limit(groups: None, tmp_path: Path) -> None:
    race = Race(layers=12, hidden=512, heads=4, batch=1, seq=8, seed=0, lr=1e-3, num_steps=3)  # 585 MiB of states
    limit = 512 * MIB

    def train(way: Way) -> Trial:
        return Trainee(race, way, str(tmp_path), "", timeout=SECONDS).train(limit, lambda _: None)

    plain = train(Way("plain"))
    assert plain.error == "killed by the kernel: more than 512.0 MiB of memory"
    ours = train(Way("ours", Setting("ours", 96 * MIB, str(tmp_path))))
    assert ours.error is None
    assert len(ours.losses) == 3
    assert all(map(math.isfinite, ours.losses))
    assert ours.peak_bytes is None or ours.peak_bytes <= limit
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("reference", "code", "text"), [(1.0, 0, "equal, bit for bit"), (1.5, 1, "DIFFERENT")])
def test_a_difference_to_the_run_without_a_limit_fails_the_command(
    reference: float,
    code: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(self: Trainee, limit: int | None, say: object) -> Trial:
        loss = 1.0 if limit is not None else reference
        fails = self.way.setting is not None and self.way.setting.memory is None and limit is not None
        assert self.race.num_steps == (3 if fails else 6)
        return Trial(self.race.layers, 10, (loss,), 2.0, 1.0, None, "killed" if fails else None, 3 * 10**9)

    monkeypatch.setattr(Trainee, "train", train)
    monkeypatch.setattr("benchmarks.capacity.drive_alone", lambda *_: 2e9)
    assert main(["capacity", str(tmp_path), "--out", str(tmp_path / "out")]) == code
    found = json.loads((tmp_path / "out" / "capacity.json").read_text())
    assert found["capacities"][1]["largest"]["losses"] == [1.0]
    assert found["without_a_limit"]["losses"] == [reference]
    assert found["drive"] == 2e9
    out = capsys.readouterr().out
    assert text in out
    assert "1.50 GB/s: 0.75 of what the drive does alone" in out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", str(tmp_path / "no")]) == 2
    assert main(["capacity", str(tmp_path), "--hidden", "100"]) == 2
    assert "multiple of 64" in capsys.readouterr().err
