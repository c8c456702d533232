"""Updates that `step()` leaves to the next use of their unit: whatever comes first sees their results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.compare import FITS_RAM, HALF, Run, Setting, adamw, compare
from support.models import mean_square, mlp, vectors
from support.prompt import let_nothing_lag
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.errors import TornStepError
from zero_infinity.optim.update_submission import UpdateSubmission

NORM = 0.05
batch = vectors()


def small() -> nn.Module:
    return mlp(depth=2)


def backward(run: Run, loss: torch.Tensor) -> None:
    loss.backward()
    if not run.prepared:
        run.log(nn.utils.clip_grad_norm_(run.model.parameters(), NORM))


def step(run: Run) -> None:
    run.optimizer.step()
    if run.prepared:
        run.log(run.optimizer.grad_norm)


def read_one(run: Run, number: int) -> None:
    run.log(list(run.model.parameters())[number % 4])


def edit(run: Run, number: int) -> None:
    with torch.no_grad():
        run.model[3 * (number % 2)].weight.mul_(0.5)


def evaluate(run: Run, number: int) -> None:
    with torch.no_grad():
        run.log(run.model(batch(number)))


def look_at_states(run: Run, number: int) -> None:
    run.log(run.optimizer.state_dict())


def look_at_one_state(run: Run, number: int) -> None:
    parameter = list(run.model.parameters())[number % 4]
    run.log({name: value.clone() for name, value in run.optimizer.state[parameter].items()})


def set_a_state(run: Run, number: int) -> None:
    parameter = list(run.model.parameters())[number % 4]
    state = run.optimizer.state[parameter]
    run.optimizer.state[parameter] = {**state, "exp_avg": state["exp_avg"] * 0.5}


def load_states(run: Run, number: int) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def change_the_rate(run: Run, number: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 3.0


def zero(run: Run, number: int) -> None:
    run.optimizer.zero_grad(set_to_none=number % 2 == 0)


def step_by_hand(run: Run, number: int) -> None:
    """A gradient for a layer whose last update has not run, and that is not read before the next one."""
    weight = run.model[0].weight
    weight.grad = torch.full(weight.shape, 0.01)
    if not run.prepared:
        nn.utils.clip_grad_norm_(run.model.parameters(), NORM)
    run.optimizer.step()
    run.optimizer.zero_grad()


def leave_a_layer_out(run: Run, number: int) -> None:
    backward(run, run.model[3](batch(number)).square().mean())
    step(run)
    run.optimizer.zero_grad()


def use_an_old_graph(run: Run, number: int) -> None:
    """A gradient of a bias comes from a forward before the step: nothing has read the unit since then."""
    x = batch(number)
    old = (x[:, :32] + run.model[0].bias).square().mean()
    backward(run, mean_square(run.model, x))
    step(run)
    run.optimizer.zero_grad()
    backward(run, old)
    step(run)
    run.optimizer.zero_grad()


BETWEEN: list[Callable[[Run, int], None]] = [
    read_one,
    edit,
    evaluate,
    look_at_states,
    look_at_one_state,
    set_a_state,
    load_states,
    change_the_rate,
    zero,
    step_by_hand,
    leave_a_layer_out,
    use_an_old_graph,
]


@pytest.mark.parametrize("setting", [FITS_RAM, HALF], ids=str)
@pytest.mark.parametrize("between", BETWEEN, ids=lambda function: function.__name__)
def test_what_comes_between_a_step_and_the_next_forward(
    between: Callable[[Run, int], None], setting: Setting, tmp_path: Path
) -> None:
    def script(run: Run) -> None:
        for number in range(5):
            backward(run, mean_square(run.model, batch(number)))
            step(run)
            run.optimizer.zero_grad()
            between(run, number)

    compare(small, script, adamw, setting, tmp_path, max_grad_norm=NORM)


def test_a_tensor_that_the_user_holds_changes_in_step(tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            weight = run.model[0].weight.detach()
            backward(run, mean_square(run.model, batch(number)))
            step(run)
            run.log(weight)
            run.optimizer.zero_grad()

    compare(small, script, adamw, FITS_RAM, tmp_path, max_grad_norm=NORM)


@pytest.mark.parametrize("scale", [1e30, torch.nan], ids=["infinite", "nan"])
def test_a_norm_that_is_not_finite(scale: float, tmp_path: Path) -> None:
    def script(run: Run) -> None:
        for number in range(4):
            backward(run, mean_square(run.model, batch(number)) * (scale if number == 2 else 1.0))
            step(run)
            run.optimizer.zero_grad()

    compare(small, script, adamw, HALF, tmp_path, max_grad_norm=NORM)


def test_a_step_reads_a_parameter_for_forward_and_update_together(tmp_path: Path) -> None:
    """And once more in backward. Gradients and two states are read once, less what stays."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = zi.prepare(model, optimizer, zi.Config(memory="512KiB", nvme=tmp_path, max_grad_norm=1.0))
    let_nothing_lag(model)
    read = 0
    for number in range(7):
        if number == 5:
            read = zi.stats(model).bytes_read
        model(torch.ones(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = (zi.stats(model).bytes_read - read) / 2 / (12 * 128 * 128 * 4)
    assert 4.0 < found < 5.0


def test_updates_run_before_units_that_are_read_together_are_in_memory(tmp_path: Path) -> None:
    """Reading them together takes all of the memory, an update of one beside the others would take more."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="512KiB", nvme=tmp_path, max_grad_norm=NORM))
    weights = list(model.parameters())
    for _ in range(3):
        model(torch.ones(4, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        most = engine_of(model).division.cache // (128 * 128 * 4)
        with zi.gathered(weights[:most]):
            assert torch.isfinite(weights[0]).all()


def test_an_update_that_fails_in_forward_tears_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path, max_grad_norm=NORM))
    for number in range(2):
        mean_square(model, batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(UpdateSubmission, "submit", fails)
        model(batch(2))
    model(batch(2))  # what is left is updated, but the step stays torn
    with pytest.raises(TornStepError, match="was not updated after step"):
        zi.save(tmp_path / "checkpoint", model, optimizer)
