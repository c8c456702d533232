"""Every module that torch has sample inputs for: outputs, gradients of inputs and weights as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import FITS_RAM, MINIMAL, Run, assert_identical, budget_bytes, run_plain, run_prepared
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db
from torch.utils._pytree import tree_leaves, tree_map_only

import zero_infinity as zi

INFOS = [info for info in module_db if torch.float32 in info.dtypes]
MOST_SAMPLES = 4


class WithGain(nn.Module):
    """A module behind a parameter, so that also one without parameters has something to train."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.tensor(0.9))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        scaled = [a * self.gain if self._takes(a) else a for a in args]
        return self.inner(*scaled, **kwargs)

    def _takes(self, value: Any) -> bool:
        # Losses check that their inputs are probabilities, and targets are not trained.
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad


def samples(info: ModuleInfo, *, training: bool) -> Iterator[ModuleInput]:
    torch.manual_seed(0)
    yield from info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)


def build(info: ModuleInfo, sample: ModuleInput, *, training: bool) -> nn.Module:
    torch.manual_seed(1)
    constructor = sample.constructor_input
    inner = info.module_cls(*constructor.args, **constructor.kwargs)
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in inner.parameters()):
        args, kwargs = fresh(sample)
        inner(*args, **kwargs)  # a lazy module finds its shapes
    return (inner if any(True for _ in inner.parameters()) else WithGain(inner)).train(training)


def fresh(sample: ModuleInput) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of one's own: leaves, with a gradient where the sample has one."""
    forward = sample.forward_input
    copy = lambda t: t.detach().clone().requires_grad_(t.requires_grad)
    args, kwargs = tree_map_only(torch.Tensor, copy, (tuple(forward.args), dict(forward.kwargs)))
    return args, kwargs


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def script_for(sample: ModuleInput) -> Any:
    def script(run: Run) -> None:
        for _ in range(2):
            args, kwargs = fresh(sample)
            torch.manual_seed(2)
            outputs = [t for t in tree_leaves(run.model(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            run.log(outputs)
            trained = [t for t in outputs if t.requires_grad]
            if not trained:
                continue
            torch.stack([t.square().mean() + 0.3 * t.sum() for t in trained]).sum().backward()
            run.log([t.grad for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)])
            run.optimizer.step()
            run.optimizer.zero_grad()

    return script


def chosen(info: ModuleInfo, *, training: bool) -> list[ModuleInput]:
    """A few samples, from all over the list: some modules have hundreds."""
    every = list(samples(info, training=training))
    count = min(len(every), MOST_SAMPLES)
    return [every[number * len(every) // count] for number in range(count)]


@pytest.mark.half
@pytest.mark.filterwarnings("ignore")  # torch's own samples use what torch has deprecated
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info", INFOS, ids=lambda info: info.name)
def test_a_module_of_torch(info: ModuleInfo, training: bool, tmp_path: Path) -> None:
    num_compared = 0
    for number, sample in enumerate(chosen(info, training=training)):
        make = lambda s=sample: build(info, s, training=training)
        script = script_for(sample)
        try:
            plain = run_plain(make, script, plain_sgd)
        except (RuntimeError, ValueError):
            continue  # with a gain before it, some losses do not take their sample
        # By turns: as little memory as possible, and everything in memory.
        setting = MINIMAL if number % 2 == 0 else FITS_RAM
        config = zi.Config(memory=budget_bytes(make, plain_sgd, setting), nvme=tmp_path if setting.nvme else None)
        prepared = run_prepared(make, script, plain_sgd, config)
        try:
            assert_identical(plain, prepared)
        except AssertionError as difference:
            difference.add_note(f"sample {number}: {sample.desc} {sample.constructor_input.kwargs}")
            raise
        num_compared += 1
    if not num_compared:
        pytest.skip("no sample works in plain PyTorch with a gain before it")


def test_a_lazy_module_is_refused_before_it_has_shapes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(zi.UsageError, match="(?i)lazy|uninitialized|forward"):
        zi.prepare(model, plain_sgd(model), zi.Config(memory="1MiB", nvme=tmp_path))
