from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.planner.hardware import load
from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.training_job import MIXED, TrainingJob, Workload

MODEL = transformer(4, 512, 8, 128)


def test_ranks_are_all_devices_that_take_part() -> None:
    assert Workload(MODEL, load("dgx2"), TrainingJob(batch=1, num_nodes=3)).num_ranks == 48
    assert Workload(MODEL, load("dgx2"), TrainingJob(batch=1, num_nodes=3, devices_per_node=4)).num_ranks == 12
    with pytest.raises(ConfigError, match="gpus is 17, but a node of .* has 16"):
        Workload(MODEL, load("dgx2"), TrainingJob(batch=1, devices_per_node=17))


def test_only_cpus_of_several_ranks_gather_on_the_host() -> None:
    laptop = load("laptop")
    assert not Workload(MODEL, laptop, TrainingJob(batch=1)).gathers_on_host
    assert Workload(MODEL, replace(laptop, devices_per_node=2), TrainingJob(batch=1)).gathers_on_host
    assert not Workload(MODEL, load("dgx2"), TrainingJob(batch=1)).gathers_on_host


def test_shards_are_padded_to_whole_grains() -> None:
    workload = Workload(MODEL, load("dgx2"), TrainingJob(batch=1))
    assert [workload.shard_elements(size) for size in (1, 1024, 1025, 16 * 64 * 10)] == [64, 64, 128, 640]


def test_activation_checkpoints_are_the_inputs_of_blocks() -> None:
    job = TrainingJob(batch=2, states=MIXED)
    workload = Workload(MODEL, load("laptop"), job)
    assert workload.one_checkpoint_bytes == 2 * 2 * 128 * 512
    assert workload.checkpoint_bytes == 4 * workload.one_checkpoint_bytes
    everything = Workload(MODEL, load("laptop"), replace(job, interval=0))
    assert everything.checkpoint_bytes == 0
    assert everything.working_bytes == 4 * workload.working_bytes
