"""`zi.plan` of a model, an optimizer and a config, against a run of the same: the bytes that move are equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.prompt import let_nothing_lag
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.planner.simulator import WARM_UP_STEPS

SHAPE = Shape(layers=6, hidden=256, heads=4, seq=64)  # 55 MiB of states
MIB = 2**20
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 8, bias=False)
        self.up = nn.Linear(8, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def whole() -> nn.Module:
    return ByteGPT(SHAPE)


def adapted() -> nn.Module:
    model = ByteGPT(SHAPE).requires_grad_(False)
    for block in model.blocks:
        for name, child in list(block.named_modules()):
            if isinstance(child, nn.Linear):
                parent, _, own = name.rpartition(".")
                setattr(block.get_submodule(parent), own, Adapted(child))
    return model


def lower_half_frozen() -> nn.Module:
    model = ByteGPT(SHAPE)
    for part in (model.tokens, *model.blocks[:3]):
        part.requires_grad_(False)
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    inside = [p for p in model.blocks.parameters() if p.dim() == 2]  # type: ignore[union-attr]
    rest = [p for p in model.parameters() if not any(p is other for other in inside)]
    return zi.combine_optimizers(torch.optim.Muon(inside), torch.optim.AdamW(rest))


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


@pytest.mark.parametrize(
    ("build", "optimizer", "memory", "settings"),
    [
        pytest.param(whole, adamw, 12, {"gradient_accumulation_steps": 3}, id="accumulation"),
        pytest.param(
            whole, adamw, 12, {"gradient_accumulation_steps": 2, "update": "after_backward"}, id="accumulation, after"
        ),
        pytest.param(adapted, adamw, 6, {}, id="LoRA"),
        pytest.param(adapted, adamw, 6, {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}, id="LoRA, bf16"),
        pytest.param(lower_half_frozen, adamw, 10, {"checkpoint_activations": True}, id="half frozen, recomputed"),
        pytest.param(whole, sgd, 8, {}, id="no states"),
        pytest.param(whole, muon, 16, {}, id="Muon"),
        pytest.param(whole, adafactor, 10, {}, id="Adafactor"),
    ],
)
def test_the_bytes_of_a_plan_are_those_of_the_run(
    build: Callable[[], nn.Module], optimizer: Optimizers, memory: int, settings: dict[str, object], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build()
    tokens = torch.randint(0, 256, (2, SHAPE.seq))
    config = zi.Config(memory=memory * MIB, nvme=tmp_path, **settings)  # type: ignore[arg-type]
    used = optimizer(model)
    plan = zi.plan(model, used, config, hardware="laptop", inputs={"tokens": tokens, "targets": tokens})
    assert plan.outcome.read_bytes > 0

    model, used = zi.prepare(model, used, config)
    let_nothing_lag(model)
    before = after = zi.stats(model)
    for _ in range(WARM_UP_STEPS + 1):
        before = after
        for _ in range(config.gradient_accumulation_steps):
            model(tokens, tokens).backward()
        used.step()
        used.zero_grad()
        # Not `settle`, which would run now the updates of the next forward.
        engine_of(model).parameter_store.update_worker.drain()
        engine_of(model).store.settle()
        after = zi.stats(model)
    moved = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
    assert (plan.outcome.read_bytes, plan.outcome.written_bytes) == moved
    assert plan.outcome.peak_bytes["RAM"] == pytest.approx(after.memory_peak, rel=0.03)
