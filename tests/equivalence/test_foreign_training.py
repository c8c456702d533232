"""Others that would train a prepared model, and train nothing, are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compare import Run, adamw, training
from support.models import mean_square, mlp, vectors
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.api import close

batch = vectors()


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def prepared(**config: Any) -> tuple[nn.Module, Optimizer, Optimizer]:
    model = mlp(depth=2)
    plain = adamw(model)
    model, streamed = zi.prepare(model, plain, zi.Config(memory="1MiB", **config))
    return model, streamed, plain


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, None])
def test_another_optimizer(kind: Callable[..., Optimizer] | None) -> None:
    model, streamed, plain = prepared()
    other = plain if kind is None else kind(model[0].parameters(), lr=0.1)
    mean_square(model, batch(0)).backward()
    with pytest.raises(zi.UsageError, match=r"(?s)step\(\) is called over.*fix:.*zi.prepare has returned"):
        other.step()
    streamed.step()
    streamed.zero_grad()


def test_other_optimizers_of_other_models_and_wrappers_step() -> None:
    class Wrapper(Optimizer):
        """As schedule wrappers and Lookahead are built."""

        def __init__(self, inner: Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model, streamed, _ = prepared()
    before = model[0].weight.detach().clone()
    layer = nn.Linear(2, 2)
    layer(torch.ones(2)).sum().backward()
    adamw(layer).step()
    mean_square(model, batch(0)).backward()
    Wrapper(streamed).step()
    assert not torch.equal(before, model[0].weight)


def test_distributed_data_parallel(one_rank: None) -> None:
    model, streamed, _ = prepared()
    for wrapped in (model, nn.Sequential(model)):
        with pytest.raises(zi.UsageError, match=r"(?s)DistributedDataParallel around.*fix:"):
            nn.parallel.DistributedDataParallel(wrapped)
    training(batch, mean_square)(Run(model, streamed, prepared=True))
    nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


def test_fully_shard(one_rank: None) -> None:
    model, _, _ = prepared()
    fully_shard(model)
    with pytest.raises(zi.UsageError, match=r"(?s)fully_shard was called.*fix:"):
        model(batch(0))


def test_gradients_that_no_step_takes() -> None:
    model, streamed, _ = prepared()
    for number in range(3):
        mean_square(model, batch(number)).backward()
        model.zero_grad()
    with pytest.raises(zi.UsageError, match=r"(?s)a gradient again.*zi.prepare"):
        mean_square(model, batch(1)).backward()
    streamed.zero_grad()
    training(batch, mean_square)(Run(model, streamed, prepared=True))


def test_a_step_after_each_backward_of_several() -> None:
    model, streamed, _ = prepared(gradient_accumulation_steps=2)
    mean_square(model, batch(0)).backward()
    with pytest.raises(zi.UsageError, match=r"(?s)1 of 2 backward passes.*fix:"):
        streamed.step()
    mean_square(model, batch(1)).backward()
    streamed.step()
    streamed.zero_grad()
    mean_square(model, batch(2)).backward()
    streamed.step()  # a last one may be shorter
    streamed.zero_grad()
    mean_square(model, batch(3)).backward()
    with pytest.raises(zi.UsageError, match="1 of 2 backward passes"):
        streamed.step()


def test_an_engine_may_end_while_another_model_is_built() -> None:
    """Torch loops over its hooks then, and must not meet one that goes."""
    model: nn.Module | None = None

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

    def end_the_engine(module: nn.Module, *_: Any) -> None:
        nonlocal model
        if isinstance(module, Ending) and model is not None:
            close(model)
            model = None

    handle = register_module_module_registration_hook(end_the_engine)  # before those of the engine
    try:
        model, _, _ = prepared()
        Ending()
    finally:
        handle.remove()
    assert model is None
