"""Whole trainings of several ranks with faults, one seed each: right bits or the right error, and nothing is left.

`python -m benchmarks simulate-faults` runs more of them, and replays a seed that fails.
"""

from __future__ import annotations

import re

import pytest
from support.forkserver import in_own_process

from benchmarks.simulation.schedule import Bug, Fault, draw
from benchmarks.simulation.simulation import Outcome, set_up, simulate

NUM_SEEDS = 20
MOST_SEEDS_FOR_A_BUG = 40


def wrongs(outcomes: list[Outcome]) -> list[str]:
    return [
        f"{outcome.schedule}: {wrong}\n  again: python -m benchmarks simulate-faults --replay {outcome.schedule.seed}"
        for outcome in outcomes
        for wrong in outcome.wrong
    ]


@in_own_process
def test_a_few_seeds() -> None:
    set_up()
    outcomes = [simulate(draw(seed)) for seed in range(NUM_SEEDS)]
    assert not wrongs(outcomes)
    assert len({outcome.schedule.fault for outcome in outcomes}) >= 6
    assert any(outcome.errors for outcome in outcomes)


@pytest.mark.long
@in_own_process
def test_many_seeds() -> None:
    set_up()
    outcomes = [simulate(draw(seed)) for seed in range(NUM_SEEDS, 800)]
    assert not wrongs(outcomes)
    assert {outcome.schedule.fault for outcome in outcomes} == set(Fault)


@pytest.mark.parametrize("bug", list(Bug))
@in_own_process
def test_a_bug_is_found(bug: Bug) -> None:
    set_up()
    found = (seed for seed in range(MOST_SEEDS_FOR_A_BUG) if simulate(draw(seed, bug)).wrong)
    assert next(found, None) is not None


@in_own_process
def test_a_seed_is_the_same_schedule_again() -> None:
    """Also after others: what ran before in the process does not matter."""
    set_up()
    seeds = (7, 18, 26)
    first, again = ([trail(simulate(draw(seed))) for seed in order] for order in (seeds, reversed(seeds)))
    assert first == again[::-1]


def trail(outcome: Outcome) -> str:
    """Without names that are drawn by the system."""
    return re.sub(r"simulation-\w+|saving-\w+", "", repr(outcome.trail))
