"""What real code does with whole models: save, load, copy, convert, print, pickle, compile and call functionally."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import (
    FITS,
    HALF,
    MINIMAL,
    Run,
    Setting,
    adamw,
    compare,
    copied,
    is_offloaded,
    minimal_memory,
    run_plain,
    training,
)
from support.models import (
    CASES,
    ConvNet,
    TiedHead,
    gpt2,
    images,
    mean_square,
    mlp,
    next_token,
    of_labels,
    tokens,
    vectors,
)
from torch import nn
from torch.optim import Optimizer

import zero_infinity as zi
from zero_infinity.params import offloaded_param

batch = vectors()
usual = training(batch, mean_square)


@pytest.fixture(params=[FITS, MINIMAL], ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    chosen: Setting = request.param
    return chosen


def small() -> nn.Module:
    return mlp(depth=2)


def prepared(make: Callable[[], nn.Module], directory: Path, **config: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = make()
    return zi.prepare(model, adamw(model), zi.Config(memory=config.pop("memory", "1MiB"), nvme=directory, **config))


# ---------------------------------------------------------------------- state_dict


@pytest.mark.parametrize("name", ["conv", "tied", "gpt2", "lstm"])
def test_state_dict(name: str, setting: Setting, tmp_path: Path) -> None:
    """Names, order, shapes and values are those of the plain model, and a copy stays as it was."""
    case = CASES[name]

    def script(run: Run) -> None:
        training(case.batch, case.loss, num_steps=2)(run)
        states = run.model.state_dict()
        run.log(list(states), states)
        kept = copy.deepcopy(states)
        del states
        training(case.batch, case.loss, num_steps=2)(run)
        run.log(kept)

    compare(case.make, script, adamw, setting, tmp_path)


def test_a_state_dict_that_is_kept_does_not_hold_the_memory(tmp_path: Path) -> None:
    """Under the smallest budget, training goes on while somebody has the state_dict."""

    def script(run: Run) -> None:
        kept = []
        for number in range(4):
            run.step(mean_square(run.model, batch(number)))
            kept.append(copied(run.model.state_dict()) if not run.prepared else run.model.state_dict())
        run.log(kept)

    compare(small, script, adamw, MINIMAL, tmp_path)


def test_state_dict_of_a_part_and_with_prefix(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        run.log(run.model[3].state_dict(prefix="part."), run.model.state_dict(keep_vars=True))
        run.log(sorted(run.model.state_dict(destination={}, prefix="x.")))

    compare(small, script, adamw, MINIMAL, tmp_path)


def test_load_state_dict(setting: Setting, tmp_path: Path) -> None:
    """Back to an earlier state, strictly."""

    def script(run: Run) -> None:
        kept = copy.deepcopy(run.model.state_dict())
        usual(run)
        run.log(str(run.model.load_state_dict(kept, strict=True)))
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def test_a_state_dict_goes_from_prepared_to_plain_and_back(tmp_path: Path) -> None:
    outcome = run_plain(TiedHead, training(tokens(), next_token), adamw)
    model, _ = prepared(TiedHead, tmp_path)
    model.load_state_dict({**outcome.weights, **outcome.buffers})
    plain = TiedHead()
    plain.load_state_dict(model.state_dict())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, outcome.weights[name])


def test_a_file_of_the_state_dict(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        run.log({name: type(value).__name__ for name, value in loaded.items()}, loaded)
        usual(run)
        run.model.load_state_dict(loaded)

    compare(small, script, adamw, setting, tmp_path)


def test_errors_of_load_state_dict_are_the_plain_ones(tmp_path: Path) -> None:
    model, _ = prepared(small, tmp_path)
    states = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({name: value for name, value in states.items() if name != "0.bias"})
    with pytest.raises(RuntimeError, match="size mismatch for 3.weight"):
        model.load_state_dict({**states, "3.weight": torch.zeros(2, 2)})
    with pytest.raises(zi.UsageError, match="assign"):
        model.load_state_dict(states, assign=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, states[name])


# ---------------------------------------------------------------------- copies and pickles


@pytest.mark.half
@pytest.mark.parametrize("name", ["mlp", "conv", "tied", "gpt2", "lstm", "attention"])
def test_a_deep_copy_is_a_plain_model(name: str, setting: Setting, tmp_path: Path) -> None:
    """It trains on its own, and leaves the original as it is."""
    case = CASES[name]
    steps = training(case.batch, case.loss, num_steps=2)

    def script(run: Run) -> None:
        steps(run)
        twin = copy.deepcopy(run.model)
        assert not any(is_offloaded(p) or offloaded_param.managed(p) is not None for p in twin.parameters())
        assert [type(p) for p in twin.parameters()] == [nn.Parameter] * len(list(twin.parameters()))
        other = Run(twin, adamw(twin), prepared=False)
        steps(other)
        run.log(other.logged, {name: p.detach() for name, p in twin.named_parameters(remove_duplicate=False)})
        steps(run)

    compare(case.make, script, adamw, setting, tmp_path)


def test_a_deep_copy_outlives_the_original(tmp_path: Path) -> None:
    model, _ = prepared(small, tmp_path)
    twin = copy.deepcopy(model)
    expected = model(batch(0)).detach().clone()
    del model, _
    torch.manual_seed(1)
    twin.eval()
    assert torch.isfinite(twin(batch(0))).all()
    assert expected.shape == (8, 32)


def test_a_copy_of_one_parameter(tmp_path: Path) -> None:
    model, _ = prepared(small, tmp_path)
    twin = copy.deepcopy(model[0].weight)
    assert type(twin) is nn.Parameter
    assert torch.equal(twin, model[0].weight)
    fresh = nn.Parameter(model[0].weight.detach().clone())
    assert torch.equal(fresh, twin)


def test_a_deep_copy_can_be_prepared_too(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        twin = copy.deepcopy(run.model)
        optimizer = adamw(twin)
        if run.prepared:
            twin, optimizer = zi.prepare(twin, optimizer, zi.Config(memory="1MiB", nvme=tmp_path))
        other = Run(twin, optimizer, prepared=run.prepared)
        usual(other)
        usual(run)
        run.log(other.logged)

    compare(small, script, adamw, HALF, tmp_path)


def test_pickling_is_refused(tmp_path: Path) -> None:
    model, optimizer = prepared(small, tmp_path)
    with pytest.raises(zi.UsageError, match="state_dict"):
        pickle.dumps(model)
    with pytest.raises(zi.UsageError, match="state_dict"):
        torch.save(model, io.BytesIO())
    with pytest.raises(zi.UsageError, match="state_dict"):
        pickle.dumps(model[0].weight)
    with pytest.raises(zi.UsageError, match="state_dict"):
        pickle.dumps(optimizer)
    with pytest.raises(zi.UsageError, match="state_dict"):
        copy.deepcopy(optimizer)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(twin[0].weight, model[0].weight)


# ---------------------------------------------------------------------- conversions


@pytest.mark.half
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.float32),
        lambda m: m.float(),
        lambda m: m.cpu(),
        lambda m: m.train().requires_grad_(True),
        lambda m: m.to(torch.device("cpu"), torch.float32, non_blocking=True),
        lambda m: m.apply(lambda _: None),
    ],
)
def test_conversions_that_change_nothing(convert: Callable[[nn.Module], Any], setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        usual(run)
        assert convert(run.model) is run.model
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


@pytest.mark.half
@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.to(torch.float64),
        lambda m: m.double(),
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="meta"),
        lambda m: m.share_memory(),
    ],
)
def test_conversions_that_are_refused(convert: Callable[[nn.Module], Any], setting: Setting, tmp_path: Path) -> None:
    """Clearly, and the model is as good as before."""

    def script(run: Run) -> None:
        usual(run)
        if run.prepared:
            with pytest.raises(zi.UsageError, match=r"(?s)'0.weight'.*before zi.prepare"):
                convert(run.model)
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def test_channels_last_after_prepare(tmp_path: Path) -> None:
    """It only changes how the values lie in memory: kept as they are, or refused, but never lost."""
    model, optimizer = prepared(ConvNet, tmp_path)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        model.to(memory_format=torch.channels_last)
    except zi.UsageError as refusal:
        assert "before zi.prepare" in str(refusal)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    mean_square(model, images()(0)).backward()
    optimizer.step()


def test_a_buffer_that_is_converted(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        three = training(images(), mean_square, num_steps=3)
        three(run)
        run.model.norm1.running_mean = run.model.norm1.running_mean.clone()
        run.model.norm2.reset_running_stats()
        three(run)

    compare(ConvNet, script, adamw, HALF, tmp_path)


# ---------------------------------------------------------------------- looking at a model


def test_looking_at_a_parked_model(tmp_path: Path) -> None:
    """Nothing of this moves a byte or differs from the plain model."""

    def script(run: Run) -> None:
        model = run.model
        run.log(repr(model), str(model), [name for name, _ in model.named_parameters()])
        run.log([(p.shape, p.dtype, p.device, p.requires_grad, p.is_leaf, p.ndim, p.grad) for p in model.parameters()])
        run.log(
            sum(p.numel() * p.element_size() for p in model.parameters()), sum(p.nbytes for p in model.parameters())
        )
        run.log([isinstance(p, nn.Parameter) for p in model.parameters()], len(set(model.parameters())))
        run.log([p.stride() for p in model.parameters()], [p.is_contiguous() for p in model.parameters()])
        run.log([id(p) == id(q) for p, q in zip(model.parameters(), model.parameters(), strict=True)])
        run.log(model[0].weight in set(model.parameters()), model[0].extra_repr(), model[0].weight.type())
        run.log(model[0].weight.is_floating_point(), model[0].weight.data.dtype, model[0].weight.T.shape)

    compare(small, script, adamw, FITS, tmp_path)


def test_metadata_reads_nothing(tmp_path: Path) -> None:
    model, _ = prepared(small, tmp_path, memory=minimal_memory(small, adamw))
    before = zi.stats(model).bytes_read
    for p in model.parameters():
        assert (p.shape, p.dtype, p.device, p.requires_grad, p.numel(), p.dim(), p.grad, hash(p)) is not None
    repr(model)
    model.train().eval()
    assert zi.stats(model).bytes_read == before


def test_the_model_is_the_same_object_with_the_same_parameters(tmp_path: Path) -> None:
    model = small()
    parameters = list(model.parameters())
    values = [p.detach().clone() for p in parameters]
    again, _ = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    assert again is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(p, v) for p, v in zip(parameters, values, strict=True))


def test_a_view_outlives_the_model(tmp_path: Path) -> None:
    """Memory is given back when the last tensor over it dies, also after the engine has ended."""
    model, _ = prepared(small, tmp_path)
    expected = model[0].weight.detach().clone()
    view = model[0].weight.detach().t()
    del model, _
    gc.collect()
    assert torch.equal(view.t(), expected)


# ---------------------------------------------------------------------- functional use


def test_functional_call(setting: Setting, tmp_path: Path) -> None:
    """With other tensors in the place of the parameters, and with the parameters themselves."""

    def script(run: Run) -> None:
        for number in range(3):
            doubled = {name: p.detach() * 2 for name, p in run.model.named_parameters()}
            run.log(torch.func.functional_call(run.model, doubled, batch(number)))
            own = dict(run.model.named_parameters())
            run.step(torch.func.functional_call(run.model, own, batch(number)).square().mean())

    compare(lambda: small().eval(), script, adamw, setting, tmp_path)


def test_functional_gradients(tmp_path: Path) -> None:
    """torch.func.grad and vmap over copies of the parameters, with the prepared module as the function."""

    def script(run: Run) -> None:
        values = {name: p.detach().clone() for name, p in run.model.named_parameters()}

        def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(run.model, weights, row[None]).square().mean()

        run.log(torch.func.grad(loss)(values, batch(0)[0]))
        run.log(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, batch(1)))
        usual(run)

    compare(lambda: small().eval(), script, adamw, HALF, tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_gradient_with_respect_to_the_input_by_torch_func(tmp_path: Path) -> None:
    """The parameters themselves inside a transform: torch.func allows no saved-tensor hooks."""

    def script(run: Run) -> None:
        for number in range(2):
            run.step(mean_square(run.model, batch(number)))
            run.log(torch.func.grad(lambda x: run.model(x).square().mean())(batch(10 + number)))
            run.log(torch.func.vmap(run.model)(batch(20 + number)))
            run.log(torch.func.jvp(run.model, (batch(30),), (batch(31),)))

    compare(lambda: small().eval(), script, adamw, FITS, tmp_path)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(batch(0), batch(1))
            run.log(torch.autograd.forward_ad.unpack_dual(run.model(dual)).tangent)
        usual(run)

    compare(lambda: small().eval(), script, adamw, FITS, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_compile(tmp_path: Path) -> None:
    """torch.compile over a prepared model: exact, with graph breaks."""

    def script(run: Run) -> None:
        compiled = torch.compile(run.model, backend="eager")
        for number in range(4):
            run.step((compiled(batch(number)) - 0.5).square().mean())

    try:
        compare(lambda: small().eval(), script, adamw, HALF, tmp_path)
    finally:
        torch._dynamo.reset()


def test_a_prepared_model_inside_of_a_plain_one(tmp_path: Path) -> None:
    """A frozen plain backbone and a head that is prepared alone."""

    def build(is_prepared: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        body, head = small(), small()
        body_optimizer, head_optimizer = torch.optim.SGD(body.parameters(), lr=1e-2), adamw(head)
        if is_prepared:
            head, head_optimizer = zi.prepare(head, head_optimizer, zi.Config(memory=96 * 1024, nvme=tmp_path))
        model = nn.Sequential(body, head)
        losses = []
        for number in range(4):
            torch.manual_seed(number)
            loss = mean_square(model, batch(number))
            loss.backward()
            for optimizer in (body_optimizer, head_optimizer):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return [*losses, *(p.detach().clone() for p in model.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(build(False), build(True), strict=True))


def test_resizing_the_embedding_before_prepare(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = gpt2()
        model.resize_token_embeddings(101, mean_resizing=False)
        return model

    compare(make, training(tokens(), of_labels, num_steps=2), adamw, HALF, tmp_path)
