"""Layers used in tiles train as whole ones do: bit for bit where sums are the same, to 1e-6 where they are split."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compare import (
    FITS,
    FITS_RAM,
    Outcome,
    Run,
    adamw,
    asked_of_place,
    assert_sound,
    compare,
    copied,
    least_budget,
    run_plain,
    seeded,
    sgd,
    training,
)
from support.device import DEVICE, cpu_only, moved, on_device, placed
from support.models import (
    CASES,
    VOCABULARY,
    Case,
    TiedHead,
    gpt2,
    llama,
    mean_square,
    mlp,
    next_token,
    of_labels,
    tokens,
    vectors,
)
from torch import nn
from transformers.pytorch_utils import Conv1D

import zero_infinity as zi
from zero_infinity.activations import offload
from zero_infinity.api import engine_of
from zero_infinity.params import offloaded_param
from zero_infinity.tiling.lazy_logits import LazyLogits

CLOSE = 1e-6  # relative, as a norm
NOISE = 1e-8  # what rounding leaves of a gradient that is zero: of the bias of attention's keys

MODELS = {
    **{name: CASES[name] for name in ("gpt2", "t5", "vit", "mlp", "tied", "bert")},
    "llama": Case(llama, tokens(), of_labels),
    "llama_tied": Case(lambda: llama(tie_word_embeddings=True), tokens(), of_labels),
}


def largest(make: Callable[[], nn.Module]) -> int:
    """Bytes of the largest weight with its gradient."""
    return max(2 * p.nbytes for p in make().parameters())


def tiled(model: nn.Module) -> dict[str, int]:
    """Parameters in tiles, and in how many."""
    known = {name: offloaded_param.managed(p) for name, p in model.named_parameters()}
    return {name: len(m.tiles) for name, m in known.items() if m is not None and m.tiles}


def assert_close(plain: Outcome, prepared: Outcome, tolerance: float = CLOSE) -> None:
    """Every logged number, weight and optimizer state: the difference's norm to `tolerance` of its own."""
    pairs = [(f"logged {n}", a, b) for n, (a, b) in enumerate(zip(plain.logged, prepared.logged, strict=True))]
    assert list(plain.weights) == list(prepared.weights)
    pairs += [(name, value, prepared.weights[name]) for name, value in plain.weights.items()]
    assert plain.optimizer["param_groups"] == prepared.optimizer["param_groups"]
    assert plain.optimizer["state"].keys() == prepared.optimizer["state"].keys()
    for number, state in plain.optimizer["state"].items():
        assert state.keys() == prepared.optimizer["state"][number].keys()
        pairs += [(f"{name} of {number}", v, prepared.optimizer["state"][number][name]) for name, v in state.items()]
    for name, expected, found in pairs:
        if isinstance(expected, torch.Tensor):
            assert expected.shape == found.shape, name
            assert expected.dtype == found.dtype, name
            expected, found = expected.detach().cpu().double(), found.detach().cpu().double()
            assert float((expected - found).norm()) <= tolerance * float(expected.norm()) + NOISE, name
        else:
            assert expected == found, name


def check(
    case: Case, directory: Path, *, optimizer: Any = sgd, num_steps: int = 4, script: Any = None, **config: Any
) -> Outcome:
    """Train plain and in tiles; both agree closely. At least one parameter was cut."""
    script = script or training(case.batch, case.loss, num_steps=num_steps)
    cut: dict[str, int] = {}

    def watched(run: Run) -> None:
        if run.prepared:
            cut.update(tiled(run.model))
        script(run)

    plain = run_plain(case.make, script, optimizer)
    prepared = run_prepared(
        case.make, watched, optimizer, zi.Config(**{"nvme": directory, "memory": "64MiB", **config})
    )
    assert cut, "nothing was cut"
    assert_close(plain, prepared)
    return prepared


def run_prepared(make: Callable[[], nn.Module], script: Any, optimizer: Any, config: zi.Config) -> Outcome:
    """Train in tiles. Weights are taken from the state_dict: whole ones may not fit."""
    torch.manual_seed(0)
    model = make()
    model, streamed = zi.prepare(model, optimizer(model), config)
    run = Run(model, streamed, prepared=True)
    torch.manual_seed(1)
    script(run)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    states = model.state_dict()
    weights = {name: copied(states[name]) for name in names}
    assert_sound(model)
    return Outcome(run.logged, weights, {}, copied(streamed.state_dict()), zi.stats(model))


def least_in_tiles(case: Case, above: int, optimizer: Any = sgd, **config: Any) -> int:
    return least_budget(asked_of_place(case.make, optimizer, tile_above=above, **config), nvme=True)


# ---------------------------------------------------------------------- models


@pytest.mark.half
@pytest.mark.parametrize("factor", [2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_models_in_tiles_train_as_whole_ones(name: str, factor: int, tmp_path: Path) -> None:
    case = MODELS[name]
    above = -(-largest(case.make) // factor)
    memory = least_in_tiles(case, above)
    stats = check(case, tmp_path, tile_above=above, memory=memory).stats
    assert stats is not None
    assert stats.bytes_read > 0


@pytest.mark.parametrize("name", ["gpt2", "llama_tied", "mlp"])
def test_in_ram_and_with_the_update_after_backward(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    above = largest(case.make) // 3
    check(case, tmp_path, tile_above=above, nvme=None)
    check(case, tmp_path, tile_above=above)  # with room for gradients that wait for others of their tile
    check(case, tmp_path, tile_above=above, memory=least_in_tiles(case, above), update="after_backward")


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_states_of_other_optimizers(optimizer: Any, tmp_path: Path) -> None:
    """One step: afterwards a gradient that is zero but for rounding has a state of full size."""
    case = Case(lambda: mlp(width=48), vectors(48), mean_square)
    check(case, tmp_path, optimizer=lambda m: optimizer(m.parameters(), lr=1e-4), num_steps=1, tile_above="4KiB")


def test_an_embedding_and_a_first_layer_are_bit_identical(tmp_path: Path) -> None:
    """No sum of theirs is split: an embedding copies rows, and a first layer's input has no gradient."""
    make = lambda: nn.Sequential(nn.Embedding(VOCABULARY, 64, padding_idx=0), nn.Linear(64, 16))
    loss = lambda model, batch: model(batch).square().mean()
    stats = compare(make, training(tokens(), loss), adamw, FITS, tmp_path, tile_above="12KiB")
    assert stats.num_steps == 5
    first = lambda: nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1))
    compare(first, training(vectors(64, 16), mean_square), adamw, FITS_RAM, tmp_path, tile_above="32KiB")


def test_outputs_of_a_linear_layer_are_bit_identical(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = moved(nn.Linear(96, 256))
    x = torch.randn(4, 24, 96, device=DEVICE)
    expected = model(x)
    model, _ = zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="48KiB"))
    assert tiled(model) == {"weight": 4}
    assert torch.equal(model(x), expected)


# ---------------------------------------------------------------------- by chance


class Three(nn.Module):
    """One of each kind of layer."""

    def __init__(self, words: int, width: int, hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=1, scale_grad_by_freq=True)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = Conv1D(width, hidden)
        self.head = nn.Linear(width, words, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.words(x)).tanh()))


@settings(max_examples=15)
@given(
    words=st.integers(3, 40),
    width=st.integers(1, 20),
    hidden=st.integers(2, 40),
    bias=st.booleans(),
    tied=st.booleans(),
    rows=st.integers(1, 17),
)
def test_any_shape_in_any_tiles(
    words: int, width: int, hidden: int, bias: bool, tied: bool, rows: int, tmp_path: Path
) -> None:
    """In float64, where rounding cannot hide a mistake."""

    def make() -> nn.Module:
        model = Three(words, width, hidden, bias=bias).double()
        if tied:
            model.head.weight = model.words.weight
        return model

    batch = lambda number: on_device(torch.randint(0, words, (2, 5), generator=seeded(number)))
    script = training(batch, next_token, num_steps=3)
    plain = run_plain(make, script, sgd)
    above = 16 * max(width, rows)
    prepared = run_prepared(
        make, script, sgd, zi.Config(memory="16MiB", nvme=tmp_path, tile_above=max(above, 16 * width))
    )
    assert_close(plain, prepared, 1e-12)


# ---------------------------------------------------------------------- the loop


def accumulating(case: Case) -> Any:
    def script(run: Run) -> None:
        for number in range(6):
            loss = case.loss(run.model, case.batch(number)) / 2
            loss.backward()
            run.log(loss)
            if number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()

    return script


def without_sync(case: Case) -> Any:
    def script(run: Run) -> None:
        for number in range(4):
            with run.optimizer.no_sync() if run.prepared else torch.enable_grad():  # type: ignore[attr-defined]
                case.loss(run.model, case.batch(number)).backward()
            run.step(case.loss(run.model, case.batch(number + 10)))

    return script


@pytest.mark.parametrize("name", ["gpt2", "tied", "mlp"])
def test_accumulation_and_no_sync(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    above = largest(case.make) // 3
    memory = least_in_tiles(case, above)
    script = accumulating(case)
    check(case, tmp_path, script=script, tile_above=above, memory=memory, gradient_accumulation_steps=2)
    check(case, tmp_path, script=without_sync(case), tile_above=above, memory=memory)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_clipping(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    above = largest(case.make) // 3

    def by_config(run: Run) -> None:
        for number in range(3):
            loss = case.loss(run.model, case.batch(number))
            loss.backward()
            if not run.prepared:
                norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(loss, run.optimizer.grad_norm if run.prepared else norm)  # type: ignore[attr-defined]

    def by_call(run: Run) -> None:
        clip = zi.clip_grad_norm_ if run.prepared else torch.nn.utils.clip_grad_norm_
        for number in range(3):
            loss = case.loss(run.model, case.batch(number))
            loss.backward()
            run.log(loss, clip(run.model.parameters(), 0.05))
            run.optimizer.step()
            run.optimizer.zero_grad()

    check(case, tmp_path, script=by_config, tile_above=above, max_grad_norm=0.05)
    check(case, tmp_path, script=by_call, tile_above=above, update="after_backward")


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_recomputed_blocks(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    above = largest(case.make) // 3
    memory = least_in_tiles(case, above, checkpoint_activations=True)
    check(case, tmp_path, tile_above=above, memory=memory, checkpoint_activations=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_in_16_bits(dtype: str, tmp_path: Path) -> None:
    """Against the same model in whole layers: the first loss is the same, and so are almost all stored values."""
    case = MODELS["gpt2"]
    common = {"memory": "8MiB", "nvme": tmp_path, "param_dtype": dtype, "compute_dtype": "float32"}
    script = training(case.batch, case.loss, num_steps=1)
    whole = run_prepared(case.make, script, sgd, zi.Config(**common, tile_above="1GiB"))
    parts = run_prepared(case.make, script, sgd, zi.Config(**common, tile_above=largest(case.make) // 3))
    for a, b in zip(whole.logged, parts.logged, strict=True):
        assert abs(a.item() - b.item()) <= CLOSE * abs(a.item())
    different = sum(int(((a != parts.weights[n]) & (a.abs() > NOISE)).sum()) for n, a in whole.weights.items())
    assert different <= 1e-3 * sum(value.numel() for value in whole.weights.values())
    for number, state in whole.optimizer["state"].items():
        found = parts.optimizer["state"][number]["momentum_buffer"]
        assert float((state["momentum_buffer"] - found).norm()) <= CLOSE * float(found.norm()) + NOISE


def test_computed_in_16_bits(tmp_path: Path) -> None:
    """float16 with its loss scale (logits are whole then), and bfloat16."""
    case = Case(lambda: gpt2(), tokens(), of_labels)
    for dtype in ("float16", "bfloat16"):
        common = {"memory": "8MiB", "nvme": tmp_path, "param_dtype": dtype, "compute_dtype": dtype}
        script = training(case.batch, case.loss, num_steps=2)
        whole = run_prepared(case.make, script, sgd, zi.Config(**common, tile_above="1GiB"))
        parts = run_prepared(case.make, script, sgd, zi.Config(**common, tile_above=largest(case.make) // 3))
        for a, b in zip(whole.logged, parts.logged, strict=True):
            assert abs(a.item() - b.item()) <= 1e-2 * abs(a.item())


@cpu_only("autocast has no rules for the test device")
def test_autocast(tmp_path: Path) -> None:
    case = MODELS["mlp"]

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch)
            assert out.dtype is torch.bfloat16
            return (out - 0.5).square().mean()

    script = training(case.batch, loss, num_steps=1)
    plain = run_plain(case.make, script, sgd)
    parts = run_prepared(case.make, script, sgd, zi.Config(memory="8MiB", nvme=tmp_path, tile_above="2KiB"))
    assert_close(plain, parts, 2e-2)


# ---------------------------------------------------------------------- the whole parameter


def test_names_shapes_and_states_are_those_of_the_whole(tmp_path: Path) -> None:
    plain = moved(TiedHead())
    model = copy.deepcopy(plain)
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="4KiB"))
    assert tiled(model)["embedding.weight"] == 6
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    states = model.state_dict()
    assert list(states) == list(plain.state_dict())
    assert all(torch.equal(value, states[name]) for name, value in plain.state_dict().items())
    assert model.head.weight is model.embedding.weight
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in plain.state_dict().items()})
    assert all(bool((value == 0.5).all()) for value in model.state_dict().values())
    next_token(model, tokens()(0)).backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == plain.embedding.weight.shape
    copied = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert torch.equal(copied.head.weight, model.state_dict()["head.weight"])


def looks(run: Run) -> None:
    """Reads, edits and uses of a weight that need it whole."""
    weight = run.model.head.weight
    batch = tokens()(0)
    for number in range(3):
        loss = next_token(run.model, batch) + 1e-2 * weight.square().mean() + F.linear(weight[:3], weight).mean()
        run.log(weight.norm(), weight.detach()[5], (weight.T @ weight).mean())
        run.step(loss)
        weight.data.clamp_(-1, 1)
        run.log(weight.max())
        with torch.no_grad():
            weight[number] += 0.25
            weight.mul_(0.9)
        run.log(weight.sum())
        if number == 1:
            weight.data = torch.ones_like(weight)
            run.log(next_token(run.model, batch))
        if run.prepared:
            with zi.gathered([weight]):
                weight.data[2] = 0.125
        else:
            weight.data[2] = 0.125
        run.log(weight[2])


@pytest.mark.parametrize("changes", [{}, {"nvme": None}, {"update": "after_backward"}], ids=str)
def test_whole_uses_and_edits(changes: dict[str, Any], tmp_path: Path) -> None:
    """In float64: the edits make logits so large that float32's rounding shows, more or less, by machine."""
    case = Case(lambda: TiedHead().double(), tokens(), next_token)
    check(case, tmp_path, script=looks, tile_above="8KiB", memory="4MiB", **changes)


def test_an_edit_before_the_step_counts_before_the_update(tmp_path: Path) -> None:
    """In float64, as above."""
    case = Case(lambda: CASES["tied"].make().double(), CASES["tied"].batch, CASES["tied"].loss)

    def script(run: Run) -> None:
        for number in range(4):
            next_token(run.model, case.batch(number)).backward()
            run.model.head.weight.data.clamp_(-0.5, 0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(run.model.head.weight.max())

    check(case, tmp_path, script=script, tile_above="4KiB", memory="4MiB", update="after_backward")


def test_an_edit_before_the_step_leaves_no_copy_of_its_value() -> None:
    """Where modules compute with copies, those of tiles are stale after the update, as others are."""
    case = CASES["tied"]
    model = case.make()
    config = zi.Config(
        memory="4MiB", param_dtype="bfloat16", compute_dtype="float32", tile_above="4KiB", update="after_backward"
    )
    model, optimizer = zi.prepare(model, sgd(model), config)
    for number in range(2):
        case.loss(model, case.batch(number)).backward()
        model.head.weight.data.clamp_(-0.5, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found = case.loss(model, case.batch(number))
            engine_of(model).cache._tier.drop_unpinned()
            assert torch.equal(case.loss(model, case.batch(number)), found)


def test_gradients_are_shown_whole(tmp_path: Path) -> None:
    case = CASES["tied"]

    def script(run: Run) -> None:
        weight = run.model.head.weight
        for number in range(3):
            next_token(run.model, case.batch(number)).backward()
            with zi.gathered([weight]) if run.prepared else torch.enable_grad():
                run.log(weight.grad)
                weight.grad.mul_(0.5)
            run.optimizer.step()
            run.optimizer.zero_grad()

    check(case, tmp_path, script=script, tile_above="4KiB", memory="4MiB", update="after_backward")


@cpu_only("whole weights and saved tensors are in device memory")
def test_a_whole_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 512, bias=False))
    above = 2 * 512 * 256 * 4 // 16
    memory = least_in_tiles(Case(lambda: model, vectors(256), mean_square), above)
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory=memory, nvme=tmp_path, tile_above=above))
    with pytest.raises(zi.CapacityError, match=r"'0.weight' is used in 16 tiles.*512\.0 KiB.*\n  fix:   memory="):
        model[0].weight.norm()
    for _ in range(3):
        model(torch.ones(2, 256, device=DEVICE)).mean().backward()
        optimizer.step()
    assert model.state_dict()["0.weight"].shape == (512, 256)  # which takes memory of its own


def test_frozen_and_thawed(tmp_path: Path) -> None:
    case = MODELS["mlp"]

    def script(run: Run) -> None:
        weights = [run.model[0].weight, run.model[3].weight]
        for number in range(6):
            for weight in weights:
                weight.requires_grad_(number % 3 != 1)
            run.step(case.loss(run.model, case.batch(number)))

    make = lambda: mlp().eval()
    check(Case(make, case.batch, case.loss), tmp_path, script=script, tile_above="2KiB")


@cpu_only("whole weights and saved tensors are in device memory")
def test_saved_tensors_and_whole_weights_share_what_is_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """In RAM, where neither can make room for the other: whoever comes first has it, and it comes back."""
    monkeypatch.setattr(offload, "_SMALL_BYTES", 512)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    expected = [p.detach().clone() for p in model.parameters()]
    settings = {"tile_above": "4KiB", "offload_activations": "all"}
    least = least_budget(asked_of_place(lambda: copy.deepcopy(model), sgd, tile_above="4KiB"), nvme=False)
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory=least + (12 << 10), **settings))  # type: ignore[arg-type]
    spare = engine_of(model)._layout.spare
    room = spare.num_bytes
    assert room >= 12 << 10
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), expected, strict=True))
    loss = mean_square(model, vectors(32, 24)(0))
    assert spare.num_bytes < 8 << 10
    with pytest.raises(zi.CapacityError, match=r"'0.weight' is used in 4 tiles, but needed whole here"):
        model[0].weight.norm()
    loss.backward()
    optimizer.step()
    assert spare.num_bytes == room
    assert model[0].weight.norm().item() > 0


def test_gradients_by_autograd_grad_come_whole_and_train_nothing(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        batch = tokens()(0)
        weights = [run.model.head.weight, run.model.body.weight]
        for _ in range(2):
            run.log(*torch.autograd.grad(next_token(run.model, batch), weights))
            hidden = torch.ones(2, 32, requires_grad=True, device=DEVICE)
            run.log(*torch.autograd.grad(F.linear(hidden, weights[1]).sum(), [hidden]))
            run.step(next_token(run.model, batch))

    check(CASES["tied"], tmp_path, script=script, tile_above="2KiB")


def test_two_backwards_through_one_graph(tmp_path: Path) -> None:
    case = MODELS["gpt2"]

    def script(run: Run) -> None:
        run.model.eval()
        for number in range(4):
            loss = case.loss(run.model, case.batch(number))
            loss.backward(retain_graph=True)
            run.step(loss)

    check(case, tmp_path, script=script, tile_above=largest(case.make) // 3)


def test_a_weight_that_changed_after_forward_is_torchs_own_error(tmp_path: Path) -> None:
    model = mlp().eval()
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="2KiB"))
    for _ in range(4):  # until updates come early
        loss = mean_square(model, vectors()(0))
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients(kind: str, tmp_path: Path) -> None:
    """One that was there before leaves the parameter whole; one that comes later is refused."""
    model = mlp()
    seen: list[torch.Size] = []
    getattr(model[0].weight, kind)(lambda tensor: seen.append(tensor.shape))
    model, _ = zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="2KiB"))
    assert "0.weight" not in tiled(model)
    mean_square(model, vectors()(0)).backward()
    assert seen == [(32, 32)]
    with pytest.raises(zi.UsageError, match=r"'3.weight' is used in tiles.*\n  fix:   a larger tile_above"):
        getattr(model[3].weight, kind)(lambda tensor: None)


@pytest.mark.parametrize("name", ["mlp", "tied", "llama"])
def test_tiles_are_updated_while_backward_goes_on(name: str, tmp_path: Path) -> None:
    """Nothing that a tiled layer keeps for backward holds an update up, nor do logits that somebody has."""
    case = MODELS[name]
    model = case.make()
    config = zi.Config(memory="8MiB", nvme=tmp_path, tile_above=largest(case.make) // 3)
    model, optimizer = zi.prepare(model, sgd(model), config)
    kept = []
    for number in range(4):
        batch = case.batch(number)
        if name == "llama":
            kept.append(model(input_ids=batch, labels=batch))
            kept[-1].loss.backward()
        else:
            case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    gradients = engine_of(model).gradients
    tiles = {tile.unit for p in model.parameters() if (m := offloaded_param.managed(p)) is not None for tile in m.tiles}
    assert tiles
    assert tiles <= gradients.cycle.last.updated
    assert not gradients.cycle.last.deferred


# ---------------------------------------------------------------------- logits


def test_logits_are_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in forward, nor in backward: no tensor of a step is as wide as the vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    words, rows = 400, 2 * 8
    widest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal widest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point() and not isinstance(result, LazyLogits):
                widest = max(widest, result.numel() if result.dim() > 1 and result.shape[-1] == words else 0)
            return result

    make = placed(lambda: llama_of(words))
    model = make()
    batch = on_device(torch.randint(2, words, (2, 8), generator=seeded(0)))
    with Watch():
        model(input_ids=batch, labels=batch).loss.backward()
    assert widest >= words * rows
    model = make()
    above = 2 * 4 * words * 32 // 5
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory="8MiB", nvme=tmp_path, tile_above=above))
    assert tiled(model)["lm_head.weight"] == 5
    widest = 0
    with Watch():
        model(input_ids=batch, labels=batch).loss.backward()
    assert widest == 0
    optimizer.step()


def llama_of(words: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": lambda logits, y: F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1)),
    "sum, ignored": lambda logits, y: F.cross_entropy(
        logits.flatten(0, 1), y.flatten().where(y.flatten() % 3 > 0, -100), reduction="sum"
    ),
    "none": lambda logits, y: F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").square().mean(),
    "shifted": lambda logits, y: F.cross_entropy(
        logits[..., :-1, :].contiguous().float().view(-1, VOCABULARY), y[..., 1:].reshape(-1), ignore_index=7
    ),
    "last": lambda logits, y: nn.CrossEntropyLoss()(logits[:, -1], y[:, -1]),
    "smoothed": lambda logits, y: F.cross_entropy(logits.view(-1, VOCABULARY), y.view(-1), label_smoothing=0.1),
    "weighted": lambda logits, y: F.cross_entropy(
        logits.view(-1, VOCABULARY), y.view(-1), weight=torch.linspace(0.5, 1, VOCABULARY, device=DEVICE)
    ),
    "soft": lambda logits, y: F.cross_entropy(logits.view(-1, VOCABULARY), F.one_hot(y.view(-1), VOCABULARY).float()),
    "capped": lambda logits, y: F.cross_entropy((logits / 3).tanh().view(-1, VOCABULARY), y.view(-1)),
    "by hand": lambda logits, y: -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).mean(),
    "by class": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "with a penalty": lambda logits, y: (
        F.cross_entropy(logits.flatten(0, 1), y.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()
    ),
    "penalty first": lambda logits, y: (
        1e-2 * logits.logsumexp(-1).square().mean() + F.cross_entropy(logits.flatten(0, 1), y.flatten())
    ),
    "custom function": lambda logits, y: _Twice.apply(logits).log_softmax(-1).square().mean(),  # type: ignore[no-untyped-call]
}


class _Twice(torch.autograd.Function):
    """A user's own function, which gets its arguments past every override."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Head(nn.Module):
    """Logits with or without a bias, of a model that has nothing else."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x).sin())


@pytest.mark.half
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_logits(name: str, bias: bool, tmp_path: Path) -> None:
    case = Case(lambda: Head(bias=bias), tokens(), lambda model, batch: LOSSES[name](model(batch), batch))
    check(case, tmp_path, tile_above="4KiB", num_steps=3)


def prepared_head(directory: Path, **config: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Head(bias=True)
    return zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=directory, tile_above="4KiB", **config))


def test_logits_are_computed_when_somebody_looks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = moved(Head(bias=True))
    batch = tokens()(0)
    expected = plain(batch)
    model, _ = prepared_head(tmp_path)
    logits = model(batch)
    assert isinstance(logits, LazyLogits)
    assert logits.shape == expected.shape
    assert logits.requires_grad
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    with torch.no_grad():
        assert type(model(batch)) is torch.Tensor
    loss = next_token(model, batch)
    logits = model(batch)
    with torch.no_grad():  # a look on the way does not take the gradient away
        logits.softmax(-1)
    loss = loss + logits.mean()
    loss.backward()


def test_logits_that_cannot_be_computed_any_more_are_an_error(tmp_path: Path) -> None:
    model, optimizer = prepared_head(tmp_path)
    for _ in range(4):
        logits = model(tokens()(0))
        F.cross_entropy(logits.flatten(0, 1), tokens()(0).flatten()).backward()
        optimizer.step()
        with pytest.raises(zi.UsageError, match=r"first used after its weight was updated.*\n  fix:   use logits"):
            logits.argmax(-1)


@cpu_only("kernels of a device raise later")
def test_wrong_targets_and_words_are_torchs_own_errors(tmp_path: Path) -> None:
    model, _ = prepared_head(tmp_path)
    logits = model(tokens()(0)).flatten(0, 1)
    with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
        F.cross_entropy(logits, torch.full((len(logits),), VOCABULARY, device=DEVICE))
    with pytest.raises(IndexError, match="index out of range in self"):
        model(torch.full((1, 2), VOCABULARY, device=DEVICE))


# ---------------------------------------------------------------------- what is cut


def test_a_model_that_fits_is_not_cut(tmp_path: Path) -> None:
    case = CASES["gpt2"]
    minimum = least_budget(asked_of_place(case.make, adamw), nvme=True)
    model = case.make()
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory=minimum, nvme=tmp_path))
    assert not tiled(model)


@pytest.mark.parametrize("share", [2, 4])
def test_a_model_that_does_not_fit_is_cut_without_a_word(share: int, tmp_path: Path) -> None:
    """A layer of up to four times the whole memory."""
    case = Case(lambda: nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64)), vectors(64), mean_square)
    memory = 1024 * 64 * 4 // share + (64 << 10)
    prepared = check(case, tmp_path, memory=memory)
    assert prepared.stats is not None
    assert prepared.stats.memory_peak <= memory


def test_a_row_that_is_larger_than_tile_above_is_an_error_with_both_numbers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(1000, 8))
    with pytest.raises(
        zi.ConfigError,
        match=r"tile_above is 4\.0 KiB, but one row of '0\.weight' \(8, 1000\) takes 7\.8 KiB.*\n  fix:   tile_above=\"8KiB\"",
    ):
        zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="4KiB"))
    assert type(model[0].weight) is nn.Parameter
    zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="8KiB"))


def test_what_does_not_do_with_tiles_stays_whole(tmp_path: Path) -> None:
    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight.abs(), self.bias)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other = Other(32, 32)
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
            self.normed = nn.Embedding(32, 32, max_norm=1.0)
            self.position = nn.Parameter(torch.randn(64, 32))
            self.plain = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.other(x) + self.position[: x.shape[1]] + self.normed(torch.arange(x.shape[1], device=DEVICE))
            return self.plain(self.attention(x, x, x)[0])

    batch = lambda number: on_device(torch.randn(2, 6, 32, generator=seeded(number)))
    check(Case(Mixed, batch, mean_square), tmp_path, tile_above="2KiB")
    model = Mixed()
    model, _ = zi.prepare(model, sgd(model), zi.Config(memory="4MiB", nvme=tmp_path, tile_above="2KiB"))
    assert list(tiled(model)) == ["plain.weight"]


@pytest.mark.parametrize("factor", [1, 2, 4, 16])
def test_each_factor_buys_what_the_formula_says(factor: int) -> None:
    """The least memory is that of a tile, its gradient and what does not depend on it (chunks and biases)."""
    width = 512
    case = Case(lambda: nn.Sequential(nn.Linear(width, width, bias=False)), vectors(width), mean_square)
    layer = 2 * width * width * 4
    least = least_in_tiles(case, layer // factor)
    # A chunk is a 24th of the cache, which is about a tile: two of them are a 24th of a tile and its gradient.
    assert layer // factor <= least <= layer // factor * (1 + 1 / 20) + 5 * 4096


def test_models_built_by_init_are_cut_when_they_are_prepared(tmp_path: Path) -> None:
    case = MODELS["gpt2"]
    config = zi.Config(memory="4MiB", nvme=tmp_path, tile_above=largest(case.make) // 3)
    script = training(case.batch, case.loss, num_steps=3)

    def build() -> nn.Module:
        with zi.init(config):
            return case.make()

    assert_close(run_plain(case.make, script, sgd), run_prepared(build, script, sgd, config))
    torch.manual_seed(0)
    model = build()
    model, _ = zi.prepare(model, sgd(model), config)
    assert tiled(model)
    assert engine_of(model).stats().num_parameters == sum(p.numel() for p in case.make().parameters())


@cpu_only("the accelerator is emulated on the CPU")
def test_an_accelerator(tmp_path: Path) -> None:
    case = CASES["tied"]
    script = training(case.batch, case.loss, num_steps=4)
    torch.manual_seed(0)
    model = case.make()
    device = zi.EmulatedAccelerator(48 << 10, bytes_per_second=1e12, latency_seconds=0)
    config = zi.Config(memory="1MiB", nvme=tmp_path, tile_above="4KiB")
    model, optimizer = zi.prepare(model, sgd(model), config, device=device)
    assert tiled(model)
    run = Run(model, optimizer, prepared=True)
    torch.manual_seed(1)
    script(run)
    plain = run_plain(case.make, script, sgd)
    for a, b in zip(plain.logged, run.logged, strict=True):
        assert abs(a.item() - b.item()) <= CLOSE * abs(a.item())
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.weights[name], rtol=1e-5, atol=1e-7)
    run.log(model.head.weight.norm())
