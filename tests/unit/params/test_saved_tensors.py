"""What autograd holds in the place of parameters and of other tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zero_infinity.params import offloaded_param
from zero_infinity.params.saved_tensors import SavedHandle, SavedTensorHooks, outer_pack
from zero_infinity.params.unit import ManagedParameter, Unit, make_unit
from zero_infinity.params.unit_access import StorageIndex, UnitAccess
from zero_infinity.params.unit_values import UnitValues, ValueSources
from zero_infinity.tiers.compute_thread import ComputeThread


class Source:
    """Units' values; what was handed out is not remembered."""

    def __init__(self) -> None:
        self.elements = torch.randn(512, generator=torch.Generator().manual_seed(0))
        self.num_acquired = 0

    def acquire(self, unit: Unit) -> torch.Tensor:
        self.num_acquired += 1
        return self.elements[: unit.num_elements].clone()

    def current(self, _: Unit) -> bool:
        return True


class Ignores:
    """A computing thread without updates, and an observer that does not care."""

    def pass_by(self) -> None: ...

    def before_reads(self, unit: Unit) -> None: ...

    def on_read(self, unit: Unit) -> None: ...

    def on_edit(self, parameter: ManagedParameter, flat: torch.Tensor) -> None: ...


class Bench:
    """A unit of a 4 x 4 weight and a bias, and the hooks of its model."""

    def __init__(self) -> None:
        self.source = Source()
        access = UnitAccess(
            cast(ComputeThread, Ignores()), ValueSources(cast(UnitValues, self.source)), StorageIndex(), Ignores()
        )
        self.access = access
        self.hooks = SavedTensorHooks(access)
        named = [("weight", nn.Parameter(torch.zeros(4, 4))), ("bias", nn.Parameter(torch.zeros(4)))]
        self.unit = make_unit(
            "layer", named, dtype=torch.float32, compute_dtype=torch.float32, device=torch.device("cpu")
        )
        self.weight, self.bias = self.unit.parameters
        for managed in self.unit.parameters:
            managed.parameter.__dict__[offloaded_param.ATTRIBUTE] = managed

    @contextmanager
    def unsharded(self, hooks: SavedTensorHooks | None = None) -> Iterator[None]:
        """As a module's forward shows its parameters."""
        flat = self.access.acquire(self.unit)
        for managed in self.unit.parameters:
            offloaded_param.show(managed, managed.of(flat), watched=False)
        pushed = (hooks or self.hooks).push()
        yield
        if pushed:
            SavedTensorHooks.pop()
        for managed in self.unit.parameters:
            offloaded_param.point(managed, managed.offloaded_data)

    def plain(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What plain torch has for the gradients of (linear(x)**2).sum()."""
        weight, bias = (m.of(self.source.elements.clone()).clone().requires_grad_() for m in self.unit.parameters)
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(F.linear(x, weight, bias).square().sum(), (x, weight, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.parameter, self.bias.parameter).square().sum()


def inputs() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


def test_a_parameter_is_saved_as_a_handle_and_its_memory_may_leave() -> None:
    b, x = Bench(), inputs()
    with b.unsharded():
        loss = b.forward(x)
    assert b.unit.is_saved
    assert b.unit.state.last_acquired is None, "autograd does not hold its memory"
    got = torch.autograd.grad(loss, (x, b.weight.parameter, b.bias.parameter))
    assert b.source.num_acquired == 2
    assert all(map(torch.equal, got, b.plain(x)))
    del loss
    assert not b.unit.is_saved


@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.t(),
        lambda w: w[1:3, ::2],
        lambda w: w.view(torch.int32),
        lambda w: torch.view_as_complex(w.view(4, 2, 2)),
        lambda w: torch.view_as_complex(w.view(4, 2, 2)).conj(),
        lambda w: torch.view_as_complex(w.view(4, 2, 2)).conj().imag,
    ],
    ids=["itself", "transposed", "strided", "integers", "complex", "conjugated", "negated"],
)
def test_every_view_is_found_again(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    b = Bench()
    flat = b.access.acquire(b.unit)
    tensor = view(b.weight.of(flat))
    handle = b.hooks.handle_for(tensor)
    assert handle is not None
    assert handle.parameter is b.weight
    kind, expected = (tensor.dtype, tensor.is_conj(), tensor.is_neg()), tensor.clone()
    del flat, tensor
    restored = b.hooks.restore(handle)
    assert (restored.dtype, restored.is_conj(), restored.is_neg()) == kind
    assert torch.equal(restored, expected)


def test_a_handle_belongs_to_the_parameter_that_it_lies_in() -> None:
    b = Bench()
    flat = b.access.acquire(b.unit)
    handle = b.hooks.handle_for(b.bias.of(flat)[1:])
    assert handle is not None
    assert handle.parameter is b.bias


def test_an_offloaded_parameter_is_saved_as_a_handle_to_all_of_it() -> None:
    b = Bench()
    handle = b.hooks.handle_for(b.weight.parameter)
    assert handle is not None
    assert torch.equal(b.hooks.restore(handle), b.weight.of(b.source.elements))


def test_other_tensors_have_no_handle() -> None:
    b = Bench()
    b.access.acquire(b.unit)
    assert b.hooks.handle_for(torch.zeros(4)) is None
    assert b.hooks.handle_for(nn.Parameter(torch.zeros(4))) is None


def test_a_parameter_that_was_updated_since_is_an_error_as_in_torch() -> None:
    b, x = Bench(), inputs()
    with b.unsharded():
        loss = b.forward(x)
    b.weight.state.replace()
    with pytest.raises(RuntimeError, match="modified by an inplace operation: 'weight' was changed, or updated"):
        loss.backward()


def test_another_tensor_that_was_changed_since_is_an_error_with_both_versions() -> None:
    b = Bench()
    x = torch.ones(3, requires_grad=True)
    with b.unsharded():
        middle = x * 2
        loss = middle.square().sum()
    middle.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"float32 tensor of shape \(3,\) is at version 1; expected version 0"):
        loss.backward()


def test_hooks_that_were_on_top_before_get_every_other_tensor() -> None:
    b, x = Bench(), inputs()
    packed: list[torch.Tensor] = []
    unpacked: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        with b.unsharded():
            assert outer_pack() is pack
            loss = b.forward(x)
        assert outer_pack() is pack
    assert outer_pack() is None
    got = torch.autograd.grad(loss, (x, b.weight.parameter, b.bias.parameter))
    assert all(map(torch.equal, got, b.plain(x)))
    assert len(packed) == len(unpacked) > 0
    assert all(b.access.unit_of(tensor) is None for tensor in packed), "never a parameter"


def test_hooks_that_a_user_pushes_inside_of_a_forward_are_composed_with_too() -> None:
    b, x = Bench(), inputs()
    packed: list[torch.Size] = []
    with b.unsharded():
        assert not b.hooks.push(), "they are on top"
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t.shape), t)[1], lambda t: t):
            assert b.hooks.push()
            assert not b.hooks.push(), "composed, they are on top, too"
            loss = b.forward(x)
            SavedTensorHooks.pop()
    got = torch.autograd.grad(loss, (x, b.weight.parameter, b.bias.parameter))
    assert all(map(torch.equal, got, b.plain(x)))
    assert torch.Size((4, 4)) not in packed


def test_two_models_hooks_lie_over_each_other() -> None:
    outer, inner, x = Bench(), Bench(), inputs()
    with outer.unsharded(), inner.unsharded():
        loss = inner.forward(F.linear(x, outer.weight.parameter))
    assert outer.unit.is_saved
    assert inner.unit.is_saved
    loss.backward()
    assert x.grad is not None
    assert not x.grad.isnan().any()


def test_hooks_are_not_pushed_where_torch_forbids_them() -> None:
    b = Bench()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not b.hooks.push()
    assert outer_pack() is None


class Kept:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach().clone()

    def restore(self) -> torch.Tensor:
        return self._tensor


@pytest.mark.parametrize("keeps_all", [False, True])
def test_inputs_of_recomputed_blocks_are_kept_elsewhere_or_everything_is(keeps_all: bool) -> None:
    b = Bench()
    kept: list[tuple[torch.Size, bool]] = []

    def pack_saved(tensor: torch.Tensor, *, is_input: bool) -> Kept | None:
        kept.append((tensor.shape, is_input))
        return Kept(tensor) if tensor.dim() == 2 else None

    hooks = SavedTensorHooks(b.access, pack_saved, keeps_all=keeps_all)
    x, y = inputs(), torch.ones(5, requires_grad=True)
    with b.unsharded(hooks):
        first = b.forward(x)
        num_kept = len(kept)
        with hooks.keeping_inputs():
            second = y.square().sum()
        third = y.square().sum()
    assert (num_kept > 0) is keeps_all
    assert kept[num_kept] == (torch.Size((5,)), True)
    assert len(kept) == num_kept + 1 + keeps_all
    assert not any(is_input for _, is_input in kept[:num_kept] + kept[num_kept + 1 :])
    (first + second + third).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, b.plain(x)[0])
    assert y.grad is not None
    assert y.grad.tolist() == [4] * 5


def test_a_handle_counts_as_saved_as_long_as_it_lives() -> None:
    b = Bench()
    handles = [SavedHandle(b.weight, torch.Size((1,)), (1,), 0) for _ in range(30)]
    assert b.unit.is_saved
    handles.clear()
    assert not b.unit.is_saved
