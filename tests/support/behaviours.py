"""What users of data-parallel training rely on, each as a small model and a script: about a hundred behaviours.

The oracle of each is plain PyTorch that plays all ranks, as in `support/scenarios.py`. A script sees a `Training`, and a
behaviour that is about one backward is an `Action`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim import Optimizer, lr_scheduler
from torch.utils.checkpoint import checkpoint

from support import multirank
from support.models import Case, mean_square, vectors
from support.multirank import Action, Training, steps
from support.scenarios import ROUNDED, Scenario

WIDTH = 16
NUM_STEPS = 4
ROWS = vectors(WIDTH, 4)

# ---------------------------------------------------------------------- models


def chain(*, depth: int = 3) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class Wrapped(nn.Module):
    """A module of torch between two linear layers; `use` says how it is called."""

    def __init__(self, inner: nn.Module, use: Callable[[Any, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.last = nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.inner(x) if self.use is None else self.use(self.inner, x)
        result: torch.Tensor = self.last(x.tanh())
        return result


@dataclass
class Output:
    """What some models return."""

    hidden: torch.Tensor
    more: dict[str, torch.Tensor | None]


class ManyWays(nn.Module):
    """A model whose outputs, inputs and methods a user may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = chain(depth=1)
        self.scale = nn.Parameter(torch.ones(()))
        self.list = nn.ParameterList(torch.full((WIDTH,), 0.1 * n) for n in range(3))
        self.table = nn.ParameterDict({"a": torch.ones(WIDTH), "b": torch.zeros(WIDTH)})
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, *, kind: str = "tensor", gate: torch.Tensor | None = None) -> Any:
        hidden = self.encoder(x) * self.scale + sum(self.list) * self.table["a"] + self.table["b"]
        if gate is not None:
            hidden = hidden * gate
        out = self.head(hidden)
        if kind == "tuple":
            return out, hidden
        if kind == "dict":
            return {"out": out, "nested": [{"hidden": hidden}], "none": None}
        if kind == "dataclass":
            return Output(hidden, {"out": out, "none": None})
        return out

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.encoder(x) * self.scale
        return result


class Penalised(nn.Module):
    """The loss has values of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


def word_rows(number: int) -> torch.Tensor:
    return torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(number))


def normed() -> nn.Module:
    return Wrapped(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def spectral() -> nn.Module:
    return Wrapped(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))).eval()  # its vectors are no parameters


def tied() -> nn.Module:
    model = chain()
    model[2].weight = model[0].weight
    return model


def half_frozen() -> nn.Module:
    model = chain()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def words(kind: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return nn.Sequential(kind(12, WIDTH, **options), nn.Linear(WIDTH, WIDTH))


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (2, -1))


# How modules of torch are used in `Wrapped`.
INNER: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, torch.Tensor], torch.Tensor] | None]] = {
    "layer norm": (lambda: nn.LayerNorm(WIDTH), None),
    "group norm": (lambda: nn.GroupNorm(4, WIDTH), None),
    "rms norm": (lambda: nn.RMSNorm(WIDTH), None),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), None),
    "convolution": (lambda: nn.Conv1d(2, 2, 3, padding=1), lambda m, x: m(_norm(x)).flatten(1)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(2, 2, 3, padding=1), lambda m, x: m(_norm(x)).flatten(1)),
    "prelu": (lambda: nn.PReLU(WIDTH), None),
    "bilinear": (lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda m, x: m(x, x.tanh())),
    "lstm": (lambda: nn.LSTM(8, 8, num_layers=2), lambda m, x: m(_norm(x))[0].flatten(1)),
    "gru both ways": (lambda: nn.GRU(8, 4, bidirectional=True), lambda m, x: m(_norm(x))[0].flatten(1)),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: m(*[_norm(x)] * 3, need_weights=False)[0].flatten(1),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        lambda m, x: m(_norm(x)).flatten(1),
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda m, x: m(_norm(x), _norm(x)).flatten(1),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), None),
    "used twice": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: m(m(x).tanh())),
    "used in a loop": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: m(m(m(m(x).tanh()).tanh()).tanh())),
    "recomputed": (lambda: chain(depth=1), lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "recomputed reentrantly": (lambda: chain(depth=1), lambda m, x: checkpoint(m, x, use_reentrant=True)),
    "changed in place": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: m(x).mul_(2).relu_()),
    "weight as an argument": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: F.linear(x, m.weight.T, m.bias)),
    "part of a weight": (lambda: nn.Linear(WIDTH, 2 * WIDTH), lambda m, x: F.linear(x, m.weight[:WIDTH])),
    "weight detached": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: F.linear(x, m.weight.detach(), m.bias)),
    "weights stacked": (
        lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)),
        lambda m, x: (x @ torch.stack([layer.weight for layer in m])).sum(0),
    ),
    "computed without gradients": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: x + m(x).detach()),
    "functional call": (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda m, x: torch.func.functional_call(m, {"bias": m.bias * 2}, (x,)),
    ),
    "autocast": (lambda: chain(depth=1), lambda m, x: _autocast(m, x)),
    "no rows": (lambda: nn.Linear(WIDTH, WIDTH), lambda m, x: x + m(x[:0]).sum()),
    "deep containers": (lambda: nn.Sequential(nn.Sequential(nn.ModuleDict({"a": chain(depth=1)})["a"])), None),
}


def _autocast(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result: torch.Tensor = module(x)
    return result.float()


def _wrapped(name: str) -> nn.Module:
    make, use = INNER[name]
    return Wrapped(make(), use)


MODELS = {
    "chain": chain,
    "many ways": ManyWays,
    "penalised": Penalised,
    "weight norm": normed,
    "spectral norm": spectral,
    "tied": tied,
    "half frozen": half_frozen,
    **{name: partial(_wrapped, name) for name in INNER},
}
multirank.MODELS.update({f"small {name}": Case(make, ROWS, mean_square) for name, make in MODELS.items()})
multirank.MODELS.update(
    {
        f"small {name}": Case(make, word_rows, mean_square)
        for name, make in {
            "embedding": partial(words, nn.Embedding),
            "embedding with padding": partial(words, nn.Embedding, padding_idx=3),
            "bag of embeddings": partial(words, nn.EmbeddingBag),
        }.items()
    }
)

# ---------------------------------------------------------------------- optimizers


def in_groups(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0, "lr": 3e-2}, {"params": matrices, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def of(kind: type[Optimizer], **settings: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: kind(model.parameters(), **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "in groups": in_groups,
    "plain sgd": of(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    "nesterov": of(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "maximising": of(torch.optim.SGD, lr=1e-3, maximize=True),
    "rmsprop": of(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True, eps=1e-3),
    "adam": of(torch.optim.Adam, lr=1e-2, amsgrad=True, eps=1e-4),
    "adamax": of(torch.optim.Adamax, lr=1e-2, eps=1e-4),
    "nadam": of(torch.optim.NAdam, lr=1e-2, eps=1e-4),
    "radam": of(torch.optim.RAdam, lr=1e-2, eps=1e-4),
    "adadelta": of(torch.optim.Adadelta, lr=1.0, eps=1e-3),
    "asgd": of(torch.optim.ASGD, lr=1e-2),
    "rprop": of(torch.optim.Rprop, lr=1e-3),
    "one at a time": of(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=False),
    "fused": of(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "lr in a tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), eps=1e-4),
}
multirank.OPTIMIZERS.update(OPTIMIZERS)

# ---------------------------------------------------------------------- one backward


def in_two_losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two losses over one graph."""
    out = model(x)
    loss = out.square().mean()
    loss.backward(retain_graph=True)
    (0.1 * out.abs().mean()).backward()
    return loss


def together(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Two graphs in one call."""
    losses = [model(x).square().mean(), model(x * 0.5).mean()]
    torch.autograd.backward(losses)
    return losses[0]


def with_a_gradient(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """From an output that is not a number."""
    out = model(x)
    out.backward(gradient=out.detach() * 0.1)
    return out.sum()


def of_two_forwards(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Siamese: two forwards, one backward."""
    loss = (model(x) - model(-x)).square().mean()
    loss.backward()
    return loss


def one_forward_forgotten(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x)
    loss = model(x * 2).square().mean()
    loss.backward()
    return loss


def with_a_gradient_of_the_input(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """An adversarial example is made with autograd.grad, and trained with."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x)
    loss = model(x.detach() + 0.1 * slope.sign()).square().mean()
    loss.backward()
    return loss


def after_looking_without_gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A target from the model itself."""
    with torch.no_grad():
        target = model(x.roll(1, 0))
    loss = (model(x) - target).square().mean()
    loss.backward()
    return loss


def with_inference_mode_before(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        model(x)
    loss = model(x).square().mean()
    loss.backward()
    return loss


def with_a_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Squares of all parameters are in the loss."""
    loss = model(x).square().mean() + 1e-2 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    return loss


def with_an_absolute_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean() + 1e-2 * torch.stack([p.abs().sum() for p in model.parameters()]).sum()
    loss.backward()
    return loss


def of_parameters_alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model is not called."""
    loss = sum(p.square().sum() for p in model.parameters()) * x.abs().mean()
    loss.backward()
    return loss


def with_hooks_of_autograd(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient of the output is halved."""
    out = model(x)
    out.register_hook(lambda gradient: gradient * 0.5)
    loss = out.square().mean()
    loss.backward()
    return loss


def for_some_inputs(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Only the last layer gets gradients."""
    loss = model(x).square().mean()
    loss.backward(inputs=list(model[-1].parameters()))
    return loss


def with_saved_tensors_packed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        loss = model(x).square().mean()
    loss.backward()
    return loss


def through_a_submodule(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The root's forward is not called."""
    loss = model[2](model[1](model[0](x))).square().mean()
    loss.backward()
    return loss


def found(kind: str, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Outputs in tuples, dicts and objects; other methods; keywords."""
    if kind == "method":
        out = model.encode(x)
    elif kind == "keyword":
        out = model(x=x, gate=torch.full((WIDTH,), 0.5))
    else:
        outputs = model(x, kind=kind)
        if kind == "tuple":
            out = outputs[0] + outputs[1]
        elif kind == "dict":
            out = outputs["out"] * outputs["nested"][0]["hidden"]
        else:
            out = outputs.hidden + outputs.more["out"]
    loss: torch.Tensor = out.square().mean()
    loss.backward()
    return loss


ACTIONS: list[Action] = [
    in_two_losses,
    together,
    with_a_gradient,
    of_two_forwards,
    one_forward_forgotten,
    with_a_gradient_of_the_input,
    after_looking_without_gradients,
    with_inference_mode_before,
    with_a_penalty,
    with_an_absolute_penalty,
    of_parameters_alone,
    with_hooks_of_autograd,
    for_some_inputs,
    with_saved_tensors_packed,
    through_a_submodule,
]
# Gradients come several times in one step: stages 0 and 1 add up each rank's own first.
SEVERAL_BACKWARDS = {in_two_losses}


@dataclass(frozen=True)
class Script:
    """A function with its first arguments, which can be sent to other processes."""

    function: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __call__(self, run: Training) -> None:
        self.function(*self.arguments, run, **dict(self.options))

    @property
    def __name__(self) -> str:
        given = [getattr(argument, "__name__", str(argument)) for argument in self.arguments]
        return " ".join([self.function.__name__, *given, *(f"{name}={value}" for name, value in self.options)])


def act(action: Action, run: Training) -> None:
    for number in range(NUM_STEPS):
        run.act(number, action)
        run.step()


def find(kind: str, run: Training) -> None:
    act(partial(found, kind), run)


# ---------------------------------------------------------------------- loops


def numbers(run: Training) -> Iterator[int]:
    """One backward for each."""
    for number in range(NUM_STEPS):
        run.backward(number)
        yield number


def zeroes_first(run: Training) -> None:
    """zero_grad at the top of the loop."""
    for number in range(NUM_STEPS):
        run.zero_grad()
        run.backward(number)
        run.optimizer.step()


def zeroes_to_zero(run: Training) -> None:
    for _ in numbers(run):
        run.optimizer.step()
        run.zero_grad(set_to_none=False)


def zeroes_the_model(run: Training) -> None:
    for _ in numbers(run):
        run.optimizer.step()
        run.model.zero_grad()
        run.forget()


def zeroes_twice(run: Training) -> None:
    for _ in numbers(run):
        run.step()
        run.zero_grad()


def sets_gradients_to_none(run: Training) -> None:
    for _ in numbers(run):
        run.optimizer.step()
        for p in run.model.parameters():
            p.grad = None
        run.forget()


def steps_before_any_backward(run: Training) -> None:
    run.optimizer.step()
    steps(run, 3)


def steps_without_a_backward(run: Training) -> None:
    for _ in numbers(run):
        run.step()
        run.optimizer.step()


def drops_a_batch(run: Training) -> None:
    """One loss is found to be too large: its gradients are thrown away."""
    for number in numbers(run):
        if number == 2:
            run.zero_grad()
        else:
            run.step()


def accumulates_plainly(run: Training) -> None:
    """Two backwards a step, and no setting."""
    for number in range(NUM_STEPS):
        run.backward(2 * number, scale=0.5)
        run.backward(2 * number + 1, scale=0.5)
        run.step()


def accumulates_more_and_more(run: Training) -> None:
    for number in range(3):
        for part in range(number + 1):
            run.backward(3 * number + part)
        run.step()


def accumulates_in_nested_contexts(run: Training) -> None:
    for number in range(3):
        run.backward(3 * number, sync=False)
        run.backward(3 * number + 1, sync=False)
        run.backward(3 * number + 2)
        run.step()


def takes_a_closure(run: Training) -> None:
    for number in range(NUM_STEPS):
        run.zero_grad()

        def closure(number: int = number) -> float:
            run.backward(number)
            return run.losses[-1][0]

        run.optimizer.step(closure)


def evaluates_between(run: Training) -> None:
    for number in numbers(run):
        run.step()
        run.model.eval()
        with torch.no_grad():
            run.log(run.model(run.case.batch(900 + number)))
        run.model.train()


def evaluates_in_a_step(run: Training) -> None:
    """Between backward and step."""
    for number in numbers(run):
        with torch.no_grad():
            run.log(run.model(run.case.batch(900 + number)))
        run.step()


def halves_gradients(run: Training) -> None:
    for _ in numbers(run):
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
        run.step()


def centres_gradients(run: Training) -> None:
    for _ in numbers(run):
        for p in run.model.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad -= p.grad.mean(1, keepdim=True)
        run.step()


def adds_noise(run: Training) -> None:
    for number in numbers(run):
        torch.manual_seed(number)
        for p in run.model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn(p.shape), alpha=0.01)
        run.step()


def sets_gradients(run: Training) -> None:
    for number in numbers(run):
        for p in run.model.parameters():
            p.grad = torch.full(p.shape, 0.01 * (number + 1))
        run.step()


def drops_one_gradient(run: Training) -> None:
    """One layer is not trained in every second step."""
    for number in numbers(run):
        if number % 2:
            next(run.model.parameters()).grad = None
        run.step()


def logs_norms(run: Training) -> None:
    for _ in numbers(run):
        run.log([None if p.grad is None else p.grad.norm() for p in run.model.parameters()])
        run.step()
        run.log([p.detach().norm() for p in run.model.parameters()])


def clips(run: Training, **options: Any) -> None:
    for _ in numbers(run):
        run.log(clip_grad_norm_(run.model.parameters(), 0.02, **options))
        run.step()


def clips_values(run: Training) -> None:
    for _ in numbers(run):
        clip_grad_value_(run.model.parameters(), 1e-3)
        run.step()


def clips_a_layer(run: Training) -> None:
    for _ in numbers(run):
        clip_grad_norm_(list(run.model.parameters())[:2], 1e-2)
        run.step()


def skips_what_is_not_finite(run: Training) -> None:
    """The whole norm is looked at before a step."""
    for _ in numbers(run):
        norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None])
        if norm.isfinite():
            run.optimizer.step()
        run.zero_grad()
        run.log(norm)


def toggles(run: Training) -> None:
    """Parts take turns, as a generator and a discriminator do."""
    parameters = list(run.model.parameters())
    for number in range(NUM_STEPS):
        for at, p in enumerate(parameters):
            p.requires_grad_((at < len(parameters) // 2) == (number % 2 == 0))
        run.backward(number)
        run.step()


def freezes_later(run: Training) -> None:
    for number in numbers(run):
        run.step()
        if number == 1:
            next(run.model.parameters()).requires_grad_(False)


def edited(edit: Callable[[nn.Module], None], run: Training) -> None:
    """Values are changed after each step."""
    for _ in numbers(run):
        run.step()
        for module in run.model.modules():
            with run.gathered(module), torch.no_grad():
                edit(module)


def clamped(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        p.clamp_(-0.1, 0.1)


def decayed_by_data(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        p.data = p.data * 0.9


def written_by_numpy(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        p.detach().numpy()[..., 0] = 0.0


def begun_anew(module: nn.Module) -> None:
    torch.manual_seed(1)
    if isinstance(module, nn.Linear):
        module.reset_parameters()


def edited_without_a_context(run: Training) -> None:
    for _ in numbers(run):
        run.step()
        with torch.no_grad():
            for p in run.model.parameters():
                p.mul_(0.9).add_(0.01)


def averaged(run: Training) -> None:
    """A moving average of the weights."""
    mean = [p.detach().clone() for p in run.model.parameters()]
    for _ in numbers(run):
        run.step()
        for old, p in zip(mean, run.model.parameters(), strict=True):
            old.lerp_(p.detach(), 0.1)
    run.log(mean)


def copied_away(run: Training) -> None:
    """A copy of the model is used between steps."""
    for number in numbers(run):
        run.step()
        twin = copy.deepcopy(run.model)
        run.log(twin(run.case.batch(900 + number)).detach())


def rewound(run: Training) -> None:
    """Weights and states of the second step come back after the fourth."""
    kept: tuple[Any, Any] | None = None
    for number in numbers(run):
        run.step()
        if number == 1:
            kept = copy.deepcopy((dict(run.model.state_dict()), run.optimizer.state_dict()))
    assert kept is not None
    run.model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])
    steps(run, 2)


def looked_at(run: Training) -> None:
    """All of the state is read between steps."""
    for _ in numbers(run):
        run.step()
        run.log({n: v.sum() for n, v in run.model.state_dict().items()})
        run.log({n: dict(state) for n, state in run.optimizer.state_dict()["state"].items()})


def forgets_momentum(run: Training) -> None:
    for number in numbers(run):
        run.step()
        if number == 1:
            for p in run.model.parameters():
                run.optimizer.state[p]["exp_avg"].zero_()
        if number == 2:
            run.optimizer.state.clear()


def scheduled(name: str, run: Training) -> None:
    schedule = SCHEDULES[name](run.optimizer)
    for _ in numbers(run):
        run.step()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(1.0)
        else:
            schedule.step()
        run.log([group["lr"] for group in run.optimizer.param_groups])


def changes_settings(run: Training) -> None:
    for number in numbers(run):
        run.step()
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01 / (number + 1)
            group["weight_decay"] = 0.1 * number


def with_parameter_hooks(run: Training) -> None:
    for p in run.model.parameters():
        p.register_hook(lambda gradient: gradient * 0.5)
    steps(run, NUM_STEPS)


def with_module_hooks(run: Training) -> None:
    for module in list(run.model.children()):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 0.9, *args[1:]))
        module.register_forward_hook(lambda _, __, out: out * 1.1)
    for module in list(run.model.children())[1:]:
        module.register_full_backward_hook(lambda _, given, __: tuple(g if g is None else g * 0.5 for g in given))
    steps(run, NUM_STEPS)


def named(function: Callable[..., None], *arguments: Any, **options: Any) -> Script:
    return Script(function, arguments, tuple(options.items()))


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "warmup": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda number: (number + 1) / 4),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=6),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}
ROUNDED_MODELS = ["chain", "tied", "half frozen", "lstm", "attention", "group norm", "recomputed", "weights stacked"]
LATE = {"update": "after_backward"}
PLAIN_LOOPS = [
    zeroes_first,
    zeroes_to_zero,
    zeroes_the_model,
    zeroes_twice,
    sets_gradients_to_none,
    steps_before_any_backward,
    steps_without_a_backward,
    evaluates_between,
    takes_a_closure,
    toggles,
    freezes_later,
    averaged,
    copied_away,
    rewound,
    looked_at,
    forgets_momentum,
    changes_settings,
    edited_without_a_context,
    with_parameter_hooks,
    with_module_hooks,
    *(named(edited, edit) for edit in (clamped, decayed_by_data, written_by_numpy, begun_anew)),
    *(named(scheduled, name) for name in SCHEDULES),
]
GRADIENT_LOOPS = [
    drops_a_batch,
    evaluates_in_a_step,
    halves_gradients,
    centres_gradients,
    adds_noise,
    sets_gradients,
    drops_one_gradient,
    logs_norms,
    named(clips),
    named(clips, norm_type=1.0),
    named(clips, norm_type=float("inf")),
    named(clips, foreach=False),
    named(clips, error_if_nonfinite=True),
    clips_values,
    clips_a_layer,
    skips_what_is_not_finite,
]
SUMMING_LOOPS = [accumulates_plainly, accumulates_more_and_more, accumulates_in_nested_contexts]

BEHAVIOURS: list[Scenario] = [
    *(Scenario(f"small {name}", named(steps, num_steps=3)) for name in MODELS),
    *(Scenario(f"small {name}") for name in ("embedding", "embedding with padding", "bag of embeddings")),
    *(Scenario(f"small {name}", named(steps, num_steps=3), settings=ROUNDED) for name in ROUNDED_MODELS),
    *(Scenario("small chain", optimizer=name) for name in OPTIMIZERS),
    *(
        Scenario(
            "small chain", named(act, action), accumulates=action in SEVERAL_BACKWARDS, settings=LATE if at % 2 else {}
        )
        for at, action in enumerate(ACTIONS)
    ),
    *(Scenario("small many ways", named(find, kind)) for kind in ("method", "keyword", "tuple", "dict", "dataclass")),
    *(Scenario("small chain", script) for script in PLAIN_LOOPS),
    *(Scenario("small chain", script, settings=LATE) for script in GRADIENT_LOOPS),
    *(Scenario("small chain", script, settings=LATE, accumulates=True) for script in SUMMING_LOOPS),
]

# ---------------------------------------------------------------------- combinations


@dataclass(frozen=True)
class Loop:
    """A training whose steps do different things, by their names in `STEPS`."""

    steps: tuple[str, ...]

    def __call__(self, run: Training) -> None:
        for number, name in enumerate(self.steps):
            STEPS[name](run, 10 * number)

    @property
    def __name__(self) -> str:
        return ", ".join(self.steps)

    @property
    def may_be_refused(self) -> bool:
        """True if gradients are used in a way in which the first two steps did not use them."""
        return bool({*self.steps} & USES_GRADIENTS)


def _train(run: Training, number: int) -> None:
    run.backward(number)
    run.step()


def _accumulate(run: Training, number: int) -> None:
    run.backward(number, scale=0.5)
    run.backward(number + 1, scale=0.5)
    run.step()


def _accumulate_without_sync(run: Training, number: int) -> None:
    run.backward(number, sync=False)
    run.backward(number + 1)
    run.step()


def _skip(run: Training, number: int) -> None:
    run.backward(number)
    run.zero_grad()


def _clip(run: Training, number: int) -> None:
    run.backward(number)
    run.log(clip_grad_norm_(run.model.parameters(), 0.02))
    run.step()


def _halve(run: Training, number: int) -> None:
    run.backward(number)
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad *= 0.5
    run.step()


def _keep(run: Training, number: int) -> None:
    run.backward(number)
    run.optimizer.step()


def _evaluate(run: Training, number: int) -> None:
    with torch.no_grad():
        run.log(run.model(run.case.batch(number)))


def _edit(run: Training, number: int) -> None:
    for module in run.model.modules():
        with run.gathered(module), torch.no_grad():
            for p in module.parameters(recurse=False):
                p.mul_(0.99)


def _change_lr(run: Training, number: int) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)


def _reload(run: Training, number: int) -> None:
    run.model.load_state_dict(copy.deepcopy(dict(run.model.state_dict())))
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _reset(run: Training, number: int) -> None:
    run.optimizer.state.clear()


def _freeze(run: Training, number: int) -> None:
    first = next(run.model.parameters())
    first.requires_grad_(not first.requires_grad)


def _look(run: Training, number: int) -> None:
    run.log([p.detach().sum() for p in run.model.parameters()])


STEPS: dict[str, Callable[[Training, int], None]] = {
    "train": _train,
    "accumulate": _accumulate,
    "accumulate without sync": _accumulate_without_sync,
    "skip": _skip,
    "clip": _clip,
    "halve": _halve,
    "keep": _keep,
    "evaluate": _evaluate,
    "edit": _edit,
    "change lr": _change_lr,
    "reload": _reload,
    "reset": _reset,
    "freeze": _freeze,
    "look": _look,
}
# These meet a limit after two steps without them, which is an error that says so.
USES_GRADIENTS = {"skip", "clip", "halve", "keep"}
ACCUMULATES = {"accumulate", "accumulate without sync", "keep"}
# What a reference with master weights does not do.
OF_VALUES = {"edit", "reload", "clip", "halve", "freeze"}
