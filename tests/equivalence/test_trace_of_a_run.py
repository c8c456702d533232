"""A run with a trace: the same bits, and a record that agrees with the engine's own counters."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.compare import FITS_RAM, HALF, MINIMAL, SETTINGS, Setting, adamw, compare, training
from support.device import DEVICE, cpu_only
from support.models import mean_square, mlp, vectors
from support.patience import SECONDS, wait_until
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_infinity as zi
from zero_infinity import trace as traces
from zero_infinity.cli.main import main
from zero_infinity.trace import Category, Trace, TraceSpan


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(depth=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def states_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters()) * 12


def run(model: nn.Module, config: zi.Config, num_steps: int = 5, **place: object) -> tuple[zi.Stats, Trace]:
    """Train, and give the counters with the trace as of the same moment."""
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), config, **place)  # type: ignore[arg-type]
    for _ in range(num_steps):
        model(torch.randn(4, 64, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    zi.synchronize(model)
    assert config.trace is not None
    return zi.stats(model), traces.read(config.trace)


def check_sound(trace: Trace) -> list[TraceSpan]:
    spans = list(trace.spans)
    assert trace.num_dropped == 0
    assert all(span.seconds >= 0 and span.lane and span.name for span in spans)
    assert {span.category for span in spans} <= set(Category)
    return spans


def total(spans: list[TraceSpan], category: Category) -> tuple[int, float]:
    found = [span for span in spans if span.category == category]
    return sum(span.num_bytes for span in found), sum(span.seconds for span in found)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_same_bits(setting: Setting, tmp_path: Path) -> None:
    compare(mlp, training(vectors(), mean_square), adamw, setting, tmp_path, trace=tmp_path / "run.json")


@pytest.mark.parametrize("setting", [FITS_RAM, HALF, MINIMAL], ids=str)
def test_the_same_bits_when_forward_is_computed_again(setting: Setting, tmp_path: Path) -> None:
    compare(Recomputed, training(vectors(), mean_square), adamw, setting, tmp_path, trace=tmp_path / "run.json")


def test_the_record_agrees_with_the_counters(tmp_path: Path) -> None:
    model = deep()
    budget = states_of(model) // 3
    stats, trace = run(model, zi.Config(memory=budget, nvme=tmp_path, trace=tmp_path / "run.json"))
    spans = check_sound(trace)
    nvme = [span for span in spans if span.lane == "NVMe"]
    assert total(nvme, Category.FETCH)[0] == stats.bytes_read > 0
    assert total(nvme, Category.WRITE_BACK)[0] == stats.bytes_written > 0
    assert len(nvme) == stats.read_requests + stats.write_requests
    assert total(spans, Category.WAIT)[1] == pytest.approx(stats.waited_seconds, rel=1e-6)
    # Each element's record is updated once a step.
    records = sum(p.numel() for p in model.parameters()) * 8
    assert total(spans, Category.UPDATE)[0] == 5 * records
    assert {span.name for span in spans if span.category == Category.UPDATE} == {str(n) for n in range(0, 16, 2)}
    held = [sample.num_bytes for sample in trace.samples]
    assert trace.budgets == {"RAM": budget}
    assert budget // 2 < max(held) <= stats.memory_peak <= budget


def test_the_training_thread_is_told_apart(tmp_path: Path) -> None:
    model = deep()
    _, trace = run(model, zi.Config(memory=states_of(model) // 3, nvme=tmp_path, trace=tmp_path / "run.json"))
    spans = check_sound(trace)
    phases = [span for span in spans if span.lane == "phase"]
    assert [span.name for span in phases] == ["forward", "backward", "step"] * 5
    own = sorted((s for s in spans if s.lane in ("compute", "wait")), key=lambda s: s.start)
    for before, after in pairwise(own):
        assert before.start + before.seconds <= after.start + 2e-9
    inside = [s for s in own if s.lane == "compute"]
    for span in inside:
        assert any(
            p.start - 1e-8 <= span.start and span.start + span.seconds <= p.start + p.seconds + 1e-8 for p in phases
        )
    # Every layer computes in forward and in backward.
    first = phases[0].start, phases[0].start + phases[0].seconds
    forward = {s.name for s in inside if first[0] <= s.start < first[1]}
    assert forward == {str(n) for n in range(0, 16, 2)}


def test_recomputation_belongs_to_backward(tmp_path: Path) -> None:
    model = Recomputed()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(trace=tmp_path / "run.json"))
    for step in range(3):
        mean_square(model, vectors()(step)).backward()
        optimizer.step()
    zi.synchronize(model)
    phases = [span.name for span in traces.read(tmp_path / "run.json").spans if span.lane == "phase"]
    assert phases == ["forward", "backward", "step"] * 3


@cpu_only("the accelerator is emulated on the CPU")
def test_copies_and_gradients_of_a_device(tmp_path: Path) -> None:
    model = deep()
    place = zi.EmulatedAccelerator(1 << 20, bytes_per_second=1e9)
    config = zi.Config(memory=states_of(model) // 2, nvme=tmp_path, device_memory=48 << 10, trace=tmp_path / "run.json")
    stats, trace = run(model, config, device=place)
    spans = check_sound(trace)
    by_lane = Counter[str]()
    for span in spans:
        by_lane[span.lane] += span.num_bytes
    assert by_lane["RAM to device"] == place.bytes_uploaded > 0
    assert by_lane["device to RAM"] == place.bytes_downloaded > 0
    assert trace.budgets["device"] == 48 << 10
    held = [sample.num_bytes for sample in trace.samples if sample.tier == "device"]
    assert 0 < max(held) <= 48 << 10
    assert total(spans, Category.WAIT)[1] == pytest.approx(stats.waited_seconds, rel=1e-6)


def test_copies_in_another_dtype(tmp_path: Path) -> None:
    model = deep()
    config = zi.Config(memory="64MiB", param_dtype="bfloat16", compute_dtype="float32", trace=tmp_path / "run.json")
    _, trace = run(model, config)
    spans = check_sound(trace)
    assert {span.category for span in spans if span.lane == "RAM to copies"} == {Category.FETCH}
    assert "copies" in trace.budgets


def test_without_a_trace_nothing_is_recorded(tmp_path: Path) -> None:
    model = deep()
    model, _ = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config(nvme=tmp_path))
    engine = zi.api.engine_of(model)
    assert engine.parameter_store.run_trace is None
    assert engine.store.trace is None
    assert engine.parameter_store.compute_thread._run_trace is None
    zi.synchronize(model)
    assert list(tmp_path.iterdir()) == []


def test_it_is_written_when_the_model_is_gone(tmp_path: Path) -> None:
    model = deep()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(trace=tmp_path / "run.json"))
    model(torch.randn(4, 64, device=DEVICE)).sum().backward()
    optimizer.step()
    assert not (tmp_path / "run.json").exists()
    del model, optimizer
    wait_until(lambda: gc.collect() >= 0 and (tmp_path / "run.json").exists())
    assert [s.name for s in traces.read(tmp_path / "run.json").spans if s.lane == "phase"] == [
        "forward",
        "backward",
        "step",
    ]


@pytest.mark.parametrize(
    "last",
    [
        "kept = main(); raise SystemExit(3)",
        pytest.param("main()", marks=pytest.mark.long),
        pytest.param("kept = main()", marks=pytest.mark.long),
    ],
)
def test_it_is_written_when_the_process_ends(last: str, tmp_path: Path) -> None:
    script = f"""
import torch, zero_infinity as zi
def main():
    model = torch.nn.Linear(8, 8)
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters()), zi.Config(trace={str(tmp_path / "run.json")!r}))
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer
{last}
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (result.returncode, result.stderr) == (3 if "raise" in last else 0, "")
    assert "step" in {span.name for span in traces.read(tmp_path / "run.json").spans}


def test_building_is_recorded_too_and_wants_the_same_config(tmp_path: Path) -> None:
    config = zi.Config(memory="1MiB", nvme=tmp_path, trace=tmp_path / "run.json")
    with zi.init(config):
        model = deep()
    with pytest.raises(zi.UsageError, match="trace="):
        zi.prepare(model, adamw(model), config.replace(trace=None))
    stats, trace = run(model, config)
    spans = check_sound(trace)
    assert total(spans, Category.FETCH)[0] == stats.bytes_read
    assert total(spans, Category.WRITE_BACK)[0] == stats.bytes_written
    assert trace.title.startswith("Sequential: 33.3K parameters")


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = deep()
    stats, _ = run(model, zi.Config(memory=states_of(model) // 3, nvme=tmp_path, trace=tmp_path / "run.json"))
    assert main(["report", str(tmp_path / "run.json"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    links = {row["link"]: row for row in data["traffic"]}
    assert links["NVMe"]["bytes"] == stats.bytes_read + stats.bytes_written
    assert links["NVMe"]["busy_seconds"] <= stats.io_busy_seconds * 1.01
    assert sum(wait["seconds"] for wait in data["waits"]) == pytest.approx(stats.waited_seconds, rel=1e-6)
    assert main(["report", str(tmp_path / "run.json")]) == 0
    page = (tmp_path / "run.html").read_text()
    assert '"phase"' in page
    assert '"tier": "RAM"' in page
