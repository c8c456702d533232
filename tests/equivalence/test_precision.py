"""16-bit storage and computation against references written by hand in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_sound, same_bits
from support.device import DEVICE, IS_CPU, moved, on_device
from support.least import least_accepted
from support.models import CASES, Case, gpt2, mean_square, mlp, of_labels, tokens, vectors
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.optim.loss_scale import LossScale
from zero_infinity.params import precision

NUM_STEPS = 5
WITHOUT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "mlp": Case(lambda: mlp(depth=3).eval(), vectors(), mean_square),
    "gpt2": Case(lambda: gpt2(**WITHOUT_DROPOUT), tokens(), of_labels),
    "tied": CASES["tied"],
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}
# RAM with room for everything; NVMe with little more than prepare accepts, so that everything moves.
HOMES = ("ram", "nvme")


def made(case: Case, dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = case.make()
    return model if dtype is None else model.to(dtype)


def prepared(
    case: Case, optimizer: Callable[[Any], Optimizer], directory: Path, home: str, **changes: Any
) -> tuple[nn.Module, Optimizer]:
    model = made(case)

    def prepare(memory: int) -> tuple[nn.Module, Optimizer]:
        where = directory if home == "nvme" else None
        config = zi.Config(memory=memory, nvme=where, tile_above="1GiB", **changes)  # no tiles: bit-identical
        return zi.prepare(model, optimizer(model.parameters()), config)

    return prepare(64 << 20 if home == "ram" else least_accepted(prepare))


def batches(case: Case, num_steps: int = NUM_STEPS) -> list[Any]:
    return [case.batch(number) for number in range(num_steps)]


class MasterReference:
    """Plain PyTorch by hand: float32 masters are optimised; the model computes in float32 with masters rounded to 16 bits."""

    def __init__(self, case: Case, optimizer: Callable[[Any], Optimizer], stored: torch.dtype) -> None:
        self.case = case
        self.model = made(case)
        self.stored = stored
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.model.parameters()]
        self.optimizer = optimizer(self.masters)
        self.show()

    def show(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master.to(self.stored).float())

    def step(self, batch: Any, max_norm: float | None = None) -> torch.Tensor:
        loss = self.case.loss(self.model, batch)
        loss.backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.show()
        return loss.detach()


def train_step(case: Case, model: nn.Module, optimizer: Optimizer, batch: Any) -> torch.Tensor:
    loss = case.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same_weights(expected: nn.Module, found: nn.Module) -> None:
    for (name, value), (_, other) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert same_bits(value.detach(), other.detach()), name


# ---------------------------------------------------------------------- stored in 16 bits, computed in 32


@pytest.mark.half
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_sixteen_bit_storage_is_the_rounded_master(
    name: str, stored: str, kind: str, home: str, tmp_path: Path
) -> None:
    case, optimizer = MODELS[name], OPTIMIZERS[kind]
    reference = MasterReference(case, optimizer, getattr(torch, stored))
    model, streamed = prepared(case, optimizer, tmp_path, home, param_dtype=stored, compute_dtype="float32")
    assert_same_weights(reference.model, model)
    for batch in batches(case):
        assert same_bits(reference.step(batch), train_step(case, model, streamed, batch))
    assert_same_weights(reference.model, model)
    assert_sound(model)
    for number, state in enumerate(streamed.state_dict()["state"].values()):
        for key, value in reference.optimizer.state_dict()["state"][number].items():
            assert same_bits(torch.as_tensor(value), torch.as_tensor(state[key])), key
    if home == "nvme":
        assert zi.stats(model).bytes_read > 0


@pytest.mark.parametrize("home", HOMES)
def test_clipping_uses_the_norm_of_the_gradients(home: str, tmp_path: Path) -> None:
    case, optimizer = MODELS["gpt2"], OPTIMIZERS["adamw"]
    reference = MasterReference(case, optimizer, torch.bfloat16)
    settings = {"param_dtype": "bfloat16", "compute_dtype": "float32", "max_grad_norm": 0.05}
    model, streamed = prepared(case, optimizer, tmp_path, home, **settings)
    for batch in batches(case):
        assert same_bits(reference.step(batch, max_norm=0.05), train_step(case, model, streamed, batch))
    assert_same_weights(reference.model, model)


def test_rounding_happens_to_the_stored_copy_and_not_to_the_master(tmp_path: Path) -> None:
    """Updates that are too small for 16 bits add up in the master."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    config = zi.Config(memory="8MiB", nvme=tmp_path, param_dtype="bfloat16", compute_dtype="float32")
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-11), config)
    seen = []
    for _ in range(16):
        model(torch.ones(1, 8, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(model.weight.detach()[0, 0].item())
    assert seen[0] == 1.0  # 1 - 2^-11 rounds back to 1 in bfloat16
    assert seen[-1] == 1.0 - 2.0**-7  # but sixteen of them do not


# ---------------------------------------------------------------------- edits reach the master


def edit_gathered(parameter: nn.Parameter, factor: float) -> None:
    with zi.gathered(parameter), torch.no_grad():
        parameter.mul_(factor)


def edit_numpy(parameter: nn.Parameter, factor: float) -> None:
    with zi.gathered(parameter):
        parameter.detach().numpy()[:] *= factor


def edit_data(parameter: nn.Parameter, factor: float) -> None:
    parameter.data.mul_(factor)


def edit_copy(parameter: nn.Parameter, factor: float) -> None:
    with torch.no_grad():
        parameter.copy_(parameter.detach() * factor)


def edit_assigned(parameter: nn.Parameter, factor: float) -> None:
    parameter.data = parameter.detach() * factor


def edit_loaded(parameter: nn.Parameter, factor: float) -> None:
    holder = nn.Module()
    holder.weight = parameter
    holder.load_state_dict({"weight": parameter.detach() * factor})


EDITS = {
    "gathered": edit_gathered,
    **({"numpy": edit_numpy} if IS_CPU else {}),  # it reads host memory only
    "data": edit_data,
    "copy": edit_copy,
    "assigned": edit_assigned,
    "loaded": edit_loaded,
}


def check_edit(edit: str, factor: float, home: str, directory: Path) -> None:
    case, optimizer = MODELS["mlp"], OPTIMIZERS["adamw"]
    reference = MasterReference(case, optimizer, torch.bfloat16)
    model, streamed = prepared(case, optimizer, directory, home, param_dtype="bfloat16", compute_dtype="float32")
    for number, batch in enumerate(batches(case)):
        if number == 2:
            EDITS[edit](model[0].weight, factor)
            with torch.no_grad():  # what the user sees and changes is the rounded value
                reference.masters[0].copy_(reference.model[0].weight * factor)
            reference.show()
        assert same_bits(reference.step(batch), train_step(case, model, streamed, batch)), f"step {number}"
    assert_same_weights(reference.model, model)


@pytest.mark.half
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("home", HOMES)
def test_edits_reach_the_master(home: str, edit: str, tmp_path: Path) -> None:
    check_edit(edit, 2.0, home, tmp_path)


@pytest.mark.parametrize("edit", ["gathered", "copy", "assigned", "loaded"])
@pytest.mark.parametrize("home", HOMES)
def test_an_edit_of_more_bits_than_are_stored_is_whole_in_the_master(home: str, edit: str, tmp_path: Path) -> None:
    """And the model computes with what is stored of it, wherever that is."""
    check_edit(edit, 1.1, home, tmp_path)


@pytest.mark.parametrize("home", HOMES)
def test_load_state_dict_reaches_the_master(home: str, tmp_path: Path) -> None:
    case, optimizer = MODELS["mlp"], OPTIMIZERS["adamw"]
    torch.manual_seed(7)
    other = case.make()
    reference = MasterReference(case, optimizer, torch.bfloat16)
    model, streamed = prepared(case, optimizer, tmp_path, home, param_dtype="bfloat16", compute_dtype="float32")
    first, *rest = batches(case)
    reference.step(first)
    train_step(case, model, streamed, first)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        for master, value in zip(reference.masters, other.parameters(), strict=True):
            master.copy_(value)
    reference.show()
    for name, value in model.state_dict().items():
        assert same_bits(value, other.state_dict()[name].bfloat16().float()), name
    for batch in rest:
        assert same_bits(reference.step(batch), train_step(case, model, streamed, batch))
    assert_same_weights(reference.model, model)


# ---------------------------------------------------------------------- computed in 16 bits


class SixteenBitReference(MasterReference):
    """Weights, activations and gradients in 16 bits; gradients go to float32 before the update."""

    def __init__(self, case: Case, optimizer: Callable[[Any], Optimizer], computed: torch.dtype) -> None:
        super().__init__(case, optimizer, computed)
        self.model = self.model.to(computed)
        self.scale = 1.0

    def step(self, batch: Any, max_norm: float | None = None) -> torch.Tensor:
        if batch.is_floating_point():
            batch = batch.to(self.stored)
        loss = self.case.loss(self.model, batch)
        (loss * self.scale).backward()
        for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float() / self.scale
            parameter.grad = None
        self.optimizer.step()
        self.show()
        return loss.detach()

    def show(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.masters, strict=True):
                parameter.copy_(master.to(self.stored))


@pytest.mark.half
@pytest.mark.parametrize("stored", [None, "bfloat16"], ids=["stored float32", "stored bfloat16"])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_bfloat16_computation_equals_a_model_in_bfloat16(
    name: str, home: str, stored: str | None, tmp_path: Path
) -> None:
    case, optimizer = MODELS[name], OPTIMIZERS["adamw"]
    if name == "mlp":
        case = Case(lambda: mlp(depth=2).eval(), case.batch, case.loss)
    reference = SixteenBitReference(case, optimizer, torch.bfloat16)
    model, streamed = prepared(case, optimizer, tmp_path, home, param_dtype=stored, compute_dtype="bfloat16")
    losses = []
    for batch in batches(case):
        expected, found = reference.step(batch), train_step(case, model, streamed, batch)
        losses.append(found)
        assert same_bits(expected, found)
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    assert torch.isfinite(torch.stack(losses)).all()


@pytest.mark.parametrize("home", HOMES)
def test_batch_norms_compute_in_the_dtype_of_their_statistics(home: str, tmp_path: Path) -> None:
    """As in plain PyTorch where everything but batch norms is in bfloat16."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())

    images = [on_device(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(n))) for n in range(3)]
    plain, model = moved(make()), moved(make())
    for module in (plain[0], plain[3]):
        module.to(torch.bfloat16)
    config = zi.Config(
        memory="1MiB", nvme=tmp_path if home == "nvme" else None, param_dtype="bfloat16", compute_dtype="bfloat16"
    )
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.125), config)
    norm = plain[1]
    for number, batch in enumerate(images):
        expected, found = plain(batch.to(torch.bfloat16)), model(batch)
        assert found.dtype is torch.bfloat16
        assert same_bits(expected, found)
        assert same_bits(norm.running_var, model[1].running_var)
        if number == 0:
            assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
        model(batch).float().square().mean().backward()  # a second forward: statistics move on in both
        plain(batch.to(torch.bfloat16))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # what is stored, as it is computed with
            for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)


def half_case() -> Case:
    """The loss is of the outputs, outside of the model, as a user of float16 has it: in float32."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch).float() - 0.5).square().mean()

    return Case(lambda: mlp(depth=2).eval(), vectors(), loss)


@pytest.mark.parametrize("stored", [None, "float16"], ids=["stored float32", "stored float16"])
@pytest.mark.parametrize("home", HOMES)
def test_float16_trains_with_a_scaled_loss(home: str, stored: str | None, tmp_path: Path) -> None:
    case, optimizer = half_case(), OPTIMIZERS["adamw"]
    model, streamed = prepared(case, optimizer, tmp_path, home, param_dtype=stored, compute_dtype="float16")
    scale = engine_of(model).loss_scale
    assert scale is not None
    scale.scale = 1024.0  # one that does not overflow, so that both have the same number of updates
    reference = SixteenBitReference(case, optimizer, torch.float16)
    reference.scale = 1024.0
    losses = []
    for batch in [case.batch(0)] * 8:
        expected, found = reference.step(batch), train_step(case, model, streamed, batch)
        losses.append(found.item())
        assert same_bits(expected, found)
    assert scale.num_skipped == 0
    assert losses[-1] < losses[0]


@pytest.mark.half
@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.1}, {"update": "after_backward"}], ids=str)
@pytest.mark.parametrize("home", HOMES)
def test_an_overflow_skips_the_step_and_halves_the_scale(home: str, changes: dict[str, Any], tmp_path: Path) -> None:
    case, optimizer = half_case(), OPTIMIZERS["adamw"]
    model, streamed = prepared(case, optimizer, tmp_path, home, compute_dtype="float16", **changes)
    scale = engine_of(model).loss_scale
    assert scale is not None
    scale.scale = 2.0**40
    before = [p.detach().clone() for p in model.parameters()]
    train_step(case, model, streamed, case.batch(0))
    assert (scale.scale, scale.num_skipped) == (2.0**39, 1)
    assert all(same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    assert not streamed.state_dict()["state"], "a skipped step is no step for the optimizer"
    for number in range(60):
        train_step(case, model, streamed, case.batch(number))
        if scale.num_skipped < number + 2:
            break
    assert 1.0 < scale.scale < 2.0**39
    assert not any(same_bits(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    losses = [train_step(case, model, streamed, case.batch(0)).item() for _ in range(6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("scale", [1.0, 256.0, 4096.0])
def test_clipping_is_by_the_norm_of_the_unscaled_gradients(scale: float, tmp_path: Path) -> None:
    """Powers of two change no bit of a gradient that does not under- or overflow: so nothing may depend on the scale."""
    case = half_case()
    results = []
    for used in (16.0, scale):
        model, streamed = prepared(
            case, OPTIMIZERS["sgd"], tmp_path, "nvme", compute_dtype="float16", max_grad_norm=0.05
        )
        loss_scale = engine_of(model).loss_scale
        assert loss_scale is not None
        loss_scale.scale = used
        losses = [train_step(case, model, streamed, batch) for batch in batches(case, 3)]
        norm = streamed.grad_norm
        assert norm is not None
        assert 0.05 < norm < 10, "the norm is to be that of the gradients, and large enough to be clipped"
        results.append((losses, norm, [p.detach().clone() for p in model.parameters()]))
    for first, second in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(first, second, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=0)


def test_the_scale_grows_after_a_long_run_without_overflow() -> None:
    scale = LossScale()
    start = scale.scale
    for _ in range(1999):
        scale.judge(overflowed=False)
    assert scale.scale == start
    scale.judge(overflowed=False)
    assert scale.scale == 2 * start
    scale.judge(overflowed=True)
    assert scale.scale == start


def test_a_loss_that_the_model_computes_itself_is_scaled_once(tmp_path: Path) -> None:
    """transformers' models return loss and logits: both are outputs."""
    case, optimizer = MODELS["gpt2"], OPTIMIZERS["adamw"]
    model, streamed = prepared(case, optimizer, tmp_path, "ram", compute_dtype="float16")
    scale = engine_of(model).loss_scale
    assert scale is not None
    scale.scale = 8.0
    reference = SixteenBitReference(case, optimizer, torch.float16)
    reference.scale = 8.0
    for batch in batches(case, 3):
        assert same_bits(reference.step(batch), train_step(case, model, streamed, batch))


# ---------------------------------------------------------------------- models that are not in float32


@pytest.mark.parametrize("home", HOMES)
def test_a_float64_model_trains_as_plain(home: str, tmp_path: Path) -> None:
    case = Case(lambda: mlp(depth=2).double(), lambda number: vectors()(number).double(), mean_square)
    optimizer = OPTIMIZERS["adamw"]
    plain = made(case)
    reference = optimizer(plain.parameters())
    model, streamed = prepared(case, optimizer, tmp_path, home)
    torch.manual_seed(1)
    expected = [train_step(case, plain, reference, batch) for batch in batches(case)]
    torch.manual_seed(1)
    found = [train_step(case, model, streamed, batch) for batch in batches(case)]
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert_same_weights(plain, model)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("optim_dtype", [None, "bfloat16"])
def test_a_bfloat16_model_has_a_master_unless_told_otherwise(
    optim_dtype: str | None, home: str, tmp_path: Path
) -> None:
    case = Case(lambda: mlp(depth=2).eval().bfloat16(), lambda number: vectors()(number).bfloat16(), mean_square)
    optimizer = OPTIMIZERS["sgd"]
    model, streamed = prepared(case, optimizer, tmp_path, home, optim_dtype=optim_dtype)
    if optim_dtype is None:
        reference: Any = SixteenBitReference(case, optimizer, torch.bfloat16)
        expected = [reference.step(batch) for batch in batches(case)]
        plain = reference.model
    else:
        plain = made(case)
        update_worker = optimizer(plain.parameters())
        expected = [train_step(case, plain, update_worker, batch) for batch in batches(case)]
    found = [train_step(case, model, streamed, batch) for batch in batches(case)]
    assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert_same_weights(plain, model)


class Mixed(nn.Module):
    """Three dtypes in one module that computes with all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 8)
        self.gain = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
        self.shift = nn.Parameter(torch.zeros(32, dtype=torch.float64))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.weight) * self.gain.float() + self.shift.float())


@pytest.mark.parametrize("home", HOMES)
def test_mixed_dtypes_in_one_module(home: str, tmp_path: Path) -> None:
    """Each keeps its dtype. The bfloat16 one is optimised through a float32 master, the others as they are."""
    case = Case(Mixed, vectors(), mean_square)
    optimizer = OPTIMIZERS["sgd"]
    model, streamed = prepared(case, optimizer, tmp_path, home)
    plain = made(case)
    master = plain.gain.detach().float().requires_grad_()
    reference = optimizer([plain.weight, master, plain.shift, *plain.head.parameters()])
    for batch in batches(case):
        loss = case.loss(plain, batch)
        loss.backward()
        master.grad, plain.gain.grad = plain.gain.grad.float(), None
        reference.step()
        reference.zero_grad()
        with torch.no_grad():
            plain.gain.copy_(master)
        assert same_bits(loss.detach(), train_step(case, model, streamed, batch))
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
    assert_same_weights(plain, model)


# ---------------------------------------------------------------------- what is computed when nothing is said, and errors


@pytest.mark.parametrize("fast", [False, True])
def test_sixteen_bit_storage_is_computed_in_only_where_that_is_fast(
    fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "multiplies_fast", lambda *_: fast)
    model, _ = prepared(MODELS["mlp"], OPTIMIZERS["sgd"], tmp_path, "ram", param_dtype="bfloat16")
    expected = torch.bfloat16 if fast else torch.float32
    assert {p.dtype for p in model.parameters()} == {expected}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim_dtype": "float16"}, "optim_dtype='float16' is narrower than .*float32"),
        ({"param_dtype": "float16", "master": "none"}, "master='none' rounds every update to the .*float16"),
    ],
    ids=["states", "parameters"],
)
def test_rounding_into_float16_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(zi.ConfigError, match=message):
        zi.prepare(model, OPTIMIZERS["sgd"](model.parameters()), zi.Config(memory="8MiB", **settings))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(same_bits(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "optim_dtype", "reduce_dtype"])
@pytest.mark.parametrize("value", ["int8", "fp16", torch.int64, 16])
def test_a_dtype_that_is_none_is_refused_by_the_config(field: str, value: Any) -> None:
    with pytest.raises(zi.ConfigError, match=rf"{field}=.*accepted.*bfloat16"):
        zi.Config(memory="8MiB", **{field: value})


# ---------------------------------------------------------------------- several dtypes in one model


class Casting(nn.Module):
    """Parameters of three dtypes in one module, between layers of two; outputs are cast as a policy would."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16).bfloat16()
        self.matrix = nn.Parameter(torch.randn(16, 16))
        self.rounded = nn.Parameter(torch.randn(16, 16).bfloat16())
        self.exact = nn.Parameter(torch.randn(16).double())
        self.middle.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
        self.middle.register_forward_hook(lambda _, __, output: output.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x).tanh()) @ self.matrix
        return (x.tanh().bfloat16() @ self.rounded).double() * self.exact


@pytest.mark.parametrize("home", HOMES)
def test_each_parameter_keeps_its_dtype(home: str, tmp_path: Path) -> None:
    """Those of 16 bits have master weights; the others are updated as they are."""
    case = Case(Casting, vectors(16), lambda model, x: model(x).square().mean())
    plain = moved(made(case))
    trained = [p.detach().float().clone().requires_grad_() if p.itemsize == 2 else p for p in plain.parameters()]
    reference = OPTIMIZERS["sgd"](trained)
    model, optimizer = prepared(case, OPTIMIZERS["sgd"], tmp_path, home)
    for data in map(on_device, batches(case)):
        loss = case.loss(plain, data)
        loss.backward()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), trained, strict=True):
                if master is not p and p.grad is not None:
                    master.grad, p.grad = p.grad.float(), None
        reference.step()
        reference.zero_grad()
        with torch.no_grad():
            for p, master in zip(plain.parameters(), trained, strict=True):
                p.copy_(master)
        assert same_bits(loss.detach(), train_step(case, model, optimizer, data))
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16, torch.float64}
    assert_same_weights(plain, model)
