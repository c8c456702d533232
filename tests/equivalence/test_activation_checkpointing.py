"""Activation checkpointing changes what is held, and no bit of what is computed."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import (
    FITS,
    HALF,
    MINIMAL,
    SETTINGS,
    Run,
    Setting,
    adamw,
    compare,
    run_prepared,
    same_bits,
    training,
)
from support.device import DEVICE, cpu_only, moved
from support.matrix import thinned
from support.models import (
    CASES,
    Case,
    gpt2,
    llama,
    mean_square,
    of_labels,
    sequences,
    tokens,
    vectors,
)
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import zero_infinity as zi
from zero_infinity.activations import recompute
from zero_infinity.activations.block_finder import find_stacks


class Layer(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def residual_mlp(depth: int = 4, width: int = 32) -> nn.Module:
    return nn.Sequential(*[Layer(width) for _ in range(depth)], nn.Linear(width, width))


def only_layers(depth: int = 4, width: int = 32) -> nn.Module:
    return nn.Sequential(*[Layer(width) for _ in range(depth)])


BLOCKS = {
    "gpt2": CASES["gpt2"],
    "llama": CASES["llama"],
    "t5": CASES["t5"],
    "vit": CASES["vit"],
    "transformer": CASES["transformer"],
    "mixtral": CASES["mixtral"],
    "mlp": Case(only_layers, vectors(), mean_square),
}


@pytest.mark.parametrize(("name", "setting"), thinned([*BLOCKS], SETTINGS))
def test_as_without_checkpointing(name: str, setting: Setting, tmp_path: Path) -> None:
    case = BLOCKS[name]
    script = training(case.batch, case.loss, num_steps=4)
    compare(case.make, script, adamw, setting, tmp_path, checkpoint_activations=True)


@pytest.mark.parametrize("name", ["gpt2", "t5", "mlp"])
def test_every_other_block(name: str, tmp_path: Path) -> None:
    case = BLOCKS[name]
    compare(case.make, training(case.batch, case.loss), adamw, MINIMAL, tmp_path, checkpoint_activations=2)


def test_accumulation_and_retained_gradients(tmp_path: Path) -> None:
    """update="after_backward", and two backwards for each step."""

    def script(run: Run) -> None:
        for number in range(6):
            torch.manual_seed(number)
            loss = of_labels(run.model, tokens()(number))
            loss.backward()
            run.log(loss)
            if number % 2:
                run.optimizer.step()
                run.optimizer.zero_grad()

    changes: dict[str, Any] = {"gradient_accumulation_steps": 2, "checkpoint_activations": True}
    compare(gpt2, script, adamw, MINIMAL, tmp_path, **changes)
    compare(gpt2, script, adamw, MINIMAL, tmp_path, update="after_backward", **changes)


def test_autocast_is_kept(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(3):
            torch.manual_seed(number)
            with torch.autocast("cpu", torch.bfloat16):
                loss = run.model(vectors()(number)).float().square().mean()
            run.step(loss)

    compare(only_layers, script, adamw, HALF, tmp_path, checkpoint_activations=True)


def test_float16_parameters_and_masters(tmp_path: Path) -> None:
    """Against the same precision without checkpointing."""
    script = training(vectors(), lambda m, x: m(x).float().square().mean(), num_steps=3)
    config = zi.Config(memory="1MiB", nvme=tmp_path, param_dtype="bfloat16")
    outcomes = [
        run_prepared(only_layers, script, adamw, config.replace(checkpoint_activations=on)) for on in (False, True)
    ]
    for name, weight in outcomes[0].weights.items():
        assert same_bits(weight, outcomes[1].weights[name])


# ---------------------------------------------------------------------- what blocks are given and return


@dataclass
class Out:
    x: torch.Tensor
    extra: torch.Tensor | None
    note: str


class Odd(nn.Module):
    """A block with keywords, flags, None, lists and dataclasses, and a side effect on an argument."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(
        self, state: Out, *, seen: list[int], options: dict[str, Any], context_fn: float, mask: torch.Tensor | None
    ) -> tuple[Out, None, dict[str, torch.Tensor]]:
        seen.append(len(seen))
        x = self.linear(state.x) * self.scale * context_fn + len(seen)
        if mask is not None:
            x = x.masked_fill(mask, options["fill"])
        return Out(x.tanh(), None, state.note + "."), None, {"sum": x.sum()}


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, total, seen = Out(x, None, ""), torch.zeros((), device=DEVICE), []
        for number, layer in enumerate(self.layers):
            mask = x > 1 if number else None
            state, nothing, more = layer(state, seen=seen, options={"fill": 0.5}, context_fn=1.25, mask=mask)
            total = total + more["sum"]
            assert nothing is None
        assert seen == [0, 1, 2]
        assert state.note == "..."
        return state.x + total


def test_keywords_objects_and_none(tmp_path: Path) -> None:
    script = training(vectors(), mean_square)
    compare(OddModel, script, adamw, MINIMAL, tmp_path, checkpoint_activations=True)


class Norms(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x)).relu()


def test_buffers_change_once(tmp_path: Path) -> None:
    """Statistics of batch norms and the power iteration of spectral norms."""
    make = lambda: nn.Sequential(*[Norms() for _ in range(3)])
    compare(make, training(vectors(), mean_square), adamw, FITS, tmp_path, checkpoint_activations=True)


def test_a_single_operator_as_a_block(tmp_path: Path) -> None:
    case = CASES["mlp"]
    script = training(case.batch, case.loss)
    compare(
        case.make, script, adamw, MINIMAL, tmp_path, checkpoint_activations=True, checkpoint_modules=[nn.Linear, "GELU"]
    )


def test_twice_through_a_graph(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        torch.manual_seed(3)
        loss = mean_square(run.model, vectors()(0))
        loss.backward(retain_graph=True)
        loss.backward()
        run.optimizer.step()
        run.log(loss)

    compare(only_layers, script, adamw, FITS, tmp_path, checkpoint_activations=True, update="after_backward")


# ---------------------------------------------------------------------- where nothing is to be recomputed


@contextmanager
def counted(kind: type[nn.Module]) -> Iterator[list[nn.Module]]:
    """The forwards of a class."""
    calls: list[nn.Module] = []
    before = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        return before(self, *args, **kwargs)

    kind.forward = forward  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        kind.forward = before  # type: ignore[method-assign]


def prepared(make: Callable[[], nn.Module], **changes: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    settings: dict[str, Any] = {"memory": "64MiB", "checkpoint_activations": True, **changes}
    return zi.prepare(model, adamw(model), zi.Config(**settings))


def test_blocks_run_twice_in_training_and_once_elsewhere() -> None:
    model, optimizer = prepared(only_layers)
    x = vectors()(0)
    with counted(Layer) as calls:
        mean_square(model, x).backward()
        assert len(calls) == 8
        calls.clear()
        with torch.no_grad():
            model(x)
        with torch.inference_mode():
            model(x)
        model.eval()
        model(x).sum().backward()
        assert len(calls) == 12
    optimizer.zero_grad()


def test_every_third_block_runs_twice() -> None:
    model, _ = prepared(lambda: only_layers(7), checkpoint_activations=3)
    with counted(Layer) as calls:
        mean_square(model, vectors()(0)).backward()
    again = calls[7:]
    assert again == [model[6], model[3], model[0]]  # type: ignore[index]


class SelfMade(nn.Module):
    """The model's loop checkpoints."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_model_that_checkpoints_is_left_alone(use_reentrant: bool, tmp_path: Path) -> None:
    make = lambda: SelfMade(use_reentrant)
    with counted(Layer) as calls:
        compare(make, training(vectors(), mean_square, num_steps=1), adamw, FITS, tmp_path, checkpoint_activations=True)
    assert len(calls) == 2 * 6


class SelfMadeBlock(nn.Module):
    def __init__(self, on: bool | None) -> None:
        super().__init__()
        self.layer = Layer()
        if on is not None:
            self.use_checkpoint = on

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if getattr(self, "use_checkpoint", True):
            return checkpoint(self.layer, x, use_reentrant=False)
        return self.layer(x)


@pytest.mark.parametrize("on", [None, True, False])
def test_a_block_that_checkpoints_is_left_alone(on: bool | None) -> None:
    model, _ = prepared(lambda: nn.Sequential(*[SelfMadeBlock(on) for _ in range(3)]))
    with counted(Layer) as calls:
        mean_square(model, vectors()(0)).backward()
    assert len(calls) == 6


@pytest.mark.parametrize("before", [True, False])
def test_the_switch_of_transformers_models_wins(before: bool, tmp_path: Path) -> None:
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}

    def make() -> nn.Module:
        model: Any = llama(use_cache=False)
        if before:
            model.gradient_checkpointing_enable(**kwargs)
        return model

    model, _ = prepared(make)
    if not before:
        model.gradient_checkpointing_enable(**kwargs)  # type: ignore[operator]
    with counted(LlamaDecoderLayer) as calls:
        of_labels(model, tokens()(0)).backward()
    assert len(calls) == 4


def test_a_filled_cache_is_used_and_its_blocks_are_not_recomputed(tmp_path: Path) -> None:
    """Training behind a prefix: the cache has values that the loss depends on."""

    def script(run: Run) -> None:
        for number in range(2):
            torch.manual_seed(number)
            ids = tokens()(number)
            run.model.eval()
            cache = run.model(input_ids=ids[:, :4], use_cache=True).past_key_values
            run.model.train()
            run.step(run.model(input_ids=ids[:, 4:], labels=ids[:, 4:], past_key_values=cache).loss)

    compare(llama, script, adamw, FITS, tmp_path, checkpoint_activations=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks there
def test_compiled(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        compiled = torch.compile(run.model, backend="eager")
        for number in range(3):
            torch.manual_seed(number)
            run.step((compiled(vectors()(number)) - 0.5).square().mean())

    compare(only_layers, script, adamw, HALF, tmp_path, checkpoint_activations=True)


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    model, optimizer = prepared(only_layers)
    handle = model[2].up.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[index, union-attr]
    with pytest.raises(ZeroDivisionError):
        model(vectors()(0))
    handle.remove()
    mean_square(model, vectors()(0)).backward()
    optimizer.step()


BACKWARD_THREAD = cpu_only("backward of a device runs on a thread of its own, which Ctrl-C does not interrupt")


@pytest.mark.parametrize(
    "call", [pytest.param(1, id="in forward"), pytest.param(2, id="in backward", marks=BACKWARD_THREAD)]
)
@pytest.mark.parametrize("offload", [False, True])
def test_an_interrupt_inside_a_block(offload: bool, call: int, tmp_path: Path) -> None:
    """Ctrl-C does not run hooks that come after a forward. Training goes on as if that batch had not been."""

    def script(run: Run) -> None:
        for number in range(4):
            calls = itertools.count(1)

            def interrupt(*_: Any, calls: Iterator[int] = calls) -> None:
                if next(calls) == call:
                    raise KeyboardInterrupt

            handle = run.model[2].up.register_forward_pre_hook(interrupt)
            if run.prepared:
                with pytest.raises(KeyboardInterrupt):
                    mean_square(run.model, vectors()(90 + number)).backward()
            handle.remove()
            run.optimizer.zero_grad()
            torch.manual_seed(number)
            run.step(mean_square(run.model, vectors()(number)))

    how = {"checkpoint_activations": True, "offload_activations": offload, "update": "after_backward"}
    compare(only_layers, script, adamw, HALF, tmp_path, **how)


# ---------------------------------------------------------------------- copies


def test_copies_and_state_dicts_are_plain() -> None:
    model, _ = prepared(only_layers)
    names = list(only_layers().state_dict())
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    assert not any(isinstance(vars(m).get("_call_impl"), recompute.Recomputed) for m in twin.modules())
    with counted(Layer) as calls:
        mean_square(twin, vectors()(0)).backward()
        assert len(calls) == 4
        assert set(calls) <= set(twin.modules())
    assert all(p.grad is not None for p in twin.parameters())
    fresh = only_layers()
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(fresh.state_dict())


def test_pickled_blocks_are_plain() -> None:
    layers = moved(only_layers())
    recompute.attach(list(layers))
    twin = pickle.loads(pickle.dumps(layers))
    with counted(Layer) as calls:
        torch.manual_seed(1)
        loss = mean_square(twin, vectors()(0))
        loss.backward()
        assert len(calls) == 4
        torch.manual_seed(1)
        again = mean_square(layers, vectors()(0))
        again.backward()
        assert len(calls) == 12
    assert same_bits(loss, again)


# ---------------------------------------------------------------------- what is held


class Held(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves, each storage once."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self.storages[storage._cdata] = storage
        return tensor.detach()  # a node that holds its own output never dies

    @property
    def num_bytes(self) -> int:
        return sum(len(storage) for storage in self.storages.values())


def held_bytes(make: Callable[[], nn.Module], batch: torch.Tensor, **changes: Any) -> int:
    model, _ = prepared(make, **changes)
    held = Held()
    with held:
        output = model(batch)
    del output
    return held.num_bytes


@pytest.mark.parametrize(("depth", "interval"), [(4, 1), (8, 1), (12, 1)])
def test_held_bytes_are_those_of_the_equation(depth: int, interval: int) -> None:
    """2 * bsz * seq * hd * nl / ci with two bytes an element; twice that in float32."""
    bsz, seq, hd = 3, 6, 32
    held = held_bytes(lambda: only_layers(depth, hd), sequences(hd, seq, bsz)(0), checkpoint_activations=interval)
    assert held == 4 * bsz * seq * hd * depth // interval


def test_held_bytes_of_a_decoder_grow_by_one_input_a_layer() -> None:
    batch = torch.ones(2, 8, dtype=torch.long, device=DEVICE)

    def build(depth: int) -> nn.Module:
        shape = LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=depth, num_attention_heads=4
        )
        return LlamaForCausalLM(shape)

    sizes = [held_bytes(lambda depth=depth: build(depth), batch) for depth in (2, 3, 6)]  # type: ignore[misc]
    assert sizes[1] - sizes[0] == 4 * 2 * 8 * 32
    assert sizes[2] - sizes[0] == 4 * (4 * 2 * 8 * 32)
    everything = held_bytes(lambda: build(6), batch, checkpoint_activations=False)
    assert everything > 5 * sizes[2]


# ---------------------------------------------------------------------- which blocks


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt2", ["GPT2Block"]),
        ("llama", ["LlamaDecoderLayer"]),
        ("t5", ["T5Block", "T5Block"]),
        ("transformer", ["TransformerEncoderLayer", "TransformerDecoderLayer"]),
        ("encoder", ["TransformerEncoderLayer"]),
        ("vit", ["ViTLayer"]),
        ("bert", ["BertLayer"]),
        ("mixtral", ["MixtralDecoderLayer"]),
    ],
)
def test_blocks_are_found(name: str, kinds: list[str]) -> None:
    stacks = find_stacks(CASES[name].make())
    assert [type(stack[0]).__name__ for stack in stacks] == kinds


def test_a_short_list_beside_the_layers_is_not_one() -> None:
    model = nn.ModuleDict({"layers": only_layers(8, 64), "adapters": nn.ModuleList([Layer(4), Layer(4)])})
    assert find_stacks(model) == [list(model["layers"])]  # type: ignore[arg-type]


def test_blocks_by_class() -> None:
    model = residual_mlp()
    assert find_stacks(model, ["Layer"]) == [list(model)[:4]]  # type: ignore[arg-type]
    assert find_stacks(model, zi.Config(checkpoint_activations=1, checkpoint_modules=Layer).checkpoint_modules) == [
        list(model)[:4]  # type: ignore[arg-type]
    ]
    # Linear layers inside of a chosen block belong to it.
    assert find_stacks(model, ["Layer", "Linear"]) == [list(model)[:4], [model[4]]]  # type: ignore[arg-type, index]


def test_a_class_that_is_not_there() -> None:
    with pytest.raises(zi.UsageError, match="no module of class 'Lair'(.|\n)*'Layer' \\(4\\)"):
        prepared(only_layers, checkpoint_modules="Lair")


def test_no_repeated_blocks() -> None:
    with pytest.raises(zi.UsageError, match="Sequential has no repeated blocks(.|\n)*'Linear' \\(5\\)"):
        prepared(CASES["mlp"].make)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "yes", None])
def test_intervals_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(zi.ConfigError, match="checkpoint_activations=.*every k-th"):
        zi.Config(checkpoint_activations=wrong)


@pytest.mark.parametrize("wrong", [3, [3], "", [None]])
def test_modules_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(zi.ConfigError, match="checkpoint_modules=.*a module class"):
        zi.Config(checkpoint_activations=True, checkpoint_modules=wrong)


def test_modules_without_checkpointing() -> None:
    with pytest.raises(zi.ConfigError, match="checkpoint_activations is False"):
        zi.Config(checkpoint_modules="Layer")


def test_settings_are_kept_in_files() -> None:
    config = zi.Config(checkpoint_activations=2, checkpoint_modules=[Layer, "Block"])
    assert config.checkpoint_modules == (f"{__name__}.Layer", "Block")
    assert zi.Config.from_dict(config.to_dict()) == config
