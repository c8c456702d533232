"""Corners of PyTorch that real code turns: complex views, edits in forward, direct calls, modes, subclasses, recursion."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import FITS, HALF, MINIMAL, MakeModel, Run, Setting, adamw, compare, training
from support.device import cpu_only
from support.models import CASES, mean_square, mlp, vectors
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

batch = vectors()
usual = training(batch, mean_square)


@pytest.fixture(params=[FITS, MINIMAL], ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    chosen: Setting = request.param
    return chosen


def small() -> nn.Module:
    return mlp(depth=2)


# ---------------------------------------------------------------------- views of another kind


class Spectral(nn.Module):
    """A Fourier layer: its weight is real, with a last dimension of two, and used as complex, also conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(17, 17, 2) / 17)
        self.other = nn.Parameter(torch.randn(17, 17, 2) / 17)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequencies = torch.fft.rfft(x)
        frequencies = frequencies @ torch.view_as_complex(self.weight)
        frequencies = frequencies @ torch.view_as_complex(self.other).conj().t()
        return self.out(torch.fft.irfft(frequencies, n=32))


class Reinterpreted(nn.Module):
    """Saved tensors over a weight that are not simply a part of it: negated, expanded, sliced backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self.bias = nn.Parameter(torch.randn(1, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.bias.expand(len(x), 32)
        x = torch.bmm(x[None], self.weight.unfold(0, 32, 1).squeeze(0).t()[None])[0]
        x = x @ self.weight.diagonal().diag_embed() * self.weight.as_strided((32,), (33,))
        return x * torch.view_as_complex(self.weight.view(32, 16, 2)).imag.sum().abs()


@pytest.mark.parametrize("make", [Spectral, Reinterpreted])
def test_views(make: MakeModel, setting: Setting, tmp_path: Path) -> None:
    compare(make, usual, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- edits in forward


class NonNegative(nn.Linear):
    """A layer that clamps its own weight in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(min=0.0)
        return super().forward(x)


class Normalised(nn.Linear):
    """A layer that replaces its weight's data in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


class MaxNorm(nn.Linear):
    """A layer that scales its weight in place, without a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.99)
            self.bias.copy_(self.bias.clamp(-0.1, 0.1))
        return super().forward(x)


class Scaled(nn.Module):
    """A layer whose own operation saves the parameter as it is, after its data was replaced."""

    def __init__(self, features: int, _: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return x * self.weight * self.weight


class ByDetached(nn.Linear):
    """A layer that writes through another tensor, without a trace on its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.detach().mul_(0.9)
        return super().forward(x)


class ByNumpy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.detach().numpy()[0] = 0.25
        return super().forward(x)


class ByFrozenNumpy(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.numpy()[...] *= 0.9
        return super().forward(x)


class BiasLater(nn.Linear):
    """A layer that changes one parameter after the other has been saved for backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.weight)
        with torch.no_grad():
            self.bias.mul_(0.5)
        return x + self.bias


class Copied(nn.Linear):
    """A layer that copies its weight while it is unsharded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = copy.deepcopy(self.weight)
        if type(kept) is not nn.Parameter:
            raise TypeError(type(kept))
        self.weight.data.clamp_(min=-0.05)
        return super().forward(x) + F.linear(x, kept.detach())


class Codebook(nn.Module):
    """Vector quantisation with its codes moved by hand, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.codes = nn.Parameter(torch.randn(8, 32), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.codes.data[nearest] = 0.9 * self.codes.data[nearest] + 0.1 * x.detach()
        return x + (self.codes[nearest] - x).detach()


EDITORS: list[Callable[[int, int], nn.Module]] = [
    *(NonNegative, Normalised, MaxNorm, Scaled, ByDetached, BiasLater, Copied),
    *(pytest.param(kind, marks=cpu_only("numpy reads host memory only")) for kind in (ByNumpy, ByFrozenNumpy)),
]


@pytest.mark.half
@pytest.mark.parametrize("kind", EDITORS)
def test_a_layer_that_edits_its_weight(kind: Callable[[int, int], nn.Module], setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            run.step(mean_square(run.model, batch(number)))
            with torch.no_grad():
                run.log(run.model(batch(100 + number)))
            for parameter in run.model.parameters():
                run.log(parameter)

    compare(lambda: nn.Sequential(*(kind(32, 32) for _ in range(4))), script, adamw, setting, tmp_path)


def test_a_hook_that_edits_the_weight(setting: Setting, tmp_path: Path) -> None:
    def clamp(layer: nn.Module, _: Any) -> None:
        layer.weight.data.clamp_(-0.1, 0.1)

    def make() -> nn.Module:
        model = small()
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(clamp)
        return model

    compare(make, usual, adamw, setting, tmp_path)


def test_a_change_after_a_use_is_an_error_as_in_plain_torch(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for changed in (0, 3):
            loss = mean_square(run.model, batch(0))
            with torch.no_grad():
                run.model[changed].weight.mul_(0.5)
            try:
                loss.backward()
            except RuntimeError as error:
                run.log("modified by an inplace operation" in str(error))
            run.optimizer.zero_grad()
            del loss

    compare(small, script, adamw, setting, tmp_path)


def test_codes_that_are_moved_by_hand(setting: Setting, tmp_path: Path) -> None:
    make = lambda: nn.Sequential(Codebook(), nn.Linear(32, 32), Codebook())
    compare(make, usual, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- calls past the hooks, and into themselves


@pytest.mark.half
@pytest.mark.parametrize("name", ["mlp", "conv", "lstm", "gru", "attention", "encoder", "tied"])
def test_forward_called_directly(name: str, setting: Setting, tmp_path: Path) -> None:
    """`model.forward(x)` runs no hooks of the root's; `layer.forward(x)` none of the layer's."""
    case = CASES[name]

    class Direct(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner.forward(x)

    def loss(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
        return case.loss(model.forward, data)

    compare(lambda: Direct(case.make()), training(case.batch, loss), adamw, setting, tmp_path)


def test_layers_called_directly(setting: Setting, tmp_path: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer.forward(x)
        return (x - 0.5).square().mean()

    compare(small, training(batch, loss), adamw, setting, tmp_path)


class Recursive(nn.Module):
    """A network that calls itself, from the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.merge = nn.Linear(64, 32)
        self.leaf = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            return self.layer(x) * self.leaf
        half = len(x) // 2
        return self.merge(torch.cat((self(x[:half]), self(x[half:])), -1)).tanh() * self.leaf


class RecursiveLayer(nn.Linear):
    """A layer that calls itself while its own parameters are unsharded, and uses them afterwards."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x).tanh()
        if depth:
            x = self(x, depth - 1) @ self.weight
        return x * self.bias


def test_recursion(setting: Setting, tmp_path: Path) -> None:
    compare(Recursive, usual, adamw, setting, tmp_path)


def test_recursion_of_a_layer(tmp_path: Path) -> None:
    compare(lambda: nn.Sequential(RecursiveLayer(32, 32), nn.Linear(32, 32)), usual, adamw, MINIMAL, tmp_path)
    compare(lambda: RecursiveLayer(32, 32), usual, adamw, FITS, tmp_path)


# ---------------------------------------------------------------------- parameters that are more than parameters


class Tagged(nn.Parameter):
    """A user's own kind of parameter, as quantised and sharded ones are."""

    def tag(self) -> str:
        return f"tagged {tuple(self.shape)}"


def test_a_subclass_of_parameter(setting: Setting, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = small()
        model[0].weight = Tagged(model[0].weight.detach())
        return model

    def script(run: Run) -> None:
        usual(run)
        run.log(isinstance(run.model[0].weight, Tagged), run.model[0].weight.tag())
        twin = copy.deepcopy(run.model)
        run.log(type(twin[0].weight) is Tagged, type(twin[3].weight) is nn.Parameter, twin[0].weight)

    compare(make, script, adamw, setting, tmp_path)


def test_attributes_of_parameters(setting: Setting, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = small()
        model[0].weight.no_decay = True
        return model

    def script(run: Run) -> None:
        run.model[3].weight.tensor_parallel = "rows"
        usual(run)
        run.log(run.model[0].weight.no_decay, run.model[3].weight.tensor_parallel)
        run.log([hasattr(p, "no_decay") for p in run.model.parameters()])

    compare(make, script, adamw, setting, tmp_path)


def test_tied_after_prepare(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        run.model[6].weight = run.model[0].weight
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).t()


def test_parametrized_after_prepare(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        parametrize.register_parametrization(run.model[0], "weight", Symmetric())
        usual(run)
        parametrize.remove_parametrizations(run.model[0], "weight")
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def test_layers_added_and_removed_after_prepare(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        removed = run.model[3]
        run.model[3] = nn.Linear(32, 32)
        run.model.append(nn.LayerNorm(32))
        usual(run)
        run.model[3] = removed
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- modes


def _anomaly() -> AbstractContextManager[Any]:
    return torch.autograd.set_detect_anomaly(True)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anomaly": _anomaly,
    "flops": lambda: FlopCounterMode(display=False),
    "device": lambda: torch.device("cpu"),
    "cached": parametrize.cached,
    "multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "deterministic": nullcontext,
}


@pytest.mark.half
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", MODES)
def test_modes(name: str, setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        torch.use_deterministic_algorithms(name == "deterministic")
        try:
            for number in range(4):
                with MODES[name]() as mode:
                    loss = mean_square(run.model, batch(number))
                    run.step(loss)
                if isinstance(mode, FlopCounterMode):
                    run.log(mode.get_total_flops())
        finally:
            torch.use_deterministic_algorithms(False)

    make = lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), parametrizations.weight_norm(nn.Linear(32, 32)))
    compare(make, script, adamw, setting, tmp_path)


def test_selective_checkpointing(setting: Setting, tmp_path: Path) -> None:
    """Matrix products are kept and the rest is recomputed: a dispatch mode runs in forward and in backward."""

    def policy(_: Any, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean()

    make = lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Softmax(-1))
    compare(make, training(batch, loss), adamw, setting, tmp_path)


def test_vmap(setting: Setting, tmp_path: Path) -> None:
    """Over the model, and over an operation with an offloaded weight."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = torch.func.vmap(lambda row: F.linear(row, model[3].weight).tanh())(x)
        return torch.func.vmap(model)(x).square().mean()

    compare(lambda: small().eval(), training(batch, loss), adamw, setting, tmp_path)


def test_meta_learning(tmp_path: Path) -> None:
    """One inner step of MAML: the gradient of a gradient, through fast weights."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, x).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), gradients, strict=True)}
        return torch.func.functional_call(model, fast, x + 1).square().mean()

    compare(lambda: small().eval(), training(batch, loss), adamw, FITS, tmp_path)


def test_second_order_of_the_weights(tmp_path: Path) -> None:
    """A Hessian-vector product with respect to the parameters."""

    def script(run: Run) -> None:
        parameters = list(run.model.parameters())
        for number in range(3):
            loss = mean_square(run.model, batch(number))
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            product = torch.autograd.grad(sum(g.sum() for g in gradients), parameters)
            run.log(list(product))
            del loss, gradients, product
            run.step(mean_square(run.model, batch(number)))

    compare(lambda: small().eval(), script, adamw, FITS, tmp_path)


def test_half_budget_of_everything_at_once(tmp_path: Path) -> None:
    """Several of these in one loop."""

    def script(run: Run) -> None:
        for number in range(6):
            with MODES["flops"]() if number % 2 else torch.device("cpu"):
                loss = mean_square(run.model, batch(number))
            if number == 3:
                run.model[0].weight.data.mul_(0.5)
                loss = mean_square(run.model, batch(number))
            run.step(loss + 1e-3 * run.model[3].weight.norm())

    compare(small, script, adamw, HALF, tmp_path)
