"""float16: every backward is scaled where it begins, whatever the loss was computed from, and nothing else is.

The reference is what a user writes by hand in plain PyTorch: a model in float16, float32 masters, a loss that is
multiplied by the scale before backward, gradients that are divided by it before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import same_bits
from support.device import DEVICE, moved, on_device
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import zero_infinity as zi
from zero_infinity._torch import change_function_modes
from zero_infinity.api import close, engine_of
from zero_infinity.optim.loss_scale import LossScale

SCALE = 1024.0
NUM_STEPS = 4
HALF: dict[str, Any] = {"memory": "4MiB", "tile_above": "1GiB", "compute_dtype": "float16"}


@dataclass
class Output:
    """What a model returns that is neither a tensor nor a container."""

    values: torch.Tensor


class Model(nn.Module):
    """Gradients of its loss are so small that float16 loses them without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, how: str = "tensor") -> Any:
        values = self.second(self.first(x).tanh())
        self.kept = values
        outputs = {
            "tensor": values,
            "dict": {"values": values, "more": [values]},
            "dataclass": Output(values),
            "nested": ((None, [{"deep": (values,)}]),),
            "function": lambda: values,
            "nothing": None,
        }
        return outputs[how]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).tanh()


def small(values: torch.Tensor) -> torch.Tensor:
    """A loss in float32 whose gradients are below what float16 has."""
    return (values.float() - 0.5).square().mean() * 1e-4


def penalty(model: Model) -> torch.Tensor:
    return sum(p.float().square().sum() for p in model.parameters()) * 1e-5  # type: ignore[return-value]


def in_two_losses(model: Model, x: torch.Tensor) -> None:
    values = model(x)
    small(values).backward(retain_graph=True)
    small(values[:, :4]).backward()


def from_several_roots(model: Model, x: torch.Tensor) -> None:
    torch.autograd.backward([small(model(x)), small(model.encode(x))])


def with_gradients_for_outputs(model: Model, x: torch.Tensor) -> None:
    values = model(x).float()
    torch.autograd.backward(values, torch.full_like(values, 1e-5))
    values = model(x).float()
    values.backward(torch.full_like(values, 1e-5))


def recomputed(model: Model, x: torch.Tensor, *, use_reentrant: bool) -> None:
    x = x.clone().requires_grad_()
    hidden = checkpoint(model.encode, x, use_reentrant=use_reentrant)
    small(model.second(hidden)).backward()


def for_some(model: Model, x: torch.Tensor) -> None:
    small(model(x)).backward(inputs=list(model.second.parameters()))


def inside_a_mode(model: Model, x: torch.Tensor) -> None:
    with torch.device(DEVICE), torch.overrides.BaseTorchFunctionMode():
        values = model(x)
    with torch.overrides.BaseTorchFunctionMode():
        small(values).backward()


LOSSES: dict[str, Callable[[Model, torch.Tensor], object]] = {
    "a tensor": lambda m, x: small(m(x)).backward(),
    "a dict": lambda m, x: small(m(x, "dict")["more"][0]).backward(),
    "a dataclass": lambda m, x: small(m(x, "dataclass").values).backward(),
    "nested": lambda m, x: small(m(x, "nested")[0][1][0]["deep"][0]).backward(),
    "a function": lambda m, x: small(m(x, "function")()).backward(),
    "kept by the model": lambda m, x: (m(x, "nothing"), small(m.kept).backward()),
    "another method": lambda m, x: small(m.encode(x)).backward(),
    "submodules": lambda m, x: small(m.second(m.first(x) * 0.5)).backward(),
    "a submodule's weight": lambda m, x: small(nn.functional.linear(x, m.first.weight)).backward(),
    "its own output": lambda m, x: small(m(m(m(x).repeat(1, 2)).repeat(1, 2))).backward(),
    "a penalty": lambda m, x: (small(m(x)) + penalty(m)).backward(),
    "only a penalty": lambda m, x: penalty(m).backward(),
    "two losses": in_two_losses,
    "several roots": from_several_roots,
    "gradients of outputs": with_gradients_for_outputs,
    "recomputed": lambda m, x: recomputed(m, x, use_reentrant=False),
    "recomputed, reentrant": lambda m, x: recomputed(m, x, use_reentrant=True),
    "inputs": for_some,
    "modes": inside_a_mode,
}


def batch(number: int) -> torch.Tensor:
    return on_device(torch.randn(4, 16, generator=torch.Generator().manual_seed(number)).half())


def scale_all_backwards(patch: pytest.MonkeyPatch) -> None:
    """Multiply every backward of the plain run, as `scaler.scale(loss).backward()` does."""
    original = torch.autograd.backward
    running = []

    def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if running:  # in a backward, or called again for a mode
            return original(tensors, grad_tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [None] * len(roots) if grad_tensors is None else [grad_tensors]
        begun = [(torch.ones_like(r) if g is None else g) * SCALE for r, g in zip(roots, given, strict=True)]
        running.append(True)
        try:
            return original(roots, begun, *args, **kwargs)
        finally:
            running.clear()

    patch.setattr(torch.autograd, "backward", scaled)


def take(master: torch.Tensor, parameter: torch.Tensor) -> None:
    """Add a gradient to the master's, in float32."""
    assert parameter.grad is not None
    gradient, parameter.grad = parameter.grad.float() / SCALE, None
    master.grad = gradient if master.grad is None else master.grad + gradient


def by_hand(run: Callable[[Model, torch.Tensor], object], make_optimizer: Callable[[Any], Optimizer]) -> list[Any]:
    """Train in plain PyTorch; returns the weights."""
    torch.manual_seed(0)
    model = moved(Model())
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.half()
    optimizer = make_optimizer(masters)
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.register_post_accumulate_grad_hook(partial(take, master))
    with pytest.MonkeyPatch.context() as patch:
        scale_all_backwards(patch)
        for number in range(NUM_STEPS):
            run(model, batch(number))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master.half())
    return [p.detach() for p in model.parameters()]


def prepared(make_optimizer: Callable[[Any], Optimizer], **changes: Any) -> tuple[Model, Optimizer, LossScale]:
    torch.manual_seed(0)
    model = Model()
    streamed = zi.prepare(model, make_optimizer(model.parameters()), zi.Config(**{**HALF, **changes}))[1]
    scale = engine_of(model).loss_scale
    assert scale is not None
    scale.scale = SCALE
    return model, streamed, scale


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


@pytest.mark.parametrize("name", LOSSES)
def test_whatever_the_loss_is_of(name: str) -> None:
    run = LOSSES[name]
    expected = by_hand(run, adamw)
    model, optimizer, scale = prepared(adamw)
    num_modes = torch._C._len_torch_function_stack()
    for number in range(NUM_STEPS):
        run(model, batch(number))
        optimizer.step()
        optimizer.zero_grad()
    assert torch._C._len_torch_function_stack() <= num_modes, "no mode is left between steps"
    for (key, p), weight in zip(model.named_parameters(), expected, strict=True):
        assert same_bits(p.detach(), weight), key
    assert scale.num_skipped == 0


def test_gradients_are_lost_without_a_scale() -> None:
    """So the comparison above sees it if a backward is not scaled."""
    torch.manual_seed(0)
    model = moved(Model()).half()
    small(model(batch(0))).backward()
    lost = [p.grad.eq(0).float().mean().item() for p in model.parameters() if p.grad is not None]
    assert max(lost) > 0.02


def test_everything_else_gets_its_gradient_without_a_scale() -> None:
    """Inputs, a plain model before and one after, parameters that are not trained, `autograd.grad`."""

    def run(model: Model, before: nn.Module, after: nn.Module) -> list[torch.Tensor | None]:
        x = batch(0).float().requires_grad_()
        loss = after(model(before(x).half()).float()).square().mean() * 64
        model.second.bias.requires_grad_(True)
        gradients = torch.autograd.grad(loss, [x, *after.parameters()], retain_graph=True)
        loss.backward()
        return [*gradients, x.grad, *(p.grad for p in [*before.parameters(), *after.parameters()])]

    def others() -> list[nn.Module]:
        torch.manual_seed(1)
        return [moved(nn.Linear(16, 16)), moved(nn.Linear(8, 8))]

    def sgd(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.125)

    torch.manual_seed(0)
    plain = moved(Model()).half()
    expected = run(plain, *others())
    model, optimizer, _ = prepared(sgd)
    found = run(model, *others())
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        # Less underflows with the scale: large gradients have the same bits.
        torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-6)
    optimizer.step()


def test_a_backward_that_does_not_reach_the_model_is_left_alone() -> None:
    model, optimizer, _ = prepared(adamw)
    values = model(batch(0))
    other = moved(nn.Linear(4, 4)).half()
    seen: list[torch.Tensor] = []
    out = other(on_device(torch.ones(2, 4).half()))
    out.register_hook(seen.append)
    out.sum().backward()
    assert seen[0].eq(1).all()
    small(values).backward()
    optimizer.step()


def test_two_models_in_one_backward() -> None:
    """Both get the smaller scale, and both get it undone."""

    def losses(first: Model, second: Model, number: int) -> torch.Tensor:
        return small(second(first(batch(number)).repeat(1, 2)))

    torch.manual_seed(0)
    plain = [moved(Model()), moved(Model())]
    masters = [p.detach().clone().requires_grad_() for model in plain for p in model.parameters()]
    optimizer = adamw(masters)
    ours = []
    torch.manual_seed(0)
    for _ in range(2):
        model = Model()
        ours.append((model, zi.prepare(model, adamw(model.parameters()), zi.Config(**HALF))[1]))
    for (model, _), scale in zip(ours, (SCALE, 4 * SCALE), strict=True):
        engine_of(model).loss_scale.scale = scale  # type: ignore[union-attr]
    for model in plain:
        model.half()
    for number in range(NUM_STEPS):
        (losses(plain[0], plain[1], number) * SCALE).backward()
        halves = [p for model in plain for p in model.parameters()]
        for parameter, master in zip(halves, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float() / SCALE, None
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(halves, masters, strict=True):
                parameter.copy_(master.half())
        losses(ours[0][0], ours[1][0], number).backward()
        for _, streamed in ours:
            streamed.step()
            streamed.zero_grad()
    found = [p for model, _ in ours for p in model.parameters()]
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(halves, found, strict=True))


def test_a_gradient_set_by_hand_is_taken_as_it_is(tmp_path: Path) -> None:
    def sgd(parameters: Any) -> Optimizer:
        return torch.optim.SGD(parameters, lr=0.125)

    expected = by_hand(lambda m, _: (0.25 * sum(p.sum() for p in m.parameters())).backward(), sgd)
    model, optimizer, _ = prepared(sgd, nvme=tmp_path)
    for _ in range(NUM_STEPS):
        for p in model.parameters():
            p.grad = torch.full(p.shape, 0.25, dtype=torch.float16, device=DEVICE)
        optimizer.step()
        optimizer.zero_grad()
    assert all(same_bits(p.detach(), w) for p, w in zip(model.parameters(), expected, strict=True))


def test_a_backward_that_was_not_scaled_is_refused() -> None:
    """Without the mode (another thread would do the same) gradients come unscaled; they are never taken as scaled."""
    model, optimizer, _ = prepared(adamw)
    before = [p.detach().clone() for p in model.parameters()]
    loss = small(model(batch(0)))
    engine: Any = torch.autograd.Variable._execution_engine
    with pytest.raises(zi.UsageError, match=r"(?s)loss scale.*fix:"):
        engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)
    optimizer.zero_grad()
    small(model(batch(0))).backward()
    optimizer.step()
    assert not any(same_bits(p.detach(), b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_closed_model_leaves_no_mode_behind() -> None:
    modes: list[Any] = []
    change_function_modes(lambda found: (modes.extend(found), found)[1])
    model, _, _ = prepared(adamw)
    model(batch(0))
    close(model)
    after: list[Any] = []
    change_function_modes(lambda found: (after.extend(found), found)[1])
    assert not [mode for mode in after if mode not in modes]


def test_reduced_scale_when_it_overflows() -> None:
    model, optimizer, scale = prepared(adamw)
    scale.scale = 2.0**40
    small(model(batch(0))).backward()
    optimizer.step()
    assert (scale.scale, scale.num_skipped) == (2.0**39, 1)
