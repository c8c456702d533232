"""A layer larger than memory is built, initialised and trained without ever being whole."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import children
from support.compare import run_plain, same_bits, seeded, sgd, training
from support.device import DEVICE, cpu_only, on_device
from support.models import Case, TiedHead, next_token, of_labels
from test_tiling import assert_close, run_prepared, tiled
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import zero_infinity as zi
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import Shape
from zero_infinity.params import offloaded_param
from zero_infinity.params.unshard import store_of
from zero_infinity.tiling import tiled_init

WORDS = 701


class Wide(nn.Module):
    """Layers whose sizes are no multiples of anything; initialised by their own constructors, and once more."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 37, padding_idx=5)
        self.up = nn.Linear(37, 801)
        self.down = Conv1D(37, 801)
        self.head = nn.Linear(37, WORDS, bias=False)
        nn.init.xavier_normal_(self.head.weight)
        nn.init.kaiming_normal_(self.up.weight)
        with torch.no_grad():
            self.up.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.words(x)).tanh()))


def words(number: int) -> torch.Tensor:
    return on_device(torch.randint(0, 90, (2, 8), generator=seeded(number)))


SPECIAL = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=1, n_head=2, **SPECIAL))


def llama() -> nn.Module:
    shape = {"hidden_size": 64, "intermediate_size": WORDS, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=True, **shape, **SPECIAL))


LARGE: dict[str, Case] = {
    "wide": Case(Wide, words, next_token),
    "gpt2": Case(gpt2, words, of_labels),
    "llama": Case(llama, words, of_labels),
    "tied": Case(lambda: TiedHead(128), words, next_token),
}
MEMORY = {"wide": 160 << 10, "gpt2": 256 << 10, "llama": 256 << 10, "tied": 80 << 10}


def built(make: Callable[[], nn.Module], config: zi.Config) -> nn.Module:
    torch.manual_seed(0)
    with zi.init(config):
        return make()


def assert_same_values(make: Callable[[], nn.Module], model: nn.Module) -> None:
    """As in a plain construction, and as many random numbers were drawn."""
    after = torch.get_rng_state()
    torch.manual_seed(0)
    expected = make()
    assert torch.equal(torch.get_rng_state(), after)
    found = model.state_dict()
    assert list(found) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert same_bits(value, found[name]), name


@pytest.mark.half
@pytest.mark.parametrize(
    "changes",
    [{}, {"tile_above": "16KiB"}, {"param_dtype": "bfloat16", "compute_dtype": "float32"}],
    ids=["by default", "tile_above", "bfloat16"],
)
@pytest.mark.parametrize("name", LARGE)
def test_built_and_trained(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    case = LARGE[name]
    config = zi.Config(memory=MEMORY[name], nvme=tmp_path, **changes)
    model = built(case.make, config)
    cut = tiled(model)
    assert cut
    assert_same_values(case.make, model)
    assert (
        store_of(next(m for p in model.parameters() if (m := offloaded_param.managed(p)))).store.pool.peak_bytes
        <= MEMORY[name]
    )
    script = training(case.batch, case.loss, num_steps=3)
    found = run_prepared(lambda: model, script, sgd, config)
    assert cut.items() <= tiled(model).items()
    # As a model that was built in memory and cut by prepare.
    assert_close(run_prepared(case.make, script, sgd, config), found, 0.0)


def test_a_layer_of_many_times_the_memory(tmp_path: Path) -> None:
    config = zi.Config(memory="64KiB", nvme=tmp_path)
    make = lambda: nn.Sequential(nn.Linear(64, 4096, bias=False))
    model = built(make, config)
    assert tiled(model) == {"0.weight": 256}
    assert_same_values(make, model)


# ---------------------------------------------------------------------- values


INITIALISERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform_": lambda w: nn.init.uniform_(w, -1, 2),
    "normal_": lambda w: nn.init.normal_(w, 0.5, 2.0),
    "constant_": lambda w: nn.init.constant_(w, 3.0),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "xavier_uniform_": lambda w: nn.init.xavier_uniform_(w, gain=2.0),
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": lambda w: nn.init.kaiming_uniform_(w, a=0.3, mode="fan_out"),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "a generator": lambda w: nn.init.normal_(w, generator=torch.Generator().manual_seed(4)),
    "scaled": lambda w: nn.init.normal_(w).mul_(0.1).div_(3),
    "a row": lambda w: nn.init.zeros_(w[-1]),
}


@pytest.mark.half
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tile by tile: there is no room for the whole."""

    def make() -> nn.Module:
        layer = nn.Linear(37, 411, bias=False, dtype=dtype)
        with torch.no_grad():
            INITIALISERS[name](layer.weight)
        return layer

    model = built(make, zi.Config(memory="24KiB", nvme=tmp_path))
    assert tiled(model)
    assert_same_values(make, model)


@settings(max_examples=40)
@given(
    num_rows=st.integers(2, 60),
    width=st.integers(1, 40),
    tile=st.integers(1, 20),
    at_once=st.sampled_from([16, 32, 64, 1 << 16]),
    name=st.sampled_from(["uniform_", "normal_"]),
)
def test_random_numbers_in_any_tiles(
    num_rows: int, width: int, tile: int, at_once: int, name: str, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        layer = nn.Embedding(num_rows, width)
        INITIALISERS[name](layer.weight)
        return layer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiled_init, "_AT_ONCE", at_once)
        model = built(make, zi.Config(memory="4MiB", tile_above=8 * width * tile))
    assert bool(tiled(model)) == (num_rows > tile)
    assert_same_values(make, model)


# ---------------------------------------------------------------------- what needs the whole


@pytest.mark.parametrize(
    "look",
    [nn.init.trunc_normal_, nn.init.orthogonal_, lambda w: w.data.normal_(), lambda w: w[2:4].zero_()],
    ids=["trunc_normal_", "orthogonal_", "data", "rows"],
)
def test_it_is_put_together_where_there_is_room_and_refused_elsewhere(look: Any, tmp_path: Path) -> None:
    def make() -> nn.Module:
        layer = nn.Linear(64, 256, bias=False)
        with torch.no_grad():
            look(layer.weight)
        return layer

    model = built(make, zi.Config(memory="256KiB", nvme=tmp_path, tile_above="32KiB"))
    assert tiled(model) == {"weight": 4}
    assert_same_values(make, model)
    with pytest.raises(
        zi.CapacityError,
        match=r"'Linear.weight' is used in .* tiles, but needed whole here: that takes 64.0 KiB.* memory of 66.0 KiB",
    ):
        built(make, zi.Config(memory="66KiB", nvme=tmp_path))


@cpu_only("before it is prepared it computes on the CPU")
def test_copies_forwards_and_edits_before_it_is_prepared(tmp_path: Path) -> None:
    config = zi.Config(memory="256KiB", nvme=tmp_path, tile_above="4KiB")

    def make() -> nn.Module:
        layer = nn.Linear(32, 64)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(64, 32), copy.deepcopy(layer))

    model = built(make, config)
    assert tiled(model) == {"0.weight": 4, "2.weight": 4, "3.weight": 4}
    assert_same_values(make, model)
    torch.manual_seed(0)
    plain = make()
    x = torch.randn(8, 32, device=DEVICE)
    for each in (plain, model):
        with torch.no_grad():
            each[0].weight.data.add_(1)  # waits in a copy of the whole until somebody looks
            each[2].weight.copy_(torch.ones(32, 64, device=DEVICE))
    assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-5)
    plain[3].weight.data.mul_(2)
    model[3].weight.data.mul_(2)
    script = training(lambda _: x, lambda m, batch: m(batch).square().mean(), num_steps=2)
    assert_close(run_plain(lambda: plain, script, sgd), run_prepared(lambda: model, script, sgd, config))


def test_a_tied_weight_that_was_replaced_is_given_back(tmp_path: Path) -> None:
    config = zi.Config(memory="64KiB", nvme=tmp_path, tile_above="4KiB")
    model = built(TiedHead, config)
    host = store_of(offloaded_param.managed(model.head.weight))  # type: ignore[arg-type]
    before = len(host.units)
    gc.collect()
    zi.prepare(model, sgd(model), config)
    assert len(host.units) == before - 6


def test_tiles_are_put_together_again_when_the_model_fits(tmp_path: Path) -> None:
    """A frozen layer has no gradient to make room for."""
    config = zi.Config(memory="40KiB", nvme=tmp_path)
    make = lambda: nn.Sequential(nn.Linear(32, 192, bias=False), nn.Linear(192, 2))
    model = built(make, config)
    assert list(tiled(model)) == ["0.weight"]
    model[0].weight.requires_grad_(False)
    model, _ = zi.prepare(model, sgd(model[1]), config)
    assert not tiled(model)
    torch.manual_seed(0)
    assert same_bits(make()[0].weight.detach(), model[0].weight.detach())


def test_a_row_that_is_larger_than_tile_above_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(zi.ConfigError, match=r"tile_above is 1\.0 KiB, but one row of 'Linear\.weight' \(8, 1000\)"),
        zi.init(zi.Config(memory="4MiB", nvme=tmp_path, tile_above="1KiB")),
    ):
        nn.Linear(1000, 8)


_ONE_LAYER = """
import resource, sys, torch, zero_infinity as zi
from torch import nn

def train(num_features):
    config = zi.Config(memory="8MiB", nvme=sys.argv[1])
    with zi.init(config):
        model = nn.Sequential(nn.Linear(512, num_features))
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    zi.synchronize(model)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

train(2048)
before = peak()
train(32768)
print(peak() - before)
"""


@cpu_only("a process of its own, without the device")
def test_the_process_takes_no_memory_for_the_whole(tmp_path: Path) -> None:
    """A layer of 64 MiB with 8 MiB of memory: built, initialised and trained."""
    code, out, err = children.run(_ONE_LAYER, str(tmp_path))
    assert code == 0, err
    assert int(out.split()[-1]) < 32 << 20


@cpu_only("the accelerator is emulated on the CPU")
def test_layers_that_are_cut_when_they_are_prepared_leave_no_copy_on_a_device(tmp_path: Path) -> None:
    """Whole layers were read there to fill their tiles, and have no home any more."""
    shape = Shape(layers=2, hidden=128, heads=2, seq=16)

    def losses(model: nn.Module) -> list[float]:
        config = zi.Config(memory="1MiB", nvme=tmp_path, tile_above="64KiB")
        device = zi.EmulatedAccelerator(2 * shape.num_parameters)
        model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), config, device=device)
        assert tiled(model)
        found = []
        for number in range(4):
            tokens = on_device(torch.randint(0, 256, (1, 17), generator=seeded(number)))
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    expected = losses(ByteGPT(shape))
    whole = built(lambda: ByteGPT(shape), zi.Config(memory="1MiB", nvme=tmp_path))
    assert not tiled(whole)
    assert losses(whole) == expected
