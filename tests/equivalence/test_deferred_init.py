"""zi.init: whatever a model's constructor does, the values are those of a plain construction, and training goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import (
    MINIMAL,
    Run,
    Setting,
    adamw,
    assert_identical,
    budget_bytes,
    is_offloaded,
    run_plain,
    run_prepared,
    same_bits,
    sgd,
    training,
)
from support.device import DEVICE, cpu_only, moved
from support.matrix import thinned
from support.models import CASES, VOCABULARY, Case, mean_square, mlp, tokens, vectors
from support.resources import all_given_back
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, GPT2Config, LlamaConfig

import zero_infinity as zi
from zero_infinity.params import offloaded_param
from zero_infinity.params.unshard import store_of

SPECIAL = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}


# ---------------------------------------------------------------------- constructors of many kinds


class Replacing(nn.Module):
    """Parameters that are registered, replaced, dropped, re-registered, shared and overwritten while it is built."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width, bias=False)
        self.first.weight = nn.Parameter(torch.randn(width, width) / 8)  # after another module has registered
        self.dropped = nn.Linear(width, 4 * width)
        del self.dropped
        self.scale = nn.Parameter(torch.ones(width))
        self.register_parameter("none", None)
        self.scale = nn.Parameter(torch.rand(width))  # while its module is still being filled
        self.second.weight.data.mul_(0.5)
        with torch.no_grad():
            self.first.bias.copy_(torch.arange(width) / width)
            self.first.bias[3] = 0.25
        nn.init.orthogonal_(self.second.weight)
        self.third = nn.Linear(width, width)
        self.third.weight.data = torch.randn(width, width) / 8
        self.third.bias = self.first.bias
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.register_buffer("offset", self.first.weight.detach().sum(0).clone())
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        kept = self.third.weight
        del self.third.weight
        self.third.register_parameter("weight", kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        x = torch.tanh(self.first(x)) * self.scale + self.offset
        return self.third(torch.tanh(self.second(x))) + self.frozen


class Sliced(nn.Module):
    """A constructor that reads its own parameters."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.whole = nn.Linear(width, 2 * width)
        self.left = nn.Linear(width, width)
        self.left.load_state_dict({"weight": self.whole.weight[:width], "bias": self.whole.bias[:width]})
        self.norm = self.whole.weight.norm().item()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.blocks[2].weight = self.blocks[0].weight
        for block in self.blocks:
            block.apply(self._halve)

    @staticmethod
    def _halve(module: nn.Module) -> None:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.left(x) + self.whole(x).chunk(2, -1)[1] / self.norm
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class MixedTypes(nn.Module):
    """Double, integer and empty parameters beside float32 ones. (16-bit ones get a master: see test_precision.)"""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.long = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.table = nn.Parameter(torch.arange(width), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.long.float() * self.table


def lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(32), nn.Tanh(), nn.LazyLinear(16), nn.Linear(16, 32))
    model(torch.ones(2, 32))  # makes the parameters
    return model


def gpt2_config() -> GPT2Config:
    return GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, **SPECIAL)


def of_hidden(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch).last_hidden_state.square().mean()


def of_labels(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def causal(config: Callable[[], Any]) -> Callable[[], nn.Module]:
    return lambda: AutoModelForCausalLM.from_config(config())


def small(kind: Any) -> Callable[[], Any]:
    return lambda: kind(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        **SPECIAL,
    )


BUILT = {name: CASES[name] for name in CASES if name != "conv_channels_last"} | {
    "replacing": Case(Replacing, vectors(), mean_square),
    "sliced": Case(Sliced, vectors(), mean_square),
    "mixed types": Case(MixedTypes, vectors(), mean_square),
    "lazy": Case(lazy, vectors(), mean_square),
    "auto gpt2": Case(causal(gpt2_config), tokens(), of_labels),
    "auto llama": Case(causal(small(LlamaConfig)), tokens(), of_labels),
    "auto bert": Case(lambda: AutoModel.from_config(small(BertConfig)()), tokens(), of_hidden),
}

TIGHT_RAM = Setting(MINIMAL.budget, nvme=False)


def build(make: Callable[[], nn.Module], config: zi.Config, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with zi.init(config):
        return make()


def config_for(case: Case, setting: Setting, directory: Path, **changes: Any) -> zi.Config:
    """About the memory of a setting. zi.init may cut other units than prepare, so a little more may be needed."""
    memory = budget_bytes(case.make, adamw, setting)
    while True:
        where = directory if setting.nvme else None
        # Without tiles, which are not bit-identical.
        config = zi.Config(memory=memory, nvme=where, tile_above="1GiB", **changes)
        try:
            model = build(case.make, config)
            zi.prepare(model, adamw(model), config)
        except zi.CapacityError:
            memory += memory // 8
        else:
            return config


@pytest.mark.parametrize(("name", "setting"), thinned([*BUILT], [MINIMAL, TIGHT_RAM]))
def test_built_as_plain_and_trained_as_plain(name: str, setting: Setting, tmp_path: Path) -> None:
    case = BUILT[name]
    config = config_for(case, setting, tmp_path)
    torch.manual_seed(0)
    expected = case.make()
    expected_state = torch.get_rng_state()
    model = build(case.make, config)
    assert torch.equal(torch.get_rng_state(), expected_state), "random numbers were drawn differently"
    # Parameters of lazy modules are made without being registered again; prepare takes them in.
    _check_same(
        expected, model, plain=[n for n, p in model.named_parameters() if name == "lazy" and not is_offloaded(p)]
    )
    del expected

    script = training(case.batch, case.loss, num_steps=4)
    prepared = run_prepared(lambda: model, script, adamw, config)
    assert_identical(run_plain(case.make, script, adamw), prepared)


def _check_same(expected: nn.Module, model: nn.Module, plain: Collection[str] = ()) -> None:
    """The same values; offloaded_param, but for those in `plain`."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    for (name, value), (found_name, found) in zip(
        expected.named_parameters(remove_duplicate=False), parameters, strict=True
    ):
        assert name == found_name
        assert (value.shape, value.dtype, value.requires_grad) == (found.shape, found.dtype, found.requires_grad)
        assert same_bits(value, found), name
        expected_offloaded = found.is_floating_point() and found.numel() > 0 and name not in plain
        assert is_offloaded(found) == expected_offloaded, f"{name} is {'not ' * expected_offloaded}offloaded"
    for (name, value), (_, found) in zip(expected.named_buffers(), model.named_buffers(), strict=True):
        assert same_bits(value, found), name
    # The same parameters are shared as in the plain model.
    assert _sharing(expected) == _sharing(model)


def _sharing(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return list(groups.values())


def test_a_parametrization_inside_the_block(tmp_path: Path) -> None:
    """Right after the layer is made: its parameters are not offloaded yet."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32))

    plain = make()
    with zi.init(zi.Config(memory="1MiB", nvme=tmp_path)):
        built = make()
    assert all(same_bits(a, b.detach()) for a, b in zip(plain.parameters(), built.parameters(), strict=True))


def test_a_built_model_can_be_used_before_it_is_prepared(tmp_path: Path) -> None:
    case = CASES["mlp"]
    config = config_for(case, MINIMAL, tmp_path)
    model = build(case.make, config)
    torch.manual_seed(0)
    plain = case.make()
    batch = case.batch(0)
    with torch.no_grad():
        assert same_bits(model.eval()(batch.cpu()), plain.eval()(batch))
    with zi.gathered(model[0].weight), torch.no_grad():
        model[0].weight.fill_(0.5)
    model[0].bias.data.add_(1.0)
    with torch.no_grad():
        plain[0].weight.fill_(0.5)
        plain[0].bias.add_(1.0)
    model.load_state_dict({**model.state_dict(), "3.bias": torch.ones(32, device=DEVICE)})
    plain.load_state_dict({**plain.state_dict(), "3.bias": torch.ones(32, device=DEVICE)})
    _check_same(plain, model)


def test_a_lazy_module_that_is_materialised_outside_trains(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(32), nn.Linear(32, 32))

    torch.manual_seed(0)
    config = zi.Config(memory="1MiB", nvme=tmp_path)
    with zi.init(config):
        model = make()
    model(torch.ones(1, 32))
    torch.manual_seed(0)
    plain = make()
    plain(torch.ones(1, 32))
    plain = moved(plain)
    runs = [Run(plain, sgd(plain), prepared=False), Run(*zi.prepare(model, sgd(model), config), prepared=True)]
    for run in runs:
        training(vectors(), mean_square)(run)
    assert all(same_bits(a, b) for a, b in zip(runs[0].logged, runs[1].logged, strict=True))


# ---------------------------------------------------------------------- the end, and several


def num_hooks() -> int:
    return len(torch_module._global_parameter_registration_hooks)


def test_an_exception_inside_leaves_nothing_behind(tmp_path: Path) -> None:
    config = zi.Config(memory="64KiB", nvme=tmp_path)

    def fail() -> None:
        with zi.init(config):
            mlp()
            raise KeyError("the user's own")

    with all_given_back():
        with pytest.raises(KeyError, match="the user's own"):
            fail()
        gc.collect()
        assert num_hooks() == 0
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_a_unit_that_cannot_fit_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with all_given_back():
        with (
            pytest.raises(zi.CapacityError, match=r"(?s)Bilinear.weight.*memory is 64"),
            zi.init(zi.Config(memory="64KiB", nvme=tmp_path)),
        ):
            nn.Sequential(nn.Linear(8, 8), nn.Bilinear(32, 64, 64), nn.Linear(8, 8))
        assert num_hooks() == 0


def test_a_model_that_does_not_fit_in_ram_says_so(tmp_path: Path) -> None:
    with all_given_back():
        with pytest.raises(zi.CapacityError, match="nvme"), zi.init(zi.Config(memory="64KiB")):
            mlp(width=64, depth=8)
        assert num_hooks() == 0


def test_a_model_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    with all_given_back():
        model = build(mlp, zi.Config(memory="64KiB", nvme=tmp_path))
        assert is_offloaded(model[0].weight)
        del model
    assert not list(tmp_path.iterdir())


def test_two_models_are_built_one_after_the_other(tmp_path: Path) -> None:
    config = zi.Config(memory="64KiB", nvme=tmp_path)
    torch.manual_seed(0)
    plain = [mlp() for _ in range(2)]
    torch.manual_seed(0)
    built = []
    for _ in range(2):
        with zi.init(config):
            built.append(mlp())
    assert num_hooks() == 0
    script = training(vectors(), mean_square, num_steps=2)
    for expected, model in zip(plain, built, strict=True):
        _check_same(expected, model)
        prepared = run_prepared(lambda model=model: model, script, sgd, config)
        assert_identical(run_plain(lambda expected=expected: expected, script, sgd), prepared)


def test_what_is_built_in_an_init_inside_another_belongs_to_the_outer_one(tmp_path: Path) -> None:
    """It trains as a part of the whole model, but not apart from it."""
    outer, inner = (zi.Config(memory="256KiB", nvme=tmp_path) for _ in range(2))
    torch.manual_seed(0)
    plain = [mlp() for _ in range(3)]
    torch.manual_seed(0)
    with zi.init(outer):
        first = mlp()
        with zi.init(inner):
            second = mlp()
        third = mlp()
        assert num_hooks() > 0, "the outer one goes on"
    assert num_hooks() == 0
    built = (first, second, third)
    for expected, model in zip(plain, built, strict=True):
        _check_same(expected, model)
    script = training(vectors(), mean_square, num_steps=2)
    prepared = run_prepared(lambda: nn.Sequential(*built), script, sgd, outer)
    assert_identical(run_plain(lambda: nn.Sequential(*plain), script, sgd), prepared)
    with pytest.raises(zi.UsageError, match=r"another one from the same zi\.init, is prepared already"):
        zi.prepare(second, sgd(second), inner)


def test_a_model_of_parts_that_were_built_apart_trains(tmp_path: Path) -> None:
    """One half was built inside zi.init, the other one was not."""
    config = zi.Config(memory="256KiB", nvme=tmp_path)

    def parts() -> tuple[nn.Module, nn.Module]:
        return mlp(depth=2), mlp(depth=1)

    torch.manual_seed(0)
    plain = nn.Sequential(*parts())
    torch.manual_seed(0)
    with zi.init(config):
        first = mlp(depth=2)
    model = nn.Sequential(first, mlp(depth=1))
    script = training(vectors(), mean_square)
    prepared = run_prepared(lambda: model, script, adamw, config)
    assert_identical(run_plain(lambda: plain, script, adamw), prepared)


# ---------------------------------------------------------------------- another config for prepare


@pytest.mark.parametrize(
    "changes",
    [{"memory": "64KiB"}, {"memory": "4MiB"}, {"nvme": None}, {"verify": True}],
    ids=["less memory", "more memory", "no nvme", "verify"],
)
def test_another_store_than_it_was_built_in_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Memory and files exist since zi.init: prepare says so instead of training within another budget than it is told."""
    built = zi.Config(memory="256KiB", nvme=tmp_path)
    model = build(mlp, built)
    torch.manual_seed(0)
    plain = mlp()
    field = next(iter(changes))
    with pytest.raises(zi.UsageError, match=rf"{field}.*zi\.init|zi\.init.*{field}"):
        zi.prepare(model, adamw(model), built.replace(**changes))
    _check_same(plain, model)
    script = training(vectors(), mean_square, num_steps=2)
    prepared = run_prepared(lambda: model, script, adamw, built)
    assert_identical(run_plain(lambda: plain, script, adamw), prepared)


def test_what_only_training_looks_at_may_differ(tmp_path: Path) -> None:
    built = zi.Config(memory="256KiB", nvme=tmp_path)
    script = training(vectors(), mean_square, num_steps=3)
    torch.manual_seed(0)
    model = build(mlp, built)
    prepared = run_prepared(lambda: model, script, adamw, built.replace(update="after_backward"))
    assert_identical(run_plain(mlp, script, adamw), prepared)


def test_a_model_built_in_float32_can_be_stored_in_bfloat16(tmp_path: Path) -> None:
    config = zi.Config(memory="1MiB", nvme=tmp_path, param_dtype="bfloat16", compute_dtype="float32")
    script = training(vectors(), mean_square, num_steps=3)
    expected = run_prepared(mlp, script, adamw, config)
    model = build(mlp, config)
    found = run_prepared(lambda: model, script, adamw, config)
    assert_identical(expected, found)


# ---------------------------------------------------------------------- parameters that the model does not have any more


def in_a_list(model: nn.Module) -> Any:
    return [model[0].weight]


def in_a_closure(model: nn.Module) -> Any:
    weight = model[0].weight
    return lambda: weight.sum()


def in_another_optimizer(model: nn.Module) -> Any:
    return torch.optim.SGD([model[0].weight], lr=0.1)


def in_a_graph(model: nn.Module) -> Any:
    return model[0].weight.square().sum()


def its_values(kept: Any) -> torch.Tensor:
    match kept:
        case [weight]:
            return weight.sum()
        case torch.optim.Optimizer():
            return kept.param_groups[0]["params"][0].sum()
        case torch.Tensor():
            ((_, gradient),) = _gradients_of_leaves(kept)
            return gradient.sum() / 2
    return kept()


def _gradients_of_leaves(loss: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    (leaf,) = [node.variable for node in _nodes(loss.grad_fn) if hasattr(node, "variable")]
    return [(leaf, torch.autograd.grad(loss, leaf)[0])]


def _nodes(node: Any) -> list[Any]:
    return [node, *(n for following, _ in node.next_functions if following is not None for n in _nodes(following))]


@pytest.mark.parametrize(
    "keep",
    [
        in_a_list,
        in_a_closure,
        in_another_optimizer,
        pytest.param(in_a_graph, marks=cpu_only("its graph is on the CPU")),
    ],
)
def test_a_replaced_parameter_that_somebody_still_holds(keep: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    config = zi.Config(memory="1MiB", nvme=tmp_path)
    with zi.init(config):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        expected = model[0].weight.sum().detach()
        kept = keep(model)
        model[0].weight = model[1].weight
    zi.prepare(model, adamw(model), config)
    for number in range(3):
        mean_square(model, vectors()(number)).backward()
    assert torch.allclose(its_values(kept).detach(), expected)


def test_a_replaced_parameter_that_nobody_holds_is_given_back(tmp_path: Path) -> None:
    config = zi.Config(memory="1MiB", nvme=tmp_path)
    with zi.init(config):
        model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32))
        host = store_of(offloaded_param.managed(model[0].weight))
        model[0].weight = model[1].weight
    assert len(host.units) == 2
    zi.prepare(model, adamw(model), config)
    assert [unit.name for unit in host.units] == ["1"]


class Nested(nn.Module):
    """Builds one of its submodules in a zi.init of its own."""

    def __init__(self, config: zi.Config) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        with zi.init(config):
            self.inner = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(self.first(x)))


@pytest.mark.parametrize("is_whole", [True, False])
def test_submodules_that_are_built_inside_their_own_init(is_whole: bool) -> None:
    """Inside that of the whole model, or alone."""
    config = zi.Config(memory="1MiB")
    torch.manual_seed(0)
    plain = moved(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)))
    torch.manual_seed(0)
    if is_whole:
        with zi.init(config):
            model = Nested(config)
    else:
        model = Nested(config)
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(DEVICE)
        for either, stepped in ((model, optimizer), (plain, reference)):
            either(x).square().mean().backward()
            stepped.step()
            stepped.zero_grad()
    for value, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert same_bits(value, expected)


def test_an_inner_init_with_other_settings_is_refused() -> None:
    with zi.init(zi.Config(memory="1MiB")), pytest.raises(zi.UsageError, match="zi.init inside zi.init has another"):
        Nested(zi.Config(memory="2MiB"))
