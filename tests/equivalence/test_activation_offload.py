"""Saved tensors in blocks: the same bits, on whichever tier, and no more memory for more layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import (
    FITS,
    FITS_RAM,
    HALF,
    MINIMAL,
    Run,
    Setting,
    adamw,
    assert_identical,
    budget_bytes,
    compare,
    least_device_memory,
    run_plain,
    run_prepared,
    sgd,
    training,
)
from support.device import IS_CPU, cpu_only, moved
from support.matrix import thinned
from support.models import mean_square, sequences, vectors
from test_activation_checkpointing import BLOCKS, Held, only_layers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero_infinity as zi
from zero_infinity.activations import offload
from zero_infinity.api import engine_of
from zero_infinity.papers.infinity_equations import Transformer

BOTH: list[dict[str, Any]] = [
    {"checkpoint_activations": True, "offload_activations": True},
    {"offload_activations": "all"},
    {"checkpoint_activations": 2, "offload_activations": "all"},
    {"checkpoint_activations": True, "offload_activations": "arena"},
]
NAMES = ["checkpoints", "all", "mixed", "arena"]


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved tensors of half a KiB are moved like large ones."""
    monkeypatch.setattr(offload, "_SMALL_BYTES", 512)


def room(make: Callable[[], nn.Module], setting: Setting, **config: Any) -> int:
    """The setting's memory, and 64 KiB more for saved tensors."""
    return budget_bytes(make, adamw, setting, **config) + (64 << 10)


# Which of them at which budget, for every model.
HOMES = [(0, FITS_RAM), (0, FITS), (0, MINIMAL), (1, FITS_RAM), (1, HALF), (1, MINIMAL), (2, MINIMAL), (3, HALF)]


def _label(part: Any) -> str:
    return part if isinstance(part, str) else f"{NAMES[part[0]]}-{part[1]}"


@pytest.mark.parametrize(("name", "home"), thinned([*BLOCKS], HOMES, _label))
def test_same_bits(name: str, home: tuple[int, Setting], tmp_path: Path) -> None:
    which, setting = home
    case, how = BLOCKS[name], BOTH[which]
    script = training(case.batch, case.loss, num_steps=3)
    tight = {} if IS_CPU else {"device_memory": least_device_memory(case.make)}  # or else all of them stay there
    config = zi.Config(memory=room(case.make, setting, **how), nvme=tmp_path if setting.nvme else None, **tight, **how)
    outcome = run_prepared(case.make, script, adamw, config)
    assert_identical(run_plain(case.make, script, adamw), outcome)
    assert outcome.stats is not None
    assert outcome.stats.activation_bytes > 0 or not IS_CPU  # some fit on the device all the same


@pytest.mark.parametrize("how", BOTH[:3], ids=NAMES[:3])
def test_where_there_is_no_room_it_is_said_once(how: dict[str, Any], tmp_path: Path) -> None:
    case = BLOCKS["gpt2"]
    with pytest.warns(zi.ConfigWarning, match="stays outside of the memory budget.*\n  fix: ") as found:
        compare(case.make, training(case.batch, case.loss), adamw, MINIMAL, tmp_path, **how)
    assert len(found) == 1


def test_graphs_that_are_used_twice_or_never(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            torch.manual_seed(number)
            mean_square(run.model, vectors()(number + 10))  # its graph dies without a backward
            loss = mean_square(run.model, vectors()(number))
            loss.backward(retain_graph=True)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(loss)

    for how in BOTH:
        config = zi.Config(memory=room(only_layers, HALF, **how), nvme=tmp_path, update="after_backward", **how)
        assert_identical(run_plain(only_layers, script, adamw), run_prepared(only_layers, script, adamw, config))


@pytest.mark.parametrize("how", BOTH, ids=NAMES)
def test_an_input_that_is_changed_in_place_is_another_one(how: dict[str, Any], tmp_path: Path) -> None:
    """While the graph of its old value is still there, and is used or not."""

    def script(run: Run) -> None:
        x = vectors()(0)
        for _ in range(3):
            old = mean_square(run.model, x)
            with torch.no_grad():
                x.add_(1)
            loss = mean_square(run.model, x)
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(loss, old)

    config = zi.Config(memory=room(only_layers, HALF, **how), nvme=tmp_path, **how)
    assert_identical(run_plain(only_layers, script, adamw), run_prepared(only_layers, script, adamw, config))


@pytest.mark.parametrize("how", [{}, {"checkpoint_activations": True}, {"offload_activations": "all"}])
def test_a_saved_tensor_that_was_changed_since(how: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """torch's own error, or (what is kept elsewhere is a copy) the right gradient; never another one."""
    monkeypatch.setattr(offload, "_SMALL_BYTES", 512 if "offload_activations" in how else 1 << 30)
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2)])
    layers = moved(layers)
    leaf = vectors()(0).requires_grad_()
    layers(leaf * 2).sum().backward()
    right, leaf.grad = leaf.grad, None
    model, _ = zi.prepare(layers, sgd(layers), zi.Config(memory="4MiB", nvme=tmp_path, **how))
    x = leaf * 2
    loss = model(x).sum()
    x.add_(1)
    if "offload_activations" in how:
        loss.backward()
        assert torch.equal(leaf.grad, right)
    else:
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*\(8, 32\) is at version 1"):
            loss.backward()


class Cells(nn.Module):
    """Cells whose gates are parts of one storage, and not views of each other, changed in place one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRUCell(32, 32)
        self.lstm = nn.LSTMCell(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.gru(x)
        return self.lstm(hidden, (hidden, hidden))[0]


@cpu_only("it counts what is moved: tests/device/test_activations.py does so there")
def test_tensors_that_share_a_storage_without_being_views(tmp_path: Path) -> None:
    how: dict[str, Any] = {"offload_activations": "all"}
    config = zi.Config(memory="512KiB", nvme=tmp_path, **how)
    script = training(vectors(), mean_square)
    outcome = run_prepared(Cells, script, adamw, config)
    assert_identical(run_plain(Cells, script, adamw), outcome)
    assert outcome.stats is not None
    assert outcome.stats.activation_bytes > 0


@cpu_only("it counts what is moved: tests/device/test_activations.py does so there")
def test_views_of_one_tensor_are_stored_once(tmp_path: Path) -> None:
    """Queries, keys and values that one matrix makes."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).split(32, -1))
            return (q * k * v).exp()

    config = zi.Config(memory="512KiB", nvme=tmp_path, offload_activations="all")
    batch = sequences(32, 8, 4)
    script = training(batch, mean_square)
    outcome = run_prepared(Attention, script, adamw, config)
    assert_identical(run_plain(Attention, script, adamw), outcome)
    assert outcome.stats is not None
    one = 4 * 8 * 32 * 4
    # The batch, the three parts in one, q * k, the output; and what the loss saves.
    assert outcome.stats.activation_bytes == one * (1 + 3 + 1 + 1)


def test_without_gradients_nothing_is_kept(tmp_path: Path) -> None:
    model, _ = zi.prepare(*made(only_layers), zi.Config(memory="4MiB", nvme=tmp_path, offload_activations="all"))
    with torch.no_grad():
        model(vectors()(0))
    with torch.inference_mode():
        model(vectors()(0))
    assert zi.stats(model).activation_bytes == 0


def made(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make()
    return model, sgd(model)


# ---------------------------------------------------------------------- what is held


class Alive(TorchDispatchMode):
    """The bytes of the storages that torch has made inside, and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        return result

    def num_bytes(self) -> int:
        gc.collect()
        found = [reference() for reference in self._storages.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)


def held_after_forward(depth: int, directory: Path, **changes: Any) -> int:
    """Bytes of activations in torch's memory between forward and backward, after a warm step."""
    model, optimizer = zi.prepare(
        *made(lambda: only_layers(depth, 64)), zi.Config(memory="256KiB", nvme=directory, **changes)
    )
    batch = sequences(64, 16, 4)(0)
    mean_square(model, batch).backward()
    optimizer.step()
    alive = Alive()
    with alive:
        output = model(batch)
    held = alive.num_bytes()
    output.sum().backward()
    optimizer.step()
    return held


class Peak(Alive):
    """And the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        found = [reference() for reference in self._storages.values()]
        self.most = max(self.most, sum(storage.nbytes() for storage in found if storage is not None))
        return result


def working_bytes(depth: int, rows: int, directory: Path, **changes: Any) -> int:
    """The most activations in torch's memory at any moment of a warm step."""
    model, optimizer = zi.prepare(
        *made(lambda: only_layers(depth, 32)), zi.Config(memory="1MiB", nvme=directory, **changes)
    )
    batch = sequences(32, 16, rows)(0)
    for _ in range(2):
        peak = Peak()
        with peak:
            mean_square(model, batch).backward()
        optimizer.step()
    return peak.most


@cpu_only("on a device it would count the parameters that are copied there")
def test_working_memory_is_that_of_one_block(tmp_path: Path) -> None:
    """It does not grow with depth, and grows with the batch as one block's activations do."""
    rows = 32
    one = 4 * rows * 16 * 32
    how: dict[str, Any] = {"checkpoint_activations": True, "offload_activations": True}
    few, many = (working_bytes(depth, rows, tmp_path, **how) for depth in (4, 16))
    assert abs(many - few) < one
    assert working_bytes(16, rows, tmp_path, checkpoint_activations=True) > many + 10 * one
    assert 1.5 * few < working_bytes(4, 2 * rows, tmp_path, **how) < 2.2 * few
    # What autograd saves of a block, once, and as much again of gradients and of results on their way.
    block = only_layers(1, 32)
    held = Held()
    with held:
        output = block(sequences(32, 16, rows)(0))
    del output
    assert few < 2 * held.num_bytes + 2 * one


@cpu_only("on a device it would count the parameters that are copied there")
def test_held_bytes_do_not_grow_with_depth(tmp_path: Path) -> None:
    one = 4 * 16 * 64 * 4
    recomputed = [held_after_forward(depth, tmp_path, checkpoint_activations=True) for depth in (4, 8, 16)]
    # The output, and the inputs of all blocks but the first: that is the batch, which was there before.
    assert recomputed == [4 * one, 8 * one, 16 * one]
    offloaded = [
        held_after_forward(depth, tmp_path, checkpoint_activations=True, offload_activations=True)
        for depth in (4, 8, 16)
    ]
    # The output.
    assert offloaded == [one, one, one]


@cpu_only("it counts what is moved: tests/device/test_activations.py does so there")
@pytest.mark.half
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("depth", [4, 8])
def test_bytes_are_those_of_the_equation(depth: int, interval: int, tmp_path: Path) -> None:
    """2 * bsz * seq * hd * nl / ci, in 16 bits."""
    batch, seq, hidden = 4, 16, 64
    equation = Transformer(depth, hidden, heads=1, seq=seq, interval=interval).checkpoint_bytes(batch)
    for where in (True, "arena"):
        config = zi.Config(memory="512KiB", nvme=tmp_path, checkpoint_activations=interval, offload_activations=where)
        model, optimizer = zi.prepare(*made(lambda: only_layers(depth, hidden).bfloat16()), config)
        for number in range(2):
            mean_square(model, sequences(hidden, seq, batch)(number).bfloat16()).backward()
            optimizer.step()
        assert zi.stats(model).activation_bytes == equation


@cpu_only("it counts what is moved: tests/device/test_activations.py does so there")
def test_back_in_reverse_order_ahead_of_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    depth = 8
    model, optimizer = zi.prepare(
        *made(lambda: only_layers(depth, 64)),
        zi.Config(memory="256KiB", nvme=tmp_path, checkpoint_activations=True, offload_activations=True),
    )
    host_cache = engine_of(model).host_cache
    seen: list[tuple[int, bool, bool]] = []
    access = host_cache.access

    def watched(block: Any) -> None:
        if block.name == "a saved tensor":
            seen.append((block.key, block.has_content, block.key in host_cache.policy))
        access(block)

    monkeypatch.setattr(host_cache, "access", watched)
    for _ in range(5):
        seen.clear()
        read = zi.stats(model).bytes_read
        mean_square(model, sequences(64, 16, 4)(0)).backward()
        optimizer.step()
    written = [key for key, has_content, _ in seen if not has_content]
    wanted = [key for key, has_content, _ in seen if has_content]
    assert len(written) == depth
    assert wanted == written[::-1]
    # All of them were there, or on their way, when backward came to ask; and some had been out on the drive.
    assert all(is_there for _, has_content, is_there in seen if has_content)
    assert zi.stats(model).bytes_read > read


def test_the_arena_is_constant_and_grows_with_what_is_needed() -> None:
    config = zi.Config(memory="4MiB", checkpoint_activations=True, offload_activations="arena")
    model, optimizer = zi.prepare(*made(lambda: only_layers(4, 64)), config)
    sizes, arenas = [], []  # kept, so that no later one lies where an earlier one was
    for rows in (2, 2, 4, 4, 2, 2):
        mean_square(model, sequences(64, 16, rows)(0)).backward()
        optimizer.step()
        sizes.append(zi.stats(model).activation_bytes)
        arenas.append(engine_of(model).activations.storage._memory)  # type: ignore[union-attr]
    one = 4 * 16 * 64 * 4
    assert sizes == [2 * one, 2 * one, 4 * one, 4 * one, 4 * one, 4 * one]
    assert len({arena.data_ptr() for arena in arenas}) == 2
    assert engine_of(model).activations.storage.held_bytes == 0  # type: ignore[union-attr]


@cpu_only("it counts what is moved: tests/device/test_activations.py does so there")
def test_blocks_are_used_again_and_the_order_repeats(tmp_path: Path) -> None:
    model, optimizer = zi.prepare(
        *made(lambda: only_layers(8, 64)),
        zi.Config(memory="256KiB", nvme=tmp_path, checkpoint_activations=True, offload_activations=True),
    )
    batch = sequences(64, 16, 4)(0)
    sizes, deviations, written = [], [], []
    for _ in range(7):
        mean_square(model, batch).backward()
        optimizer.step()
        stats = zi.stats(model)
        sizes.append(stats.activation_bytes)
        deviations.append(stats.num_deviations)
        written.append(stats.bytes_written)
    assert set(sizes) == {8 * 4 * 16 * 64 * 4}
    assert deviations[-1] == deviations[-2] == deviations[-3]
    assert written[-1] > written[-2]
    assert stats.memory_peak <= stats.memory_budget
    assert engine_of(model).activations.storage.held_bytes == 0  # type: ignore[union-attr]


def test_other_sizes_in_each_step_do_not_pile_up(tmp_path: Path) -> None:
    model, optimizer = zi.prepare(
        *made(only_layers), zi.Config(memory="256KiB", nvme=tmp_path, offload_activations="all")
    )
    sizes = []
    for number in range(12):
        mean_square(model, vectors(32, 8 + number)(number)).backward()
        optimizer.step()
        sizes.append(zi.stats(model).activation_bytes)
    assert sizes[-1] < 3 * sizes[0] * 20 / 8


class Shared(nn.Module):
    """All blocks are given the same two tensors, one of them as a view."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Biased() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = x.sin()
        for layer in self.layers:
            x = layer(x, bias, bias.t())
        return x


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, bias: torch.Tensor, turned: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) + bias * turned.t()).tanh()


@cpu_only("it counts what is moved: tests/device/test_activations.py does so there")
def test_what_several_blocks_use_is_stored_once(tmp_path: Path) -> None:
    how: dict[str, Any] = {"checkpoint_activations": True, "offload_activations": True}
    make = lambda: Shared(5)
    script = training(vectors(32, 16), mean_square)
    config = zi.Config(memory="256KiB", nvme=tmp_path, **how)
    outcome = run_prepared(make, script, adamw, config)
    assert_identical(run_plain(make, script, adamw), outcome)
    assert outcome.stats is not None
    assert outcome.stats.activation_bytes == (5 + 1) * 16 * 32 * 4


# ---------------------------------------------------------------------- settings


def test_inputs_of_no_block() -> None:
    for value in (True, "arena"):
        with pytest.raises(zi.ConfigError, match='checkpoint_activations=True, or offload_activations="all"'):
            zi.Config(offload_activations=value)


@pytest.mark.parametrize("wrong", [1, "some", None])
def test_values_that_make_no_sense(wrong: Any) -> None:
    with pytest.raises(zi.ConfigError, match="offload_activations=.*'all'"):
        zi.Config(checkpoint_activations=True, offload_activations=wrong)


@pytest.mark.half
@cpu_only("the accelerator is emulated on the CPU")
@pytest.mark.parametrize("how", BOTH, ids=NAMES)
@pytest.mark.parametrize("nvme", [False, True])
def test_on_an_accelerator(how: dict[str, Any], nvme: bool, tmp_path: Path) -> None:
    script = training(vectors(), mean_square, num_steps=3)
    torch.manual_seed(0)
    model = only_layers()
    config = zi.Config(memory="512KiB", nvme=tmp_path if nvme else None, **how)
    model, optimizer = zi.prepare(model, adamw(model), config, device=zi.EmulatedAccelerator(64 << 10))
    run = Run(model, optimizer, prepared=True)
    script(run)
    assert zi.stats(model).activation_bytes > 0
    plain = run_plain(only_layers, script, adamw)
    for expected, found in zip(plain.logged, run.logged, strict=True):
        assert torch.equal(expected, found)
    for name, parameter in model.named_parameters():
        assert torch.equal(plain.weights[name], parameter)


def test_a_forward_that_fails_gives_everything_back(tmp_path: Path) -> None:
    config = zi.Config(memory="256KiB", nvme=tmp_path, checkpoint_activations=True, offload_activations=True)
    model, optimizer = zi.prepare(*made(only_layers), config)
    handle = model[3].up.register_forward_pre_hook(lambda *_: 1 / 0)  # type: ignore[index, union-attr]
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            model(vectors()(0))
    handle.remove()
    mean_square(model, vectors()(0)).backward()
    optimizer.step()
    assert engine_of(model).activations.storage.held_bytes == 0  # type: ignore[union-attr]
    # Blocks of a forward that failed were free again for the next.
    assert zi.stats(model).activation_bytes == 4 * 8 * 32 * 4
