"""What real code does with parameters: ties, borrows, freezes, edits, logs, hooks and reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import FITS, HALF, MINIMAL, MakeModel, Run, Script, Setting, adamw, compare, sgd, training
from support.device import DEVICE, cpu_only
from support.models import mean_square, mlp, sequences, tokens, vectors
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import Optimizer

import zero_infinity as zi

batch = vectors()
usual = training(batch, mean_square)


@pytest.fixture(params=[FITS, MINIMAL], ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    chosen: Setting = request.param
    return chosen


def small() -> nn.Module:
    return mlp(depth=2)


def with_loss(loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Script:
    return training(batch, loss)


# ---------------------------------------------------------------------- modules that use parameters oddly


class Module(nn.Module):
    """A module given by what it owns and a forward function."""

    def __init__(self, call: Callable[..., torch.Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


def square() -> nn.Linear:
    return nn.Linear(32, 32)


def tied() -> nn.Module:
    model = nn.Sequential(square(), nn.Tanh(), square(), nn.Tanh(), square())
    model[4].weight = model[0].weight
    model[2].bias = model[4].bias
    return model


def tied_across_kinds() -> nn.Module:
    """A Linear and a Conv1d over one matrix, and a third that uses it transposed."""
    return Module(
        lambda m, x: F.linear(m.a(x), m.a.weight.t()) + F.conv1d(x[..., None], m.a.weight[..., None])[..., 0],
        a=square(),
    )


def borrowed() -> nn.Module:
    """A parameter is used outside of its module, before and after its module runs."""
    return Module(
        lambda m, x: m.b(F.linear(m.a(F.linear(x, m.b.weight)), m.a.weight, m.b.bias).tanh()), a=square(), b=square()
    )


def never_called() -> nn.Module:
    """A module is only a bag of parameters: its forward never runs."""
    return Module(lambda m, x: F.linear(x, m.a.weight, m.a.bias).tanh() @ m.b.weight, a=square(), b=square())


def used_twice() -> nn.Module:
    return Module(lambda m, x: m.b(m.a(m.a(x).tanh())) @ m.a.weight * m.a.bias, a=square(), b=square())


def shared_module() -> nn.Module:
    layer, norm = square(), nn.LayerNorm(32)
    return nn.Sequential(layer, norm, nn.Tanh(), layer, norm, nn.Sequential(layer, nn.GELU()))


def nested_shared_module() -> nn.Module:
    block = nn.Sequential(square(), nn.Tanh())
    return nn.Sequential(block, nn.Sequential(block, block), square())


def root_parameters() -> nn.Module:
    """Parameters of the root beside children that have some: a position table, a scale, a list, a scalar."""
    return Module(
        lambda m, x: (m.child(x + m.table) * m.scale + sum(m.several)) * m.temperature.exp(),
        child=square(),
        table=nn.Parameter(torch.randn(8, 32)),
        scale=nn.Parameter(torch.randn(32)),
        several=nn.ParameterList([torch.randn(1, 32), torch.randn(8, 1)]),
        temperature=nn.Parameter(torch.tensor(0.1)),
    )


def returns_its_weight() -> nn.Module:
    """The output of a module is its parameter, or a view of it."""
    codebook = Module(lambda m, _: m.weight, weight=nn.Parameter(torch.randn(32, 32)))
    transposed = Module(lambda m, _: m.weight.t()[:, :32], weight=nn.Parameter(torch.randn(40, 32)))
    return Module(lambda m, x: (x @ m.codebook(x)).tanh() @ m.transposed(x), codebook=codebook, transposed=transposed)


def strange_layouts() -> nn.Module:
    """Parameters that are transposed, a slice of something larger, or of one element."""
    return Module(
        lambda m, x: (x @ m.turned) * m.slice[:, 0] + m.one + m.nothing.sum(),
        turned=nn.Parameter(torch.randn(32, 32).t()),
        slice=nn.Parameter(torch.randn(32, 3)[:, 1:2]),
        one=nn.Parameter(torch.randn(1)),
        nothing=nn.Parameter(torch.empty(0, 7), requires_grad=False),
        rest=square(),
    )


def buffers() -> nn.Module:
    """A buffer that changes in forward, and one that is not saved."""

    def call(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        m.count += 1
        m.mean.lerp_(x.detach().mean(0), 0.1)
        return m.layer(x - m.mean) / m.count

    model = Module(call, layer=square(), count=nn.Buffer(torch.tensor(0)), mean=nn.Buffer(torch.zeros(32)))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    return model


def float64() -> nn.Module:
    """Layers of two precisions in one model."""
    model = nn.Sequential(square(), Module(lambda _, x: x.double()), square().double(), Module(lambda _, x: x.float()))
    return nn.Sequential(model, square())


def own_function() -> nn.Module:
    """An autograd function that keeps a parameter for its backward, by the rules and past them."""

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return gradient @ weight.t(), x.t() @ gradient

    class Kept(Saved):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.kept = (x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.kept
            return gradient @ weight.t(), x.t() @ gradient

    return Module(
        lambda m, x: Kept.apply(Saved.apply(m.a(x), m.b.weight).tanh(), m.c.weight), a=square(), b=square(), c=square()
    )


def weight_norms() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(square()), nn.Tanh(), parametrizations.spectral_norm(square()), nn.Tanh(), square()
    )


def orthogonal() -> nn.Module:
    return nn.Sequential(square(), parametrizations.orthogonal(square(), orthogonal_map="cayley"))


def own_parametrization() -> nn.Module:
    model = nn.Sequential(square(), square())
    parametrize.register_parametrization(model[0], "weight", Module(lambda _, x: x.triu() + x.triu(1).t()))
    parametrize.register_parametrization(model[1], "bias", Module(lambda m, x: x * m.gate, gate=nn.Parameter(x32())))
    return model


def x32() -> torch.Tensor:
    return torch.randn(32)


MODULES: list[MakeModel] = [
    *(tied, tied_across_kinds, borrowed, never_called, used_twice, shared_module, nested_shared_module),
    *(root_parameters, returns_its_weight, strange_layouts, buffers, float64, own_function),
    *(weight_norms, orthogonal, own_parametrization),
]


@pytest.mark.half
@pytest.mark.parametrize("make", MODULES)
def test_a_module(make: MakeModel, setting: Setting, tmp_path: Path) -> None:
    compare(make, usual, adamw, setting, tmp_path)


class Embeddings(nn.Module):
    """Lookups that write to their weight (max_norm) or scale its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.renormed = nn.Embedding(96, 16, max_norm=1.0)
        self.scaled = nn.Embedding(96, 16, scale_grad_by_freq=True)
        self.bag = nn.EmbeddingBag(96, 32, mode="mean")
        self.head = square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat((self.renormed(x), self.scaled(x)), -1) + self.bag(x)[:, None])


@cpu_only("the shapes of embedding_bag's outputs on the CPU are not those of its meta kernel")
def test_embeddings(setting: Setting, tmp_path: Path) -> None:
    compare(Embeddings, training(tokens(), mean_square), adamw, setting, tmp_path)


# ---------------------------------------------------------------------- in the loss


def l2(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model, x) + 1e-2 * sum(p.square().sum() for p in model.parameters())


def l2_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    penalty = torch.stack([p.norm() for p in model.parameters()]).sum()
    return penalty * 1e-2 + mean_square(model, x)


def l2_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """No forward at all."""
    return sum((p * p).sum() for p in model.parameters())


def distance_of_layers(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model, x) + (model[0].weight - model[3].weight).square().mean()


def detached_weight(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mean_square(model, x) + (model[0].weight.detach() * model[3].weight).sum()


def detached_below_its_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A constant copy of the last layer's weight is needed in backward after that layer's gradient has come."""
    hidden = model[0](x) @ model[6].weight.detach()
    return model[6](hidden).square().mean()


def detached_view_below_its_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    constant = model[6].weight.detach().t()[:32]
    return model[6](model[0](x).tanh() @ constant).square().mean()


def data_below_its_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model[6](model[0](x).tanh() * model[6].weight.data.diagonal()).square().mean()


def no_grad_below_its_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer itself as a constant function, below itself."""
    with torch.no_grad():
        constant = model[6](x)
    return model[6](model[0](x) * constant).square().mean()


def frozen_reuse_below_its_layer(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """F.linear with detached parameters: a stop-gradient on the weights, not on the input."""
    inner = F.linear(model[0](x).tanh(), model[6].weight.detach(), model[6].bias.detach())
    return model[6](inner).square().mean()


def stop_gradient_sum(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total = sum(p.detach().abs().mean() for p in model.parameters())
    return mean_square(model, x) * total


@pytest.mark.half
@pytest.mark.parametrize(
    "loss",
    [
        *(l2, l2_first, l2_alone, distance_of_layers, detached_weight, detached_below_its_layer),
        *(detached_view_below_its_layer, data_below_its_layer, no_grad_below_its_layer),
        *(frozen_reuse_below_its_layer, stop_gradient_sum),
    ],
)
def test_a_loss(loss: Callable[..., torch.Tensor], setting: Setting, tmp_path: Path) -> None:
    compare(small, with_loss(loss), adamw, setting, tmp_path)


def test_gradient_penalty(setting: Setting, tmp_path: Path) -> None:
    """WGAN-GP: the gradient of the output with respect to the input is itself differentiated."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.mean() + (slope.norm(dim=1) - 1).square().mean()

    compare(small, with_loss(loss), adamw, setting, tmp_path)


def test_gradient_by_autograd_grad(setting: Setting, tmp_path: Path) -> None:
    """autograd.grad leaves no gradient behind, and what it returns can be put on the parameters by hand."""

    def script(run: Run) -> None:
        parameters = list(run.model.parameters())
        for number in range(5):
            gradients = torch.autograd.grad(mean_square(run.model, batch(number)), parameters)
            run.log(list(gradients))
            if number % 2:
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


def test_backward_for_some_parameters_only(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            mean_square(run.model, batch(number)).backward(inputs=list(run.model[number % 2 * 3].parameters()))
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


def test_hand_made_gradients_are_forgotten_by_zero_grad(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            for parameter in run.model.parameters():
                parameter.grad = torch.ones(parameter.shape, device=DEVICE)
            if number % 2:
                run.optimizer.zero_grad()
            run.step(mean_square(run.model, batch(number)))

    compare(small, script, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- frozen and unused


class LowRank(nn.Module):
    """LoRA: a frozen layer and two small trained matrices beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = square().requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, 32) / 8)
        self.b = nn.Parameter(torch.zeros(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


def adapters() -> nn.Module:
    return nn.Sequential(square().requires_grad_(False), LowRank(), nn.Tanh(), LowRank(), square())


def trained_only(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("optimizer", [adamw, trained_only])
def test_adapters(optimizer: Callable[[nn.Module], Optimizer], setting: Setting, tmp_path: Path) -> None:
    compare(adapters, usual, optimizer, setting, tmp_path)


def test_half_of_a_unit_is_frozen(setting: Setting, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = small()
        model[0].weight.requires_grad_(False)
        model[3].bias.requires_grad_(False)
        return model

    compare(make, usual, adamw, setting, tmp_path)


def test_unused_parameters(setting: Setting, tmp_path: Path) -> None:
    make = lambda: Module(lambda m, x: m.used(x), used=square(), unused=square(), spare=nn.Parameter(x32()))
    compare(make, usual, adamw, setting, tmp_path)


def test_requires_grad_toggled_between_steps(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(8):
            run.model[0].requires_grad_(number % 4 != 1)
            run.model[3].weight.requires_grad_(number % 3 != 2)
            run.step(mean_square(run.model, batch(number)))

    compare(small, script, adamw, setting, tmp_path)


def test_frozen_at_first_and_trained_later(setting: Setting, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = small()
        model[0].requires_grad_(False)
        return model

    def script(run: Run) -> None:
        for number in range(6):
            if number == 3:
                run.model[0].requires_grad_(True)
            run.step(mean_square(run.model, batch(number)))

    compare(make, script, adamw, setting, tmp_path)


def test_gradients_of_parameters_that_are_not_optimized(tmp_path: Path) -> None:
    """They stay on the parameter, as they do in plain PyTorch."""

    def script(run: Run) -> None:
        for number in range(3):
            run.step(mean_square(run.model, batch(number)))
            run.log(run.model[0].weight.grad, run.model[0].bias.grad)
        run.model.zero_grad()
        run.log(run.model[0].weight.grad)

    compare(small, script, lambda model: torch.optim.AdamW(model[3:].parameters()), FITS, tmp_path)


# ---------------------------------------------------------------------- memory in common


def tied_by_data(model: nn.Module) -> None:
    model[3].weight.data = model[0].weight.data


def tied_in_part(model: nn.Module) -> None:
    model[3].bias = nn.Parameter(model[0].weight.detach()[3])


def buffer_of_a_weight(model: nn.Module) -> None:
    model.register_buffer("first", model[0].weight.detach())


@pytest.mark.parametrize("share", [tied_by_data, tied_in_part, buffer_of_a_weight])
def test_memory_in_common_is_refused(share: Callable[[nn.Module], None]) -> None:
    model = small()
    share(model)
    with pytest.raises(zi.UsageError, match=r"(?s)'0.weight'.*share memory.*b.weight = a.weight"):
        zi.prepare(model, adamw(model), zi.Config(memory="1GiB"))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_parameters_side_by_side_in_one_tensor(setting: Setting, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = small()
        parts = torch.cat([p.detach().flatten() for p in model.parameters()]).split(
            [p.numel() for p in model.parameters()]
        )
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.data = part.view_as(parameter)
        return model

    compare(make, usual, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- parameters that stay in memory


class Complex(nn.Module):
    """A complex parameter and one without elements, which get gradients, beside a real layer that is managed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = square()
        self.spectrum = nn.Parameter(torch.randn(17, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.empty(0, 32))
        self.last = square()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.spectrum, n=32)
        return self.last(torch.cat((x, self.nothing)))


@pytest.mark.parametrize("optimizer", [adamw, sgd, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1)])
def test_parameters_that_stay_in_memory(
    optimizer: Callable[[nn.Module], Optimizer], setting: Setting, tmp_path: Path
) -> None:
    def script(run: Run) -> None:
        for number in range(6):
            loss = mean_square(run.model, batch(number))
            loss.backward()
            run.log(run.model.spectrum.grad, run.model.nothing.grad)
            run.optimizer.step()
            if number == 3:
                run.optimizer.load_state_dict(run.optimizer.state_dict())
            run.optimizer.zero_grad(set_to_none=number % 2 == 0)
            run.log(loss, run.model.spectrum.grad)

    compare(Complex, script, optimizer, setting, tmp_path)


def test_parameters_that_stay_in_memory_are_clipped(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            if not run.prepared:
                norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            run.optimizer.step()
            run.log(run.optimizer.grad_norm if run.prepared else norm)
            run.optimizer.zero_grad()

    compare(Complex, script, adamw, setting, tmp_path, max_grad_norm=0.05)


def test_clipping_every_gradient_by_call(setting: Setting, tmp_path: Path) -> None:
    """Also those of parameters that stay in memory, and of those that the optimizer does not have."""

    def script(run: Run) -> None:
        clip = zi.clip_grad_norm_ if run.prepared else nn.utils.clip_grad_norm_
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            run.log(clip([*run.model.first.parameters(), run.model.nothing, *run.model.last.parameters()], 0.05))
            # The order in which plain torch adds up the norms of several dtypes is its own: not bit for bit.
            run.log(round(clip(run.model.parameters(), 100).item(), 5))
            run.log(run.model.last.weight.grad, run.model.spectrum.grad)
            run.optimizer.step()
            run.model.zero_grad()

    optimizer = lambda m: torch.optim.AdamW([*m.first.parameters(), m.spectrum, m.nothing], lr=1e-2)
    compare(Complex, script, optimizer, setting, tmp_path, update="after_backward")


# ---------------------------------------------------------------------- reading


def test_logging_between_steps(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            run.step(mean_square(run.model, batch(number)))
            for name, p in run.model.named_parameters():
                run.log(name, p.norm(), p.data.abs().max().item(), p.detach().mean(), p.shape, p.dtype, p.numel())
                run.log(p.tolist()[0], p.sum().item(), p[0].clone(), p.is_contiguous(), p.stride(), p.requires_grad)
                run.log(p.cpu().detach().numpy().sum().item(), torch.linalg.norm(p), (p == 0).sum(), len(p))

    compare(small, script, adamw, setting, tmp_path)


def test_logging_between_backward_and_step(setting: Setting, tmp_path: Path) -> None:
    """Reading a weight there keeps its update for step()."""

    def script(run: Run) -> None:
        for number in range(4):
            loss = mean_square(run.model, batch(number))
            loss.backward()
            run.log(*(p.norm() for p in run.model.parameters()))
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


def test_printing(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        run.log(repr(run.model), *(repr(p) for p in run.model.parameters()), f"{run.model[0].bias.sum():.3f}")

    compare(small, script, adamw, HALF, tmp_path)


def test_an_average_of_the_weights(tmp_path: Path) -> None:
    """torch's own EMA copies the model and reads all of its parameters at once."""

    def script(run: Run) -> None:
        average = torch.optim.swa_utils.AveragedModel(
            run.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
        )
        for number in range(5):
            run.step(mean_square(run.model, batch(number)))
            average.update_parameters(run.model)
        run.log({name: value for name, value in average.state_dict().items()})

    compare(small, script, adamw, FITS, tmp_path)


def test_an_average_by_hand(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        average = [torch.zeros(p.shape, device=DEVICE) for p in run.model.parameters()]
        for number in range(5):
            run.step(mean_square(run.model, batch(number)))
            with torch.no_grad():
                for kept, p in zip(average, run.model.parameters(), strict=True):
                    kept.lerp_(p, 0.3)
        run.log(average)

    compare(small, script, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- editing


def by_gathered(p: nn.Parameter) -> None:
    with zi.gathered(p), torch.no_grad():
        p.mul_(0.5)


def by_gathered_data(p: nn.Parameter) -> None:
    with zi.gathered([p]):
        p.data.clamp_(-0.05, 0.05)


def by_gathered_numpy(p: nn.Parameter) -> None:
    with zi.gathered([p]):
        p.detach().numpy()[...] *= 0.5


def by_data(p: nn.Parameter) -> None:
    p.data.mul_(0.5)


def by_clamped_data(p: nn.Parameter) -> None:
    """WGAN's weight clipping."""
    p.data.clamp_(-0.02, 0.02)


def by_detached(p: nn.Parameter) -> None:
    p.detach().mul_(0.5)


def by_detached_view(p: nn.Parameter) -> None:
    p.detach().view(-1)[3:7].zero_()


def by_view(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.view(-1)[:5].fill_(0.25)


def by_in_place(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5).add_(0.01)


def by_copy(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.copy_(torch.full(p.shape, 0.03, device=DEVICE))


def by_index(p: nn.Parameter) -> None:
    with torch.no_grad():
        p[0] = 0.5


def by_operator(p: nn.Parameter) -> None:
    with torch.no_grad():
        p *= 0.5
        p -= 0.001


def by_init(p: nn.Parameter) -> None:
    nn.init.normal_(p, std=0.02)


def by_kaiming(p: nn.Parameter) -> None:
    if p.dim() > 1:
        nn.init.kaiming_uniform_(p, a=5**0.5)


def by_replaced_data(p: nn.Parameter) -> None:
    p.data = torch.full(p.shape, 0.01, device=DEVICE)


def by_set(p: nn.Parameter) -> None:
    """As torch.nn.utils.parametrize does; torch has no way to override it."""
    with torch.no_grad():
        p.set_(torch.full(p.shape, 0.01, device=DEVICE))


def by_out(p: nn.Parameter) -> None:
    with torch.no_grad():
        torch.mul(p.detach().clone(), 0.5, out=p)


def by_foreach(p: nn.Parameter) -> None:
    with torch.no_grad():
        torch._foreach_mul_([p], 0.5)


EDITS = [
    *(
        by_gathered,
        by_gathered_data,
        pytest.param(by_gathered_numpy, marks=cpu_only("numpy reads host memory only")),
        by_data,
        by_clamped_data,
        by_detached,
        by_detached_view,
    ),
    *(
        by_view,
        by_in_place,
        by_copy,
        by_index,
        by_operator,
        by_init,
        by_kaiming,
        by_replaced_data,
        by_set,
        by_out,
        by_foreach,
    ),
]


@pytest.mark.half
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_kept(edit: Callable[[nn.Parameter], None], setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            for parameter in run.model.parameters():
                if number in (0, 2, 3):
                    edit(parameter)
            if number == 3:
                continue  # edited twice without a step between
            run.step(mean_square(run.model, batch(number)))
            run.log(*(p.norm() for p in run.model.parameters()))

    compare(small, script, adamw, setting, tmp_path)


def test_vector_to_parameters(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            run.step(mean_square(run.model, batch(number)))
            vector = nn.utils.parameters_to_vector(run.model.parameters())
            run.log(vector)
            nn.utils.vector_to_parameters(vector.detach() * 0.9, run.model.parameters())
            del vector

    compare(small, script, adamw, FITS, tmp_path)


def test_module_reset_parameters(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        run.model[0].reset_parameters()
        run.model.apply(lambda m: nn.init.zeros_(m.bias) if isinstance(m, nn.Linear) else None)
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def test_an_edit_between_backward_and_step(setting: Setting, tmp_path: Path) -> None:
    """It reads the weight there, which is seen in the first step; so that update waits for step()."""

    def script(run: Run) -> None:
        for number in range(4):
            loss = mean_square(run.model, batch(number))
            loss.backward()
            with torch.no_grad():
                run.model[0].weight.mul_(0.9)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(loss)

    compare(small, script, adamw, setting, tmp_path)


def test_a_replaced_parameter_is_not_lost_in_silence(tmp_path: Path) -> None:
    """`module.weight = nn.Parameter(...)` after prepare: the optimizer does not train it in plain PyTorch either."""

    def script(run: Run) -> None:
        usual(run)
        run.model[0].weight = nn.Parameter(torch.full((32, 32), 0.01, device=DEVICE))
        usual(run)

    compare(small, script, adamw, HALF, tmp_path)


# ---------------------------------------------------------------------- hooks of the user's


def test_tensor_hooks(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        seen: list[torch.Tensor] = []
        run.model[0].weight.register_hook(lambda g: g * 0.5)
        run.model[3].bias.register_hook(lambda g: seen.append(g.clone()))
        handle = run.model[3].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
        usual(run)
        handle.remove()
        usual(run)
        run.log(seen)

    compare(small, script, adamw, setting, tmp_path)


def test_a_gradient_kept_by_a_hook_is_not_changed_later(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        seen: list[torch.Tensor] = []
        run.model[0].weight.register_hook(seen.append)
        for number in range(4):
            for part in range(2):
                mean_square(run.model, batch(2 * number + part)).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.log(seen)

    compare(small, script, adamw, HALF, tmp_path)


def halve(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(0.5)


def test_post_accumulate_hooks_made_before_prepare(setting: Setting, tmp_path: Path) -> None:
    norms: list[torch.Tensor] = []

    def make() -> nn.Module:
        model = small()
        model[0].weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
        model[3].weight.register_post_accumulate_grad_hook(halve)
        return model

    def script(run: Run) -> None:
        norms.clear()
        usual(run)
        run.log(norms)

    compare(make, script, adamw, setting, tmp_path)


def test_post_accumulate_hooks_made_after_prepare(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        norms: list[torch.Tensor] = []
        run.model[0].weight.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
        run.model[3].weight.register_post_accumulate_grad_hook(halve)
        usual(run)
        run.log(norms)

    compare(small, script, adamw, setting, tmp_path)


def test_module_hooks(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        seen: list[Any] = []
        run.model[0].register_forward_hook(lambda m, _, out: out * m.weight.mean())
        run.model[0].register_forward_pre_hook(lambda m, args: (args[0] + m.bias,))
        run.model[3].register_full_backward_hook(lambda m, _, out: seen.append(out[0].sum() * m.weight.sum().detach()))
        run.model.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,))
        for number in range(5):
            run.step(mean_square(run.model, batch(number).requires_grad_()))
        run.log(seen)

    compare(small, script, adamw, setting, tmp_path)


def test_sequences_of_new_lengths(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number, length in enumerate([5, 9, 1, 16, 3]):
            run.step(mean_square(run.model, sequences(length=length, num_rows=1 + number % 3)(number)))

    compare(small, script, adamw, setting, tmp_path)
