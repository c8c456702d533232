"""What code does with optimizer states between steps has the effect that it has in plain PyTorch."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import FITS_RAM, MINIMAL, Run, Setting, adamw, assert_same, compare
from support.models import mean_square, mlp, vectors
from torch import nn

import zero_infinity as zi

BATCH = vectors()


def first(run: Run) -> torch.Tensor:
    return next(iter(run.model.parameters()))


def changed_in_place(run: Run) -> None:
    for p in run.model.parameters():
        run.optimizer.state[p]["exp_avg"].mul_(0.5)
        run.optimizer.state[p]["exp_avg_sq"].view(-1)[0] = 0.25
    torch._foreach_mul_([run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()], 0.5)
    run.log(run.optimizer.state[first(run)]["exp_avg"] + 0)


def zeroed(run: Run) -> None:
    for p in run.model.parameters():
        run.optimizer.state[p]["exp_avg"].zero_()
        run.optimizer.state[p]["step"].fill_(1.0)


def set_one(run: Run) -> None:
    for p in run.model.parameters():
        run.optimizer.state[p]["exp_avg"] = torch.ones_like(p)
        run.optimizer.state[p].update(step=torch.tensor(7.0), exp_avg_sq=torch.ones_like(p))


def set_whole(run: Run) -> None:
    for p in run.model.parameters():
        ones = torch.ones_like(p)
        run.optimizer.state[p] = {"step": torch.tensor(5.0), "exp_avg": ones, "exp_avg_sq": ones.clone()}


def cleared(run: Run) -> None:
    run.optimizer.state.clear()


def replaced(run: Run) -> None:
    run.optimizer.state = defaultdict(dict)


def replaced_by_halves(run: Run) -> None:
    run.optimizer.state = {
        p: {name: value * 0.5 for name, value in state.items()} for p, state in run.optimizer.state.items()
    }


def dropped(run: Run) -> None:
    assert "exp_avg" in run.optimizer.state.pop(first(run))
    run.log(first(run) in run.optimizer.state, len(run.optimizer.state))


def loaded_by_hooks(run: Run) -> None:
    seen: list[str] = []
    run.optimizer.register_state_dict_pre_hook(lambda _: seen.append("pre"))
    run.optimizer.register_state_dict_post_hook(lambda _, states: states["param_groups"][0].update(lr=0.3))
    run.optimizer.register_load_state_dict_pre_hook(lambda _, states: {**states, "state": {}})
    run.optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append(str(len(optimizer.state))))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.log(seen)


EDITS = [
    changed_in_place,
    zeroed,
    set_one,
    set_whole,
    cleared,
    replaced,
    replaced_by_halves,
    dropped,
    loaded_by_hooks,
]


def script(edit: Callable[[Run], None]) -> Callable[[Run], None]:
    def train(run: Run) -> None:
        for number in range(6):
            run.step(mean_square(run.model, BATCH(number)))
            if number == 3:
                edit(run)

    return train


@pytest.mark.parametrize(("edit", "setting"), [(e, (FITS_RAM, MINIMAL)[n % 2]) for n, e in enumerate(EDITS)])
def test_an_edit(edit: Callable[[Run], None], setting: Setting, tmp_path: Any) -> None:
    compare(mlp, script(edit), adamw, setting, tmp_path)


def test_states_that_are_set_on_the_optimizer_before_prepare() -> None:
    model = nn.Linear(4, 4)
    plain = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    plain.step()
    expected = copy.deepcopy(plain.state_dict()["state"])
    _, optimizer = zi.prepare(model, plain, zi.Config(memory="1MiB"))
    assert_same("states", expected, optimizer.state_dict()["state"])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number in range(4):
        model(torch.full((2, 4), float(number + 1))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_what_the_given_optimizer_loads_counts(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    other = copy.deepcopy(model)
    reference = torch.optim.AdamW(other.parameters())
    steps(other, reference)
    state = copy.deepcopy(reference.state_dict())
    state["param_groups"][0]["lr"] = 0.3
    plain = torch.optim.AdamW(model.parameters())
    model, optimizer = zi.prepare(model, plain, zi.Config(memory="1MiB"))
    steps(model, optimizer)
    plain.load_state_dict(copy.deepcopy(state))
    reference.load_state_dict(copy.deepcopy(state))
    optimizer.param_groups[0]["weight_decay"] = reference.param_groups[0]["weight_decay"] = 0.2
    steps(model, optimizer)
    steps(other, reference)
    assert_same("weights", dict(other.state_dict()), dict(model.state_dict()))


def test_what_cannot_be_taken_is_refused() -> None:
    model = nn.Linear(4, 4)
    plain = torch.optim.AdamW(model.parameters())
    called: list[object] = []
    plain.register_step_pre_hook(lambda optimizer, *_: called.append(optimizer))
    model, optimizer = zi.prepare(model, plain, zi.Config(memory="1MiB"))
    steps(model, optimizer)
    assert called == [optimizer] * 4
    with pytest.raises(zi.UsageError, match=r"cannot be removed after zi.prepare\n  fix:   `del optimizer.state"):
        del optimizer.state[model.weight]["exp_avg"]
    with pytest.raises(zi.UsageError, match="lacks"):
        optimizer.state[model.weight] = {"step": torch.tensor(1.0)}
    plain.state[model.weight]["exp_avg"] = torch.ones(4, 4)
    with pytest.raises(zi.UsageError, match=r"of 'weight' was set on the optimizer that was given to zi.prepare"):
        steps(model, optimizer)
