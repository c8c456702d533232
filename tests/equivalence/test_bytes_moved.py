"""The bytes that move are the bytes that the policy decided on: no more, and the same every step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.device import DEVICE, cpu_only
from support.prompt import let_nothing_lag
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.engine import TrainingEngine
from zero_infinity.policy import chunk_size


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(128, 128), nn.ReLU())))


class Plan:
    """Adds up what the policy decides: reads for fetches, writes for evictions of blocks that were changed."""

    def __init__(self, engine: TrainingEngine) -> None:
        self.reads = self.writes = 0
        host_cache = engine.host_cache
        blocks = host_cache._entries
        changed = {key for key, block in blocks.items() if block.dirty}
        decide, hold = host_cache.policy.access, engine.store.hold

        def access(key: int):
            decision = decide(key)
            for evicted in decision.evict:
                self.writes += blocks[evicted].stored_bytes if evicted in changed else 0
                changed.discard(evicted)
            self.reads += sum(blocks[fetched].stored_bytes for fetched in decision.fetch if blocks[fetched].has_content)
            return decision

        def note_change(block) -> None:
            changed.add(block.key)
            hold(block)

        host_cache.policy.access = access  # type: ignore[method-assign]
        engine.store.hold = note_change  # type: ignore[method-assign]


@cpu_only("with an accelerator a copy is a use of its own")
@pytest.mark.parametrize("share", [2, 4])
def test_counters_equal_the_plan(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", 16 * 1024)
    model = deep()
    states = sum(p.numel() for p in model.parameters()) * 12
    adamw = torch.optim.AdamW(model.parameters())
    model, optimizer = zi.prepare(model, adamw, zi.Config(memory=states // share, nvme=tmp_path))
    let_nothing_lag(model)
    engine = engine_of(model)
    batch = torch.randn(4, 128, device=DEVICE)

    def step() -> tuple[int, int]:
        before = zi.stats(model)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.settle()
        after = zi.stats(model)
        return after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written

    for _ in range(4):
        step()
    plan = Plan(engine)
    moved = []
    for _ in range(3):
        planned = plan.reads, plan.writes
        real = step()
        assert real == (plan.reads - planned[0], plan.writes - planned[1])
        moved.append(real)
    assert moved[0] == moved[1] == moved[2]
    # Every state that is not kept from one step to the next is read once at least, and never more often than it is used.
    assert states * (1 - 1 / share) * 0.8 < moved[0][0] < states * 1.5


def test_nothing_moves_when_everything_fits(tmp_path: Path) -> None:
    model = deep()
    model, optimizer = zi.prepare(
        model, torch.optim.AdamW(model.parameters()), zi.Config(memory="64MiB", nvme=tmp_path)
    )
    for _ in range(4):
        model(torch.randn(4, 128, device=DEVICE)).square().mean().backward()
        optimizer.step()
    assert (zi.stats(model).bytes_read, zi.stats(model).bytes_written) == (0, 0)
