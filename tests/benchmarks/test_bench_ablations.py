"""`python -m benchmarks ablations`, run for real on a tiny model; and that what is left out is really left out."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

import zero_infinity as zi
from benchmarks.__main__ import main
from benchmarks.ablations import command
from benchmarks.engine_variants import PolicyWithoutPrefetch, engine_parts
from zero_infinity import api
from zero_infinity.engine_parts import DEFAULT_PARTS, EngineParts
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.policy.cache_policy import Decision

TINY = "--layers=2 --hidden=128 --seq=16 --steps=1 --warmup=3 --timeout=240".split()  # noqa: SIM905 - as typed


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def train(nvme: Path, parts: EngineParts = DEFAULT_PARTS, num_steps: int = 4) -> tuple[list[float], zi.Stats]:
    """Losses, and what the last step did."""
    torch.manual_seed(0)
    model = ByteGPT(Shape(layers=4, hidden=128, heads=2, seq=16))
    config = zi.Config(memory=6 << 20, nvme=nvme)
    model, optimizer = api.prepare_with(parts, model, torch.optim.AdamW(model.parameters(), fused=True), config)
    losses = []
    for step in range(num_steps):
        tokens = torch.randint(0, 256, (1, 17), generator=torch.Generator().manual_seed(step))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    zi.synchronize(model)
    return losses, zi.stats(model)


def test_without_a_cache_everything_is_read_every_time_and_the_losses_are_equal(tmp_path: Path) -> None:
    losses, whole = train(tmp_path)
    same, without = train(tmp_path, engine_parts(["cache"]))
    assert same == losses
    assert without.bytes_read > 1.2 * whole.bytes_read
    # Parameters twice, their states once; resident ones and the first step's, which has none to read, are not among it.
    assert without.bytes_read > 3 * 16 * 0.8 * whole.num_parameters


def test_without_prefetch_nothing_is_fetched_ahead(tmp_path: Path) -> None:
    losses, _ = train(tmp_path)
    decisions: list[Decision] = []

    class Watched(PolicyWithoutPrefetch):
        def access(self, block: int) -> Decision:
            decision = super().access(block)
            assert decision.fetch in ((), (block,))
            decisions.append(decision)
            return decision

    assert engine_parts(["prefetch"]).make_policy is PolicyWithoutPrefetch
    assert train(tmp_path, EngineParts(make_policy=Watched))[0] == losses
    assert any(decision.fetch for decision in decisions)


def test_a_slow_drive_is_slow(tmp_path: Path) -> None:
    start = time.perf_counter()
    _, stats = train(tmp_path, engine_parts([], bytes_per_second=20e6), 2)
    # A sleep is never shorter than asked for, so this is not a matter of the machine.
    assert time.perf_counter() - start > 0.8 * (stats.bytes_read + stats.bytes_written) / 20e6


def test_what_a_rank_sends_takes_its_time_on_a_slow_link() -> None:
    traffic = engine_parts([], bytes_per_second=20e6).make_traffic()
    start = time.perf_counter()
    for _ in range(2):
        traffic.add("gather", 2_000_000)
    assert time.perf_counter() - start >= 0.2
    assert traffic.snapshot() == ({"gather": 4_000_000}, {"gather": 2})


@pytest.mark.long
def test_a_real_run_of_a_few_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ONE_RANK", command.ONE_RANK[:2])
    places = ["--nvme", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["ablations", *TINY, "--batches=1", "--links=200MB/s", "--one-rank", *places]) == 0
    cell, half, device = json.loads((tmp_path / "out" / "ablations.json").read_text())["cells"]
    assert [row["name"] for row in cell["rows"]] == ["whole engine", "no prefetch"]
    assert [row["name"] for row in half["rows"]] == ["half of the states in RAM", "half in RAM, no cache"]
    assert [row["name"] for row in device["rows"]] == ["on a device", "on a device, no prefetch"]
    rows = [row for group in (cell, half, device) for row in group["rows"]]
    assert all(row["equal_losses"] and row["error"] is None for row in rows)
    # How much more is read without a cache depends on timing in so small a model: see the test above.
    assert all(row["read_bytes"] > 0 for row in cell["rows"])
    assert half["rows"][0]["held_bytes"] > 2 * cell["rows"][0]["held_bytes"]
    assert (tmp_path / "out" / "ablations.svg").exists()
    assert "half in RAM, no cache" in capsys.readouterr().out
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.long
def test_every_variant_runs(tmp_path: Path) -> None:
    places = ["--nvme", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["ablations", *TINY, "--hidden=256", "--batches=2", "--links=real", *places]) == 0


def test_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablations", "--batches", "0,4"]) == 2
    assert main(["ablations", "--links", "fast"]) == 2
    assert "--batches 0,4" in capsys.readouterr().err
