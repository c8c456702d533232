"""Every rank records its own part of the run, in a file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import rank_scripts
from support.ranks import run_ranks

from zero_infinity import trace as traces
from zero_infinity.trace import Category

NUM_RANKS = 2


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_and_waits_of_each_rank(stage: int, tmp_path: Path) -> None:
    settings = {"stage": stage, "memory": "1MiB", "nvme": tmp_path}
    plain = run_ranks(NUM_RANKS, rank_scripts.record, NUM_RANKS, settings)
    traced = run_ranks(NUM_RANKS, rank_scripts.record, NUM_RANKS, {**settings, "trace": tmp_path / "run.json"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank0.json", "run.rank1.json"]
    for rank, ((*_, expected), (stats, written, found)) in enumerate(zip(plain, traced, strict=True)):
        for name, value in expected["weights"].items():
            assert torch.equal(found["weights"][name], value)
        (tmp_path / "read.json").write_text(written)
        trace = traces.read(tmp_path / "read.json")
        assert trace.title.endswith(f"rank {rank} of {NUM_RANKS}")
        spans = list(trace.spans)
        assert all(span.seconds >= 0 for span in spans)
        exchanges = [span for span in spans if span.lane == "device to device"]
        assert {span.category for span in exchanges} == {Category.COLLECTIVE}
        assert sum(span.num_bytes for span in exchanges) == sum(stats.sent_bytes.values()) > 0
        for kind, num_bytes in stats.sent_bytes.items():
            assert sum(span.num_bytes for span in exchanges if span.name.endswith(f": {kind}")) == num_bytes
        waits = sum(span.seconds for span in spans if span.category == Category.WAIT)
        assert waits == pytest.approx(stats.waited_seconds, rel=1e-6, abs=1e-9)
        nvme = [span for span in spans if span.lane == "NVMe"]
        assert sum(span.num_bytes for span in nvme) == stats.bytes_read + stats.bytes_written
        assert [s.name for s in spans if s.lane == "phase"] == ["forward", "backward", "step"] * 4
