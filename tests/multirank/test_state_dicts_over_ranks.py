"""State dicts between world sizes, several models, groups of some ranks, and models that are built in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.compare import assert_same
from support.multirank import (
    LEAST,
    Job,
    Plain,
    build,
    check,
    overflow,
    plain_part,
    prepared_part,
    run_jobs,
    run_plain,
    steps,
    two_models,
)
from support.ranks import run_ranks


@pytest.mark.parametrize(("model", "stage"), [("odds", 1), ("odds", 3), pytest.param("t5", 3, marks=pytest.mark.long)])
def test_state_dicts_of_two_ranks_in_one_and_in_three(model: str, stage: int, tmp_path: Path) -> None:
    first = Job(steps, model, settings={"stage": stage, "memory": "4MiB"})
    (saved, other), *_ = run_jobs([first], 2)
    plain = run_plain(first, 2)
    for result in (saved, other):
        assert_same("model.state_dict()", plain.state_dict, result.state_dict)
        assert_same("optimizer.state_dict()", plain.optimizer, result.optimizer)
    start = (saved.state_dict, saved.optimizer)
    for num_ranks in (1, 3):
        settings = {"stage": 3 - stage, "memory": LEAST, "nvme": tmp_path}
        check([Job(steps, model, settings=settings, start=start)], num_ranks)


def test_two_models_in_one_process(tmp_path: Path) -> None:
    for rank, results in enumerate(run_ranks(2, two_models, 2, tmp_path)):
        for job, result in zip((Job(steps, "mlp"), Job(steps, "odds", "sgd")), results, strict=True):
            assert_same(str(job), plain_part(run_plain(job, 2), rank), prepared_part(result))


@pytest.mark.parametrize("group", ["subgroup", "mesh"])
def test_some_of_the_ranks(group: str, tmp_path: Path) -> None:
    """A group of ranks 0 and 2 of three, then all three; two groups of two, which train the same."""
    num_ranks = 3 if group == "subgroup" else 4
    jobs = [
        Job(steps, settings={"stage": 3, "memory": "4MiB"}, group=group),
        Job(steps, settings={"stage": 1, "memory": "4MiB", "nvme": tmp_path}, group=group),
        Job(steps, settings={"stage": 3, "memory": "4MiB"}),
    ]
    by_job = run_jobs(jobs, num_ranks)
    plain = run_plain(jobs[0], 2)
    for results in by_job[:2]:
        for rank, result in enumerate(results):
            if group == "subgroup" and rank == 1:
                assert result is None
            else:
                assert_same(f"{group}, rank {rank}", plain_part(plain, rank // 2), prepared_part(result))
    whole = run_plain(jobs[2], num_ranks)
    for rank, result in enumerate(by_job[2]):
        assert_same(f"all, rank {rank}", plain_part(whole, rank), prepared_part(result))


def test_an_overflow_of_one_rank_is_every_ranks(tmp_path: Path) -> None:
    every = [
        {"stage": stage, "memory": "2MiB", "param_dtype": "float16", "compute_dtype": "float16"} for stage in range(4)
    ]
    by_rank = run_ranks(3, overflow, 3, every)
    for outcomes in by_rank:
        for after, scale, num_skipped in outcomes:
            assert num_skipped == 1
            assert scale == 2.0**15
            assert_same("weights after the step that was skipped", after[0], after[1])
            assert not torch.equal(after[1]["0.weight"], after[2]["0.weight"])
            assert_same("weights", by_rank[0][0][0], after)


@pytest.mark.parametrize("model", ["gpt2", pytest.param("t5", marks=pytest.mark.long)])
def test_models_that_are_built_in_parts(model: str, tmp_path: Path) -> None:
    every = [
        {"stage": 3, "memory": "500KiB", "nvme": tmp_path},
        {"stage": 3, "memory": "4MiB"},
        {"stage": 1, "memory": "500KiB", "nvme": tmp_path},
    ]
    job = Job(steps, model)
    plain, start = run_plain(job, 2), Plain(job, 2)
    values = {name: p.detach() for name, p in start.model.named_parameters()}
    for rank, outcomes in enumerate(run_ranks(2, build, 2, model, every)):
        for built, result, stats in outcomes:
            assert_same("values as built", values, built)
            assert_same(f"{model}, rank {rank}", plain_part(plain, rank), prepared_part(result))
            assert stats.memory_peak <= stats.memory_budget
            assert stats.bytes_read or not stats.swap_bytes
