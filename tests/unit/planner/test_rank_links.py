from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.planner.hardware import load
from zero_infinity.planner.model_shapes import known
from zero_infinity.planner.plan_inputs import prepare
from zero_infinity.planner.rank_links import RankLinks
from zero_infinity.planner.training_job import PartitionMode, TrainingJob
from zero_infinity.trace import Category

GB = 10**9
DGX2 = load("dgx2")
JOB = TrainingJob(batch=1)


def links(job: TrainingJob = JOB) -> RankLinks:
    return RankLinks(prepare(known("zi-10b"), DGX2, job))


def test_a_node_s_devices_share_the_link_to_the_host() -> None:
    shared = links().upload("a", Category.FETCH, 0.0, GB, 16 * GB) - DGX2.host.latency
    assert shared == pytest.approx(16 * GB / DGX2.host.read)
    alone = links(replace(JOB, devices_per_node=1)).upload("a", Category.FETCH, 0.0, GB, GB) - DGX2.host.latency
    assert alone == pytest.approx(GB / DGX2.host.one_device)


def test_an_owner_sends_everything_over_its_own_link() -> None:
    owned = links(replace(JOB, partition=PartitionMode.OWNER)).download("a", Category.GRADIENT, 0.0, GB, 16 * GB)
    assert owned - DGX2.host.latency == pytest.approx(16 * GB / DGX2.host.one_device)


def test_each_rank_receives_all_parts_but_its_own() -> None:
    found = links()
    seconds = found.collective("a", 1.0, GB) - 1.0 - DGX2.link_latency
    assert seconds == pytest.approx(15 * GB / DGX2.gather_link(1))
    assert links(replace(JOB, devices_per_node=1)).collective("a", 1.0, GB) == 1.0


def test_checkpoints_on_the_device_do_not_move() -> None:
    job = replace(JOB, offload_checkpoints=False)
    assert links(job).store_checkpoint("a", 2.0, cached=False) == 2.0
    moved = links(replace(JOB, offload_checkpoints=True))
    assert moved.store_checkpoint("a", 2.0, cached=False) > 2.0
    assert moved.load_checkpoint("a", 2.0, cached=False) > 2.0
