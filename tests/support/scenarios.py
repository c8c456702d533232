"""Behaviours that users of data-parallel training rely on, each as one small model and one script.

The oracle of every one is plain PyTorch that plays all ranks (`support/multirank.py`): a gradient that a rank does not
have counts as zeros, if any rank has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support import multirank
from support.compare import assert_same
from support.models import Case, seeded
from support.multirank import (
    LEAST,
    MAX_NORM,
    Job,
    Order,
    Result,
    Training,
    accumulate_without_sync,
    assert_close,
    clip_by_call,
    plain_part,
    prepared_part,
    run_jobs,
    run_plain,
    steps,
)

WIDTH = 32

# ---------------------------------------------------------------------- models that go different ways


class Scale(nn.Module):
    """Two parameters in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        x = x * self.gain
        return x + self.shift if shifted else x


class Fork(nn.Module):
    """Samples with an odd number go another way than those with an even one. With two ranks, odd samples are rank 1's."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.scale = Scale()
        self.right = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        result: torch.Tensor = getattr(self, self.way)(x, number % 2 == 1, number)
        return result

    def skips_a_layer(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        if not odd:
            x = self.left(x).tanh()
        return self.last(self.right(x).tanh())

    def skips_the_first_layer(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        return self.last(self.right(x if odd else self.first(x).tanh()).tanh())

    def skips_the_last_layer(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.right(self.first(x).tanh())
        return x if odd else self.last(x.tanh())

    def skips_several_layers(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        if odd:
            x = self.right(self.left(x).tanh()).tanh()
        return self.last(x)

    def drops_an_output(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        side = self.left(x)
        return self.last(x if odd else x + side)

    def drops_an_output_by_zero(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x + self.left(x) * (0.0 if odd else 1.0))

    def takes_one_of_two_layers(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last((self.left if odd else self.right)(x).tanh())

    def swaps_two_layers(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        one, other = (self.left, self.right) if odd else (self.right, self.left)
        return self.last(other(one(x).tanh()).tanh())

    def reverses_all_layers(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        layers = [self.first, self.left, self.right, self.last]
        for layer in layers[::-1] if odd else layers:
            x = layer(x).tanh()
        return x

    def uses_half_of_a_module(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        return self.last(self.scale(self.first(x).tanh(), not odd).tanh())

    def uses_other_halves_of_a_module(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        x = x + self.scale.shift if odd else x * self.scale.gain
        return self.last(x)

    def cuts_the_graph(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.left(self.first(x).tanh()).tanh()
        return self.last(x.detach() if odd else x)

    def uses_a_layer_twice(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.left(self.first(x).tanh()).tanh()
        if odd:
            x = self.left(x).tanh()
        return self.last(x)

    def shares_a_weight(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.left(self.first(x).tanh())
        return self.last(x) if odd else F.linear(x, self.left.weight)

    def changes_over_time(self, x: torch.Tensor, odd: bool, number: int) -> torch.Tensor:
        x = self.first(x).tanh()
        if odd or number < 6:
            x = self.left(x).tanh()
        if not odd or number >= 6:
            x = self.right(x).tanh()
        return self.last(x)

    def recomputes_what_others_skip(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        x = self.first(x).tanh()
        if not odd:
            x = checkpoint(lambda y: self.right(self.left(y).tanh()).tanh(), x, use_reentrant=False)
        return self.last(x)

    def trains_one_layer_only(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        if odd:
            return self.left(x)
        return self.last(self.right(self.left(self.first(x).tanh()).tanh()).tanh())

    def uses_nothing_in_common(self, x: torch.Tensor, odd: bool, _: int) -> torch.Tensor:
        return self.right(self.first(x).tanh()) if odd else self.last(self.left(x).tanh())


class Experts(nn.Module):
    """A list of layers, of which each sample uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.last(self.experts[number % 4](self.first(x).tanh()).tanh())


class LayerDrop(nn.Module):
    """Layers that are left out at random, by other random numbers on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        drawn = torch.rand(len(self.layers), generator=seeded(7000 + number))
        for layer, one in zip(self.layers, drawn.tolist(), strict=True):
            if one > 0.4:
                x = x + layer(x).tanh()
        return self.last(x)


class Lookup(nn.Module):
    """An embedding of which each rank looks up other rows, tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        rows = (x[:, 0].abs() * 10).long() % 8 + 8 * (number % 8)
        return self.middle(self.table(rows)).tanh() @ self.table.weight.T


# Ways in which one rank sums gradients of a module before another rank has all of its own.
IN_PARTS = {
    "skips_the_last_layer",
    "uses_half_of_a_module",
    "uses_other_halves_of_a_module",
    "swaps_two_layers",
    "reverses_all_layers",
    "shares_a_weight",
    "trains_one_layer_only",
}
WAYS = [name for name in vars(Fork) if not name.startswith("_") and name != "forward"]


def numbered(width: int = WIDTH, num_rows: int = 6) -> Callable[[int], tuple[torch.Tensor, int]]:
    return lambda number: (torch.randn(num_rows, width, generator=seeded(number)), number)


def of_sample(model: nn.Module, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
    return (model(*batch) - 0.5).square().mean()


def _fork(way: str) -> Callable[[], nn.Module]:
    return lambda: Fork(way)


multirank.MODELS.update({way: Case(_fork(way), numbered(), of_sample) for way in WAYS})
multirank.MODELS.update(
    {
        "experts": Case(Experts, numbered(), of_sample),
        "layer drop": Case(LayerDrop, numbered(), of_sample),
        "lookup": Case(Lookup, numbered(), of_sample),
    }
)


# ---------------------------------------------------------------------- scripts


def many_steps(run: Training) -> None:
    """So many that the order is known and updates run during backward."""
    steps(run, 6)


def accumulate_longer(run: Training) -> None:
    """Two backwards a step, by gradient_accumulation_steps=2, until updates run during backward."""
    for number in range(5):
        for part in range(2):
            run.backward(2 * number + part, scale=0.5)
        run.step()


def clip(run: Training) -> None:
    """max_grad_norm=MAX_NORM."""
    for number in range(4):
        run.backward(number)
        run.clip(MAX_NORM)
        run.step()


def look(run: Training) -> None:
    """See which gradients there are after each backward, and what they are in the last one of a step."""
    for number in range(3):
        run.backward(2 * number, scale=0.5)
        run.log([p.grad is None for p in run.model.parameters()])
        run.backward(2 * number + 1, scale=0.5)
        run.log([None if p.grad is None else p.grad + 0 for p in run.model.parameters()])
        run.step()
        run.log([p.grad is None for p in run.model.parameters()])


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Scenario:
    """One behaviour."""

    model: str
    script: Callable[[Training], None] = many_steps
    optimizer: str = "adamw"
    settings: Mapping[str, Any] = field(default_factory=dict)
    accumulates: bool = False  # stages 0 and 1 sum over ranks once a step, stages 2 and 3 at each backward
    # False: what is summed over ranks is put together in another order than plain PyTorch's.
    is_exact: bool = True

    def is_exact_at(self, num_ranks: int) -> bool:
        """True if every bit is the same: a division by three of parts of a sum is rounded in another way."""
        return self.is_exact and (num_ranks < 3 or (self.model not in IN_PARTS and not self.accumulates))

    def __str__(self) -> str:
        changes = "".join(f" {name}={value}" for name, value in self.settings.items())
        return f"{self.model} {self.script.__name__} {self.optimizer}{changes}"

    def job(self, settings: Mapping[str, Any]) -> Job:
        return Job(self.script, self.model, self.optimizer, {**settings, **self.settings})


UNUSED = [
    *(Scenario(way) for way in WAYS),
    Scenario("experts"),
    Scenario("layer drop"),
    Scenario("lookup"),
    *(
        Scenario(model, accumulate_longer, settings={"gradient_accumulation_steps": 2}, accumulates=True)
        for model in ("skips_a_layer", "drops_an_output", "layer drop")
    ),
    Scenario(
        "uses_half_of_a_module",
        accumulate_longer,
        settings={"gradient_accumulation_steps": 2},
        accumulates=True,
        is_exact=False,
    ),
    *(
        Scenario(model, accumulate_without_sync, accumulates=True)
        for model in ("skips_a_layer", "takes_one_of_two_layers", "layer drop")
    ),
    *(
        Scenario(model, clip, settings={"max_grad_norm": MAX_NORM}, is_exact=False)
        for model in ("skips_a_layer", "uses_other_halves_of_a_module", "layer drop")
    ),
    *(
        Scenario(model, clip_by_call, settings={"update": "after_backward"})
        for model in ("skips_a_layer", "swaps_two_layers")
    ),
    Scenario("skips_a_layer", optimizer="sgd"),
    Scenario("layer drop", optimizer="adagrad"),
]

# Ranks look at gradients that only some of them have.
LOOKS = [Scenario("skips_a_layer", clip_by_call), Scenario("skips_a_layer", look, accumulates=True)]


# Stages and homes by turns: a step of 3 through them meets all pairs.
CELLS = [(stage, home) for home in ("ram", "nvme") for stage in range(4)]


def cells_of(number: int, num_ranks: int) -> list[tuple[int, str]]:
    """The stages and homes at which a scenario runs: two with two ranks, else one."""
    first = (3 * number + num_ranks) % len(CELLS)
    return [CELLS[first], CELLS[(first + 5) % len(CELLS)]] if num_ranks == 2 else [CELLS[first]]


def short_cells_of(number: int, num_ranks: int) -> list[tuple[int, str]]:
    """Those of them in every run of the suite: one with two ranks, and by turns one with one or with three."""
    return cells_of(number, num_ranks)[:1] if num_ranks == 2 or number % 2 == num_ranks // 2 else []


def settings_of(stage: int, home: str, directory: Path) -> dict[str, Any]:
    return {"stage": stage, **({"memory": LEAST, "nvme": directory} if home == "nvme" else {"memory": "4MiB"})}


# Parameters that are stored in bfloat16, computed in float32 and optimized in float32.
ROUNDED = {"param_dtype": "bfloat16", "compute_dtype": "float32"}


def check_table(table: Sequence[tuple[Scenario, int, str]], num_ranks: int, directory: Path) -> None:
    """Run every scenario at its stage and home, in one launch, and compare each with its oracle."""
    jobs = [scenario.job(settings_of(stage, home, directory)) for scenario, stage, home in table]
    plain: dict[tuple[str, Order], Result] = {}
    different = []
    for (scenario, stage, home), job, results in zip(table, jobs, run_jobs(jobs, num_ranks), strict=True):
        order = Order.BACKWARDS if scenario.accumulates and stage < 2 else Order.RANKS
        key = (str(scenario), order)
        if key not in plain:
            plain[key] = run_plain(job, num_ranks, order)
        compare = assert_same if scenario.is_exact_at(num_ranks) else assert_close
        for rank, result in enumerate(results):
            name = f"{scenario}, stage {stage}, {home}, rank {rank} of {num_ranks}"
            try:
                compare(name, plain_part(plain[key], rank), prepared_part(result))
            except AssertionError as error:
                different.append(f"{name}: {str(error)[:300]}")
    assert not different, "\n".join(different)
