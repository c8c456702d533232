"""`torch.distributed.checkpoint.state_dict` with a prepared model: what it gets, and what it sets, both ways."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from support.compare import assert_same
from support.rank_scripts import small_blocks
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

import zero_infinity as zi

NAMES = ("full_state_dict", "cpu_offload", "ignore_frozen_params", "flatten_optimizer_state_dict")
# Torch itself cannot set a flat state that it has got as a full one.
EVERY = [dict(zip(NAMES, flags, strict=True)) for flags in itertools.product([False, True], repeat=4)]
SETTABLE = [one for one in EVERY if not (one["full_state_dict"] and one["flatten_optimizer_state_dict"])]


def made(stage: int | None) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return (model, optimizer) if stage is None else zi.prepare(model, optimizer, zi.Config(memory="2MiB", stage=stage))


def steps(model: nn.Module, optimizer: Optimizer, first: int = 0) -> None:
    for number in range(first, first + 2):
        # The same on all ranks, so that one plain process has the same gradients.
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def exchange(rank: int, stage: int, num_ranks: int) -> int:
    small_blocks()
    plain, ours = made(None), made(stage)
    assert_same("fresh", get_state_dict(*plain), get_state_dict(*ours))
    steps(*plain)
    steps(*ours)
    for flags in EVERY:
        options = StateDictOptions(**flags)
        assert_same(
            f"got with {flags}", get_state_dict(*plain, options=options), get_state_dict(*ours, options=options)
        )
    num_set = 0
    settable = SETTABLE if num_ranks == 1 else SETTABLE[:: len(SETTABLE) - 1]  # the first and the last
    for number, flags in enumerate(settable):
        is_empty = flags["full_state_dict"] and flags["cpu_offload"] and num_ranks > 1
        got = StateDictOptions(**{**flags, "cpu_offload": flags["cpu_offload"] and not is_empty})
        options = StateDictOptions(**flags, strict=not flags["ignore_frozen_params"])
        givers, takers = (plain, ours), (ours, made(stage), made(None))
        giver = givers[number % 2]
        for taker, prepared in ((takers[1], True), (takers[2], False)):
            model, states = get_state_dict(*giver, options=got)
            set_state_dict(
                *taker,
                model_state_dict=copy.deepcopy(model),
                optim_state_dict=copy.deepcopy(states),
                options=options,
            )
            assert_same(f"{flags} {prepared}", plain[1].state_dict()["state"], taker[1].state_dict()["state"])
            num_set += 1
        weights = [{n: p.clone() for n, p in taker[0].state_dict().items()} for taker in takers[1:]]
        assert_same(f"{flags}", *weights)
        steps(*takers[1], first=2)
        steps(*takers[2], first=2)
        assert_same(f"{flags}: later", dict(takers[2][0].state_dict()), dict(takers[1][0].state_dict()))
    if num_ranks > 1:  # the states of one rank, set on all
        model, states = get_state_dict(*ours, options=StateDictOptions(full_state_dict=True))
        if rank:
            model, states = {}, {}
        taker = made(stage)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # Not set_state_dict, which takes an empty model state for none at all.
        set_model_state_dict(taker[0], model, options=options)
        set_optimizer_state_dict(*taker, states, options=options)
        assert_same("broadcast", get_model_state_dict(plain[0]), get_model_state_dict(taker[0]))
        given, taken = (
            get_optimizer_state_dict(*pair)["state"] for pair in (plain, taker)
        )  # torch makes lists of tuples
        assert_same("broadcast", given, taken)
    return num_set


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 0), (2, 3), pytest.param(2, 1, marks=pytest.mark.long)])
def test_every_option_both_ways(num_ranks: int, stage: int) -> None:
    for num_set in run_ranks(num_ranks, exchange, stage, num_ranks) if num_ranks > 1 else [exchange(0, stage, 1)]:
        assert num_set == (2 * len(SETTABLE) if num_ranks == 1 else 4)
