"""What real training loops do: accumulate, evaluate, alternate, branch, checkpoint, clip, fail and go on."""

from __future__ import annotations

import contextlib
import threading
import weakref
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
    Script,
    Setting,
    adamw,
    assert_sound,
    compare,
    copied,
    same_bits,
    seeded,
    sgd,
    training,
)
from support.device import DEVICE, on_device
from support.models import (
    CASES,
    ConvNet,
    encoder,
    gpt2,
    images,
    llama,
    mean_square,
    mlp,
    of_labels,
    t5,
    tokens,
    vectors,
)
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import zero_infinity as zi

batch = vectors()
usual = training(batch, mean_square)


@pytest.fixture(params=[FITS, MINIMAL], ids=str)
def setting(request: pytest.FixtureRequest) -> Setting:
    chosen: Setting = request.param
    return chosen


def small() -> nn.Module:
    return mlp(depth=2)


# ---------------------------------------------------------------------- accumulation


def accumulate(run: Run, counts: list[int], backward: Callable[[Run, torch.Tensor, bool], None]) -> None:
    """One step after each of these numbers of backwards."""
    number = 0
    for count in counts:
        for part in range(count):
            loss = mean_square(run.model, batch(number)) / count
            backward(run, loss, part == count - 1)
            run.log(loss)
            number += 1
        run.optimizer.step()
        run.optimizer.zero_grad()


def plainly(run: Run, loss: torch.Tensor, is_last: bool) -> None:
    loss.backward()


def without_sync(run: Run, loss: torch.Tensor, is_last: bool) -> None:
    with contextlib.nullcontext() if is_last or not run.prepared else run.optimizer.no_sync():
        loss.backward()


def test_repeated_backward(setting: Setting, tmp_path: Path) -> None:
    compare(small, lambda run: accumulate(run, [3, 3, 3, 2], plainly), adamw, setting, tmp_path)


def test_repeated_backward_with_a_short_step_first(setting: Setting, tmp_path: Path) -> None:
    compare(small, lambda run: accumulate(run, [2, 3, 1], plainly), adamw, setting, tmp_path)


def test_accumulation_by_config(setting: Setting, tmp_path: Path) -> None:
    script: Script = lambda run: accumulate(run, [3, 3, 3, 3], plainly)
    compare(small, script, adamw, setting, tmp_path, gradient_accumulation_steps=3)


def test_accumulation_by_config_with_a_short_last_one(setting: Setting, tmp_path: Path) -> None:
    script: Script = lambda run: accumulate(run, [3, 3, 2, 3, 3, 1], plainly)
    compare(small, script, adamw, setting, tmp_path, gradient_accumulation_steps=3)


def test_accumulation_by_no_sync(setting: Setting, tmp_path: Path) -> None:
    compare(small, lambda run: accumulate(run, [3, 3, 2, 4, 1], without_sync), adamw, setting, tmp_path)


def test_accumulation_with_unused_parameters(setting: Setting, tmp_path: Path) -> None:
    """The parts of one step use different layers."""

    def script(run: Run) -> None:
        for number in range(4):
            for part in range(3):
                with contextlib.nullcontext() if part == 2 or not run.prepared else run.optimizer.no_sync():
                    layer = run.model[part % 2 * 3]
                    run.model[6](layer(batch(3 * number + part))).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


def test_more_backwards_than_configured_is_an_error(tmp_path: Path) -> None:
    """Updates ran after the second; a third cannot be honoured, and is never a wrong number."""
    model = small()
    model, optimizer = zi.prepare(
        model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path, gradient_accumulation_steps=2)
    )
    run = Run(model, optimizer, prepared=True)
    accumulate(run, [2, 2], plainly)
    with pytest.raises(zi.TornStepError, match="after_backward"):
        accumulate(run, [3], plainly)


def test_any_number_of_backwards_after_backward(setting: Setting, tmp_path: Path) -> None:
    script: Script = lambda run: accumulate(run, [1, 1, 3, 1, 2], plainly)
    compare(small, script, adamw, setting, tmp_path, update="after_backward")


# ---------------------------------------------------------------------- zero_grad, step


def test_zero_grad_first(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            run.optimizer.zero_grad()
            loss = mean_square(run.model, batch(number))
            loss.backward()
            run.optimizer.step()
            run.log(loss)

    compare(small, script, adamw, setting, tmp_path)


def test_zero_grad_of_the_model(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            run.model.zero_grad()
            loss = mean_square(run.model, batch(number))
            loss.backward()
            run.optimizer.step()
            run.log(loss)

    compare(small, script, adamw, setting, tmp_path)


@pytest.mark.parametrize("forget", ["optimizer", "model"])
def test_gradients_thrown_away(forget: str, setting: Setting, tmp_path: Path) -> None:
    """A batch is found to be bad after its backward: zero_grad, and on to the next."""

    def script(run: Run) -> None:
        for number in range(6):
            loss = mean_square(run.model, batch(number))
            loss.backward()
            if number % 2:
                getattr(run, forget).zero_grad()
                continue
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(loss)

    compare(small, script, adamw, setting, tmp_path, update="after_backward")


def test_the_first_gradients_thrown_away(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        mean_square(run.model, batch(77)).backward()
        run.optimizer.zero_grad()
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def test_zero_grad_to_zeros(setting: Setting, tmp_path: Path) -> None:
    """set_to_none=False: a layer that a step does not use has a zero gradient, which still decays its moments."""

    def script(run: Run) -> None:
        for number in range(6):
            layer = run.model[3] if number % 2 else run.model[0]
            loss = run.model[6](layer(batch(number))).square().mean()
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=False)
            run.log(loss)

    compare(small, script, adamw, setting, tmp_path)


def test_step_without_backward(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        run.optimizer.step()
        usual(run)
        run.optimizer.step()
        run.optimizer.step()
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def set_lr_before_step(run: Run) -> None:
    for number in range(6):
        loss = mean_square(run.model, batch(number))
        loss.backward()
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.log(loss)


def test_the_lr_is_set_between_backward_and_step(setting: Setting, tmp_path: Path) -> None:
    compare(small, set_lr_before_step, adamw, setting, tmp_path, update="after_backward")


def test_the_lr_is_set_when_updates_have_run(setting: Setting, tmp_path: Path) -> None:
    """They ran with the old one: that is refused, or it works, but it is never another number in silence."""
    try:
        compare(small, set_lr_before_step, adamw, setting, tmp_path)
    except zi.TornStepError as refusal:
        assert 'update="after_backward"' in str(refusal)


def test_an_edit_between_forward_and_backward_is_refused(setting: Setting, tmp_path: Path) -> None:
    """Plain PyTorch refuses: the weight was saved for backward and has been changed in place since."""

    def script(run: Run) -> None:
        usual(run)
        loss = mean_square(run.model, batch(9))
        with torch.no_grad():
            run.model[3].weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified|updated|changed|edited"):
            loss.backward()
        run.optimizer.zero_grad()
        usual(run)

    compare(small, script, adamw, setting, tmp_path, update="after_backward")


# ---------------------------------------------------------------------- several losses, several models


def test_two_losses_two_backwards(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            out = run.model(batch(number))
            first, second = out.square().mean(), (out - 1).abs().mean()
            first.backward(retain_graph=True)
            second.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(first, second)

    compare(small, script, adamw, setting, tmp_path)


def test_two_forwards_two_losses(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            first = mean_square(run.model, batch(2 * number))
            second = mean_square(run.model, batch(2 * number + 1))
            second.backward()
            first.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.log(first, second)

    compare(small, script, adamw, setting, tmp_path)


def test_a_graph_that_is_kept(setting: Setting, tmp_path: Path) -> None:
    """retain_graph in every step, and the last loss stays alive through the next forward."""

    def script(run: Run) -> None:
        kept: list[torch.Tensor] = []
        for number in range(4):
            loss = mean_square(run.model, batch(number))
            loss.backward(retain_graph=True)
            run.optimizer.step()
            run.optimizer.zero_grad()
            kept = [loss]
        run.log(kept)

    compare(small, script, adamw, setting, tmp_path)


def test_backward_through_a_graph_that_is_older_than_the_update_is_refused(setting: Setting, tmp_path: Path) -> None:
    """Plain PyTorch refuses too: the weights it saved have been changed in place."""

    def script(run: Run) -> None:
        loss = mean_square(run.model, batch(0))
        run.step(mean_square(run.model, batch(1)))
        with pytest.raises(RuntimeError, match="modified|updated"):
            loss.backward()
        run.optimizer.zero_grad()
        usual(run)

    compare(small, script, adamw, setting, tmp_path, update="after_backward")


class Pair(nn.Module):
    """Two networks in one module, so that `compare` sees the weights of both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(depth=2)
        self.critic = mlp(depth=2)


def make_pair(prepared: bool, memory: int, directory: Path, **config: Any) -> tuple[Pair, Optimizer, Optimizer]:
    torch.manual_seed(0)
    pair = Pair()
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (pair.generator, pair.critic)]
    if prepared:
        for number, part in enumerate((pair.generator, pair.critic)):
            settings = zi.Config(memory=memory, nvme=directory, **config)
            optimizers[number] = zi.prepare(part, optimizers[number], settings)[1]
    return pair, *optimizers


Adversaries = Callable[[Pair, Optimizer, Optimizer, list[torch.Tensor]], None]


def adversarial(pair: Pair, generator: Optimizer, critic: Optimizer, logged: list[torch.Tensor]) -> None:
    """The usual GAN loop: the generator's backward leaves gradients on the critic, which zero_grad drops."""
    for number in range(4):
        critic.zero_grad()
        loss = (pair.critic(batch(number)) - pair.critic(pair.generator(batch(number)).detach())).mean()
        loss.backward()
        critic.step()
        generator.zero_grad()
        answer = pair.critic(pair.generator(batch(100 + number))).square().mean()
        answer.backward()
        generator.step()
        logged += [loss, answer]


def adversarial_frozen(pair: Pair, generator: Optimizer, critic: Optimizer, logged: list[torch.Tensor]) -> None:
    """The careful GAN loop: the critic is frozen while the generator learns."""
    for number in range(4):
        critic.zero_grad()
        loss = (pair.critic(batch(number)) - pair.critic(pair.generator(batch(number)).detach())).mean()
        loss.backward()
        critic.step()
        generator.zero_grad()
        pair.critic.requires_grad_(False)
        answer = pair.critic(pair.generator(batch(100 + number))).square().mean()
        answer.backward()
        pair.critic.requires_grad_(True)
        generator.step()
        logged += [loss, answer]


def one_loss(pair: Pair, generator: Optimizer, critic: Optimizer, logged: list[torch.Tensor]) -> None:
    for number in range(5):
        loss = (pair.critic(pair.generator(batch(number))) - pair.generator(batch(50 + number))).square().mean()
        loss.backward()
        for optimizer in (generator, critic):
            optimizer.step()
            optimizer.zero_grad()
        logged.append(loss)


def mixed_parameters(pair: Pair, generator: Optimizer, critic: Optimizer, logged: list[torch.Tensor]) -> None:
    """One operation over parameters of both, also inside one another's forward."""
    pair.critic[0].register_forward_hook(lambda _, __, out: out * pair.generator[0].bias)
    for number in range(5):
        loss = pair.critic(batch(number)).square().mean()
        loss = loss + (pair.generator[3].weight * pair.critic[3].weight).sum()
        loss.backward()
        for optimizer in (generator, critic):
            optimizer.step()
            optimizer.zero_grad()
        logged.append(loss)


@pytest.mark.half
@pytest.mark.parametrize("update", ["auto", "after_backward"])
@pytest.mark.parametrize("play", [adversarial, adversarial_frozen, one_loss, mixed_parameters])
def test_two_models_and_two_optimizers(play: Adversaries, update: str, tmp_path: Path) -> None:
    results = []
    for prepared in (False, True):
        pair, *optimizers = make_pair(prepared, 96 * 1024, tmp_path, update=update)
        logged: list[torch.Tensor] = []
        torch.manual_seed(1)
        play(pair, *optimizers, logged)
        results.append(([loss.detach() for loss in logged], [copied(p) for p in pair.parameters()]))
        del pair, optimizers
    for expected, found in zip(*results, strict=True):
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


def test_one_model_within_another_is_refused(tmp_path: Path) -> None:
    """A module that is prepared already cannot be prepared again as a part of a larger one."""
    config = zi.Config(memory="1MiB", nvme=tmp_path)
    part = nn.Linear(32, 32)
    part, _ = zi.prepare(part, adamw(part), config)
    whole = nn.Sequential(nn.Linear(32, 32), part)
    with pytest.raises(zi.UsageError, match="prepared already"):
        zi.prepare(whole, adamw(whole), config)


# ---------------------------------------------------------------------- evaluation between steps


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation(mode: Callable[[], Any], setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            run.step(mean_square(run.model, images()(number)))
            run.model.eval()
            with mode():
                run.log(*(run.model(images()(100 + number)) for _ in range(2)))
            run.model.train()

    compare(ConvNet, script, adamw, setting, tmp_path)


def test_evaluation_first(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        with torch.inference_mode():
            run.log(run.model(batch(0)).clone())
        usual(run)

    compare(small, script, adamw, setting, tmp_path)


def test_evaluation_without_no_grad_leaves_nothing(tmp_path: Path) -> None:
    """A graph that is dropped without backward holds no weights."""
    model = small()
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    for number in range(3):
        model(batch(number)).softmax(-1)
    assert not any(unit.is_saved for unit in zi.api.engine_of(model).units)


def test_the_fused_encoder_in_evaluation_is_close(tmp_path: Path) -> None:
    """torch's fused fast path is not taken for offloaded parameters: 6e-7 apart, and training stays identical."""

    def script(run: Run) -> None:
        three = training(CASES["encoder"].batch, mean_square, num_steps=3)
        three(run)
        run.model.eval()
        with torch.no_grad():
            evaluated.append(run.model(CASES["encoder"].batch(9)))
        run.model.train()
        three(run)

    evaluated: list[torch.Tensor] = []
    compare(encoder, script, adamw, HALF, tmp_path)
    torch.testing.assert_close(*evaluated, rtol=0, atol=2e-6)


@pytest.mark.half
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 2}], ids=str)
@pytest.mark.parametrize("make", [gpt2, llama, t5])
def test_generate(make: Callable[[], nn.Module], options: dict[str, Any], tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(2):
            torch.manual_seed(number)
            run.step(of_labels(run.model, tokens()(number)))
            torch.manual_seed(10 + number)
            run.log(run.model.generate(input_ids=tokens(length=4)(50), max_new_tokens=6, min_new_tokens=6, **options))

    compare(make, script, adamw, HALF, tmp_path)


# ---------------------------------------------------------------------- control flow that depends on data


class RandomDepth(nn.Module):
    """Stochastic depth: which layers run, how often and in which order is drawn anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in torch.randint(0, 6, (int(torch.randint(1, 6, ())),)).tolist():
            x = x + self.layers[index](x).tanh()
        return x if x.requires_grad else x + self.layers[0].bias


class Experts(nn.Module):
    """A mixture of experts as a loop over modules: each gets the rows that chose it, or does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, choices = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(choices == number)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


@pytest.mark.parametrize("make", [RandomDepth, Experts])
def test_control_flow_that_depends_on_data(make: Callable[[], nn.Module], setting: Setting, tmp_path: Path) -> None:
    compare(make, training(vectors(num_rows=4), mean_square, num_steps=10), adamw, setting, tmp_path)


def test_parts_of_a_unit_are_used_by_turns(setting: Setting, tmp_path: Path) -> None:
    """Now only the weight of a layer has a gradient, now only the bias, now both."""

    def script(run: Run) -> None:
        layer = run.model[0]
        for number in range(9):
            x = batch(number)
            parts = (x @ layer.weight, x * layer.bias, layer(x))
            run.step(run.model[3](parts[number % 3]).square().mean())

    compare(small, script, adamw, setting, tmp_path)


def test_a_model_that_changes_from_step_to_step(setting: Setting, tmp_path: Path) -> None:
    """Progressive training: layers are added to the forward as time goes on, then left out again."""

    def script(run: Run) -> None:
        for number, depth in enumerate([1, 1, 2, 2, 3, 3, 1, 3]):
            x = batch(number)
            for layer in (0, 3, 6)[:depth]:
                x = run.model[layer](x).tanh()
            run.step(x.square().mean())

    compare(small, script, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- activation checkpointing, saved tensors


class Checkpointed(nn.Module):
    """Each layer is recomputed in backward."""

    def __init__(self, *, use_reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        count = 1 if shared else 4
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1)) for _ in range(count)
        )
        self.repeats = 4 if shared else 1
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in list(self.layers) * self.repeats:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.half
@pytest.mark.parametrize("shared", [False, True], ids=["distinct", "shared"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint(use_reentrant: bool, shared: bool, setting: Setting, tmp_path: Path) -> None:
    compare(lambda: Checkpointed(use_reentrant=use_reentrant, shared=shared), usual, adamw, setting, tmp_path)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_of_functions_and_parts(use_reentrant: bool, setting: Setting, tmp_path: Path) -> None:
    """Functions that use weights without their modules, nested checkpoints, and checkpoint_sequential."""

    def again(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(function, *args, use_reentrant=use_reentrant)
        return result

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x = again(lambda y: (y @ model[0].weight + model[0].bias).tanh(), x)
        x = again(lambda y: model[3](again(model[0], y)), x)
        x = checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant)
        return x.square().mean()

    compare(small, training(batch, loss), adamw, setting, tmp_path)


@pytest.mark.half
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "bert"])
def test_gradient_checkpointing_of_transformers(name: str, use_reentrant: bool, tmp_path: Path) -> None:
    case = CASES[name]

    def make() -> nn.Module:
        model = case.make()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
        return model.train()

    compare(make, training(case.batch, case.loss, num_steps=3), adamw, HALF, tmp_path)


@pytest.mark.parametrize("where", ["whole step", "forward"])
def test_save_on_cpu(where: str, setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            with torch.autograd.graph.save_on_cpu():
                loss = mean_square(run.model, batch(number))
                if where == "whole step":
                    run.step(loss)
            if where == "forward":
                run.step(loss)

    compare(small, script, adamw, setting, tmp_path)


def test_the_users_own_saved_tensor_hooks(setting: Setting, tmp_path: Path) -> None:
    """They see the activations, and their changes count. Weights need not come by: they are not the same in number."""

    def script(run: Run) -> None:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.bfloat16() if tensor.shape == (8, 32) else tensor

        for number in range(4):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.float()):
                loss = mean_square(run.model, batch(number))
            run.step(loss)

    compare(small, script, adamw, setting, tmp_path)


# ---------------------------------------------------------------------- clipping

NORM = 0.05


def clip_in_plain(run: Run, parameters: list[nn.Parameter]) -> torch.Tensor:
    norm: torch.Tensor = nn.utils.clip_grad_norm_(parameters, NORM)
    return norm


@pytest.mark.half
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [3, 3, 2]], ids=["each", "accumulated"])
@pytest.mark.parametrize("make", [small, ConvNet, lambda: ConvNet().to(memory_format=torch.channels_last)])
def test_clipping_by_config(make: Callable[[], nn.Module], counts: list[int], setting: Setting, tmp_path: Path) -> None:
    data = batch if make is small else images()

    def script(run: Run) -> None:
        number = 0
        for count in counts:
            for _ in range(count):
                mean_square(run.model, data(number)).backward()
                number += 1
            if not run.prepared:
                norm = clip_in_plain(run, list(run.model.parameters()))
            run.optimizer.step()
            if run.prepared:
                norm = run.optimizer.grad_norm
            run.optimizer.zero_grad()
            run.log(norm)

    compare(make, script, adamw, setting, tmp_path, max_grad_norm=NORM)


def test_clipping_by_call(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        parameters = list(run.model.parameters())
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            run.log(zi.clip_grad_norm_(parameters, NORM) if run.prepared else clip_in_plain(run, parameters))
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path, update="after_backward")


def test_clipping_some_and_twice(setting: Setting, tmp_path: Path) -> None:
    """Groups are clipped apart, then all of them together."""

    def script(run: Run) -> None:
        clip = zi.clip_grad_norm_ if run.prepared else nn.utils.clip_grad_norm_
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            run.log(clip(list(run.model[0].parameters()), 0.01))
            run.log(clip(list(run.model[3].parameters()), 0.02))
            run.log(clip(list(run.model.parameters()), 0.015))
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path, update="after_backward")


def test_clipping_is_not_needed(tmp_path: Path) -> None:
    """Below the limit gradients are multiplied by one."""

    def script(run: Run) -> None:
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            if not run.prepared:
                nn.utils.clip_grad_norm_(run.model.parameters(), 1e6)
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, HALF, tmp_path, max_grad_norm=1e6)


def parameters_of(run: Run) -> list[nn.Parameter]:
    return list(run.model.parameters())


def gradients_of(run: Run) -> list[torch.Tensor]:
    return [p.grad for p in run.model.parameters() if p.grad is not None]


def through_views(run: Run) -> None:
    for gradient in gradients_of(run):
        gradient.view(-1)[1:3].mul_(3)
        gradient.data.mul_(0.5)
        gradient[0] = 0.25
        next(iter(gradient.split(1))).neg_()
        gradient.t().add_(1e-3)


def in_place(run: Run) -> None:
    for p in parameters_of(run):
        p.grad *= 0.5  # type: ignore[operator]
        p.grad += torch.ones_like(p)  # type: ignore[operator]
        torch.clamp(p.grad, -0.5, 0.5, out=p.grad)


def unscale(run: Run) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(run.optimizer)


def set_anew(run: Run) -> None:
    for p in parameters_of(run):
        p.grad = p.grad * 2 if p.dim() > 1 else torch.ones_like(p)  # type: ignore[operator]


def drop_some(run: Run) -> None:
    for p in parameters_of(run):
        if p.dim() == 1:
            p.grad = None


# What code between backward and step does with gradients.
USES: dict[str, Callable[[Run], Any]] = {
    "clip_grad_norm_": lambda run: nn.utils.clip_grad_norm_(parameters_of(run), NORM),
    "of another order": lambda run: nn.utils.clip_grad_norm_(parameters_of(run), NORM, norm_type=1.5),
    "inf": lambda run: nn.utils.clip_grad_norm_(parameters_of(run), 0.001, norm_type="inf"),  # type: ignore[arg-type]
    "foreach": lambda run: nn.utils.clip_grad_norm_(parameters_of(run), NORM, foreach=True),
    "without foreach": lambda run: nn.utils.clip_grad_norm_(parameters_of(run), NORM, foreach=False),
    "one after the other": lambda run: [nn.utils.clip_grad_norm_(p, 0.01) for p in parameters_of(run)],
    "clip_grad_value_": lambda run: nn.utils.clip_grad_value_(parameters_of(run), 0.001),
    "clip_grad_value_, foreach": lambda run: nn.utils.clip_grad_value_(parameters_of(run), 0.001, foreach=True),
    "get_total_norm": lambda run: nn.utils.get_total_norm(gradients_of(run)),
    "zi.clip_grad_norm_": lambda run: zi.clip_grad_norm_(parameters_of(run), NORM, norm_type=3.0, foreach=True),
    "GradScaler": unscale,
    "values": lambda run: [g.clone() for g in gradients_of(run)],
    "one vector": lambda run: torch.cat([g.flatten() for g in gradients_of(run)]),
    "about them": lambda run: [
        (g.shape, g.dtype, g.stride(), g.device, g.is_sparse, g.numel()) for g in gradients_of(run)
    ],
    "arithmetic": lambda run: [(g / 2 + 1, 1 - g, g == g, g.sum().item(), repr(g)) for g in gradients_of(run)],
    "numpy": lambda run: [g.cpu().numpy().tolist() for g in gradients_of(run)],
    "views": through_views,
    "in place": in_place,
    "set": set_anew,
    "dropped": drop_some,
    "dropped all": lambda run: [setattr(p, "grad", None) for p in parameters_of(run)],
}


@pytest.mark.half
@pytest.mark.parametrize("name", USES)
def test_gradients_are_used_between_backward_and_step(name: str, setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            assert not gradients_of(run)
            for part in range(2):
                mean_square(run.model, batch(2 * number + part)).backward()
            result = USES[name](run)
            run.log(result, len(gradients_of(run)))
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


def test_a_norm_that_is_not_finite_can_be_an_error(tmp_path: Path) -> None:
    model = small()
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    (mean_square(model, batch(0)) * float("inf")).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        zi.clip_grad_norm_(model.parameters(), NORM, error_if_nonfinite=True)


@pytest.mark.parametrize("use", ["clip", "read", "set"])
def test_gradients_that_an_update_has_used_are_an_error(use: str, tmp_path: Path) -> None:
    """The first time that this loop asks for them, they are gone. From the next step on they are there."""
    model = small()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    usual(Run(model, optimizer, prepared=True))
    weight = model[0].weight

    def look() -> None:
        if use == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), NORM)
        elif use == "read":
            weight.grad.sum()
        else:
            weight.grad = torch.ones(weight.shape, device=DEVICE)

    mean_square(model, batch(9)).backward()
    assert weight.grad is not None
    with pytest.raises(zi.UsageError, match=r"(?s)(during backward|after some updates).*update="):
        look()
    if use == "set":
        return
    optimizer.step()
    optimizer.zero_grad()
    for number in range(3):
        mean_square(model, batch(number)).backward()
        look()
        optimizer.step()
        optimizer.zero_grad()


def by_hand_to_none(run: Run) -> None:
    for p in run.model.parameters():
        p.grad = None


def by_hand_to_zero(run: Run) -> None:
    for p in run.model.parameters():
        if p.grad is not None:
            p.grad.detach_()
            p.grad.zero_()


# How loops zero gradients, or do not.
ZEROING: dict[str, Callable[[Run], None]] = {
    "optimizer": lambda run: run.optimizer.zero_grad(),
    "model": lambda run: run.model.zero_grad(),
    "submodules": lambda run: [child.zero_grad() for child in run.model.children()] and None,
    "to zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "by hand": by_hand_to_none,
    "by hand to zeros": by_hand_to_zero,
    "never": lambda run: None,
    "never, and clipped": lambda run: None,
}


@pytest.mark.half
@pytest.mark.parametrize("when", ["before forward", "before backward", "after step"])
@pytest.mark.parametrize("name", ZEROING)
def test_gradients_last_until_they_are_zeroed(name: str, when: str, setting: Setting, tmp_path: Path) -> None:
    """Not until a step has used them: those that are not zeroed add up."""

    def script(run: Run) -> None:
        for number in range(5):
            if when == "before forward":
                ZEROING[name](run)
            loss = mean_square(run.model, batch(number))
            if when == "before backward":
                ZEROING[name](run)
            loss.backward()
            if "clipped" in name:
                run.log(nn.utils.clip_grad_norm_(run.model.parameters(), NORM))
            run.optimizer.step()
            if number < 1:
                run.log([p.grad for p in run.model.parameters()])
            if when == "after step":
                ZEROING[name](run)

    compare(small, script, adamw, setting, tmp_path)


def test_gradients_that_add_up_are_clipped_together(setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            if not run.prepared:
                nn.utils.clip_grad_norm_(run.model.parameters(), NORM)
            run.optimizer.step()

    compare(small, script, adamw, setting, tmp_path, max_grad_norm=NORM)


def test_zeroing_no_more_is_an_error(tmp_path: Path) -> None:
    """A step has consumed what the next gradient would be added to."""
    model = small()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    usual(Run(model, optimizer, prepared=True))
    mean_square(model, batch(8)).backward()
    optimizer.step()
    with pytest.raises(zi.UsageError, match=r"(?s)step\(\) comes again.*zero_grad"):
        optimizer.step()
    with pytest.raises(zi.UsageError, match=r"(?s)added to the last one.*zero_grad"):
        mean_square(model, batch(9)).backward()
    optimizer.zero_grad()
    usual(Run(model, optimizer, prepared=True))


def test_one_gradient_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """Clipping needs room for one gradient, not for all."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="3MiB", nvme=tmp_path))
    mean_square(model, vectors(256)(0)).backward()
    alive: list[weakref.ref[torch.Tensor]] = []
    peak = 0

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal peak
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.numel() >= 256 * 256:
                alive.append(weakref.ref(result.untyped_storage()))  # type: ignore[arg-type]
            peak = max(peak, len({id(s) for ref in alive if (s := ref()) is not None}))
            return result

    with Count():
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
    assert 1 <= peak <= 2


def test_gradients_are_shown_in_gathered(setting: Setting, tmp_path: Path) -> None:
    """update="after_backward": they can be read and changed between backward and step."""

    def script(run: Run) -> None:
        for number in range(4):
            mean_square(run.model, batch(number)).backward()
            for parameter in run.model.parameters():
                with zi.gathered(parameter):
                    run.log(parameter.grad)
                    parameter.grad.clamp_(-0.001, 0.001)
                    if parameter.dim() == 1 and number == 2:
                        parameter.grad = torch.ones(parameter.shape, device=DEVICE)
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path, update="after_backward")


# ---------------------------------------------------------------------- precision


def test_autocast(setting: Setting, tmp_path: Path) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            # The second call finds the casts of the first in autocast's cache.
            return (model(model(x)).float() - 0.5).square().mean()

    compare(small, training(batch, loss), adamw, setting, tmp_path)


# ---------------------------------------------------------------------- failures


class Trouble(Exception):
    """A user's own failure."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Trouble("in backward")


class Failing(nn.Module):
    """A network that fails, when told to, in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.failure: BaseException | str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[1](self.layers[0](x)).tanh()
        if isinstance(self.failure, BaseException):
            raise self.failure
        if self.failure == "backward":
            x = _RaiseInBackward.apply(x)
        return self.layers[3](self.layers[2](x))


class FailingInside(nn.Linear):
    """A layer that fails inside its own forward, when its parameters are unsharded."""

    failure: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.failure is not None:
            raise self.failure
        return x


@pytest.mark.half
@pytest.mark.parametrize("kind", [Trouble, KeyboardInterrupt])
@pytest.mark.parametrize("when", [0, 2])
def test_a_failure_in_forward(kind: type[BaseException], when: int, setting: Setting, tmp_path: Path) -> None:
    """Training goes on, and is the same as plain training that failed there too."""

    def script(run: Run) -> None:
        for number in range(5):
            run.model.failure = kind() if number == when else None
            try:
                run.step(mean_square(run.model, batch(number)))
            except kind:
                run.log(*(p.norm() for p in run.model.parameters()))

    compare(Failing, script, adamw, setting, tmp_path)


@pytest.mark.parametrize("kind", [Trouble, KeyboardInterrupt])
def test_a_failure_inside_of_a_layer(kind: type[BaseException], setting: Setting, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            run.model[2].failure = kind() if number == 2 else None
            try:
                run.step(mean_square(run.model, batch(number)))
            except kind:
                run.log(run.model.state_dict())  # the usual thing to do on Ctrl-C
                with torch.no_grad():
                    run.log(run.model[0](batch(50)))

    make = lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), FailingInside(32, 32), nn.Linear(32, 32))
    compare(make, script, adamw, setting, tmp_path)


def test_another_model_after_an_interrupt(tmp_path: Path) -> None:
    """What an interrupted forward leaves behind does not get in the way of others."""

    def script(run: Run) -> None:
        run.model.failure = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            run.model(batch(0))
        torch.manual_seed(5)
        other = small()
        with torch.autograd.graph.save_on_cpu():
            loss = mean_square(other, batch(1))
        loss.backward()
        run.log([p.grad for p in other.parameters()])
        run.model.failure = None
        usual(run)

    compare(Failing, script, adamw, HALF, tmp_path)


def test_a_failure_in_the_first_backward(setting: Setting, tmp_path: Path) -> None:
    compare(Failing, lambda run: _fail_in_backward(run, [0]), adamw, setting, tmp_path)


def test_a_failure_in_a_later_backward(setting: Setting, tmp_path: Path) -> None:
    script: Script = lambda run: _fail_in_backward(run, [1, 3])
    compare(Failing, script, adamw, setting, tmp_path, update="after_backward")


def _fail_in_backward(run: Run, when: list[int]) -> None:
    for number in range(5):
        run.model.failure = "backward" if number in when else None
        try:
            run.step(mean_square(run.model, batch(number)))
        except Trouble:
            run.optimizer.zero_grad()


@pytest.mark.parametrize("then", ["zero_grad", "step", "forward"])
def test_a_failure_in_backward_after_some_updates_ran(then: str, tmp_path: Path) -> None:
    """The step is torn: whatever is tried next says so, and so does everything after it."""
    model = Failing()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    run = Run(model, optimizer, prepared=True)
    usual(run)
    model.failure = "backward"
    with pytest.raises(Trouble):
        mean_square(model, batch(8)).backward()
    model.failure = None
    for _ in range(2):
        with pytest.raises(zi.TornStepError, match=r'(?s)fix:.*update="after_backward"'):
            model(batch(9)) if then == "forward" else getattr(optimizer, then)()


def test_a_graph_that_is_alive_keeps_updates_for_step(setting: Setting, tmp_path: Path) -> None:
    """Another loss still needs the weights: they are not changed under it, whatever the steps before did."""

    def script(run: Run) -> None:
        usual(run)
        for number in range(3):
            first, second = (mean_square(run.model, batch(2 * number + part)) for part in range(2))
            run.log(*torch.autograd.grad(first, run.model[0].weight, retain_graph=True))
            second.backward()
            run.log(*torch.autograd.grad(first, run.model[6].weight))
            run.optimizer.step()
            run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


def test_a_failure_in_backward_before_any_update(setting: Setting, tmp_path: Path) -> None:
    """Nothing was updated yet, so nothing is torn."""

    def script(run: Run) -> None:
        for number in range(5):
            loss = mean_square(run.model, batch(number))
            if number == 3:
                loss = _RaiseInBackward.apply(loss)
            try:
                run.step(loss)
            except Trouble:
                run.optimizer.zero_grad()

    compare(small, script, adamw, setting, tmp_path)


class _Fussy(torch.optim.SGD):
    """An optimizer that fails in its third step."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        if group["lr"] == 0.0:
            raise Trouble("in the update")
        super().step()


@pytest.mark.torch_keeps_the_model
@pytest.mark.parametrize("update", ["auto", "after_backward"])
def test_a_failure_in_the_update_reaches_the_user(update: str, tmp_path: Path) -> None:
    """As itself: not as a lack of memory, and not by waiting for ever."""
    model = small()
    model, optimizer = zi.prepare(
        model, _Fussy(model.parameters(), lr=1e-2), zi.Config(memory=64 * 1024, nvme=tmp_path, update=update)
    )
    run = Run(model, optimizer, prepared=True)
    usual(run)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(Trouble, match="in the update"):
        usual(run)


def test_a_second_thread_inside_the_model_is_refused(tmp_path: Path) -> None:
    """Not silently wrong: parameters are shown to one thread at a time."""
    errors: list[BaseException] = []

    class Threaded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def use() -> None:
                try:
                    model[0](x)
                except BaseException as error:  # noqa: BLE001 - looked at below
                    errors.append(error)

            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            return super().forward(x)

    model = nn.Sequential(nn.Linear(32, 32), Threaded(32, 32))
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    model(batch(0))
    assert len(errors) == 1
    assert isinstance(errors[0], zi.UsageError)
    assert "second thread" in str(errors[0])
    errors.clear()


def test_each_step_in_a_thread_of_its_own(setting: Setting, tmp_path: Path) -> None:
    """One after the other is fine."""

    def script(run: Run) -> None:
        for number in range(3):
            thread = threading.Thread(target=lambda n=number: run.step(mean_square(run.model, batch(n))))
            thread.start()
            thread.join()

    compare(lambda: small().eval(), script, adamw, setting, tmp_path)


def test_workers_that_are_forked(tmp_path: Path) -> None:
    """A DataLoader's worker has a copy of the engine, and must leave it alone."""

    def script(run: Run) -> None:
        rows = on_device(torch.randn(12, 32, generator=seeded(3)))
        loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=1, multiprocessing_context="fork")
        for _ in range(2):
            for data in loader:
                run.step(mean_square(run.model, data))

    compare(small, script, adamw, HALF, tmp_path)


def test_soundness_is_checked_between_steps(tmp_path: Path) -> None:
    model = small()
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory="1MiB", nvme=tmp_path))
    run = Run(model, optimizer, prepared=True)
    for number in range(3):
        run.step(mean_square(model, batch(number)))
        assert_sound(model)
