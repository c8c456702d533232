"""A plan divides host memory as the engine does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import Hardware, load
from zero_infinity.planner.host_division import divide_host, stored_elements, unit_sizes
from zero_infinity.planner.model_shapes import transformer
from zero_infinity.planner.state_tiers import HomeTiers
from zero_infinity.planner.training_job import SINGLE, TrainingJob, Workload
from zero_infinity.policy.homes import Home
from zero_infinity.policy.memory_budget import SharedBuffers, place

MIB = 2**20
MODEL = transformer(12, 512, 8, 128)  # 38M parameters
JOB = TrainingJob(batch=1, states=SINGLE)


def workload(num_ranks: int = 1) -> Workload:
    return Workload(MODEL, replace(load("laptop"), devices_per_node=num_ranks), JOB)


def on_the_drive(hardware: Hardware) -> HomeTiers:
    drive = hardware.storage[0]
    return HomeTiers(drive, drive, hardware.host)


def test_one_rank_divides_as_prepare_does() -> None:
    one = workload()
    found = divide_host(MODEL, 1.0, one, on_the_drive(one.hardware), 200 * MIB)
    assert found.buffers == SharedBuffers()
    assert found.division == place(list(unit_sizes(MODEL, one).values()), 200 * MIB, [], nvme=True)
    assert found.fixed_bytes == found.division.resident + found.division.set_aside


def test_cpus_of_several_ranks_have_copies_and_buckets() -> None:
    two = workload(2)
    sizes = unit_sizes(MODEL, two)
    up, shard = sizes["0.up"], stored_elements(MODEL, two)["0.up"]
    assert shard == 4 * 512**2 // 2
    assert (up.parameters, up.record, up.gradients) == (4 * shard, 8 * shard, 4 * shard)
    assert (up.arriving, up.copied) == (3 * 4 * shard, 2 * 4 * shard)
    found = divide_host(MODEL, 1.0, two, on_the_drive(two.hardware), 200 * MIB)
    assert found.buffers.copies == 50 * MIB
    assert found.buffers.bucket == 3200 << 10
    assert found.division == place(list(sizes.values()), 200 * MIB - found.buffers.total, [], nvme=True)


def test_an_accelerator_gathers_in_its_own_memory() -> None:
    gpus = Workload(MODEL, load("dgx2"), JOB)
    up = unit_sizes(MODEL, gpus)["0.up"]
    assert up.copied == 0
    assert up.arriving == up.gradients


def test_what_lives_on_the_host_is_taken_off_first() -> None:
    one = workload()
    drive, host = one.hardware.storage[0], one.hardware.host
    homes = HomeTiers(parameters=host, optimizer=drive, checkpoints=host)
    found = divide_host(MODEL, 1.0, one, homes, 300 * MIB)
    assert found.division.resident >= 4 * MODEL.num_parameters
    assert found.fixed_bytes + found.division.cache <= 300 * MIB
    with pytest.raises(CapacityError, match=r"what lives in host memory takes 144.0 MiB .* memory is 100.0 MiB"):
        divide_host(MODEL, 1.0, one, homes, 100 * MIB)


def test_nothing_on_the_host_takes_nothing() -> None:
    gpus = Workload(MODEL, load("dgx2"), JOB)
    device = gpus.hardware.device
    assert device is not None
    found = divide_host(MODEL, 1.0, gpus, HomeTiers(device, device, device), MIB)
    assert (found.fixed_bytes, found.division.cache) == (0, 0)
    assert set(found.division.homes) == {Home.RAM}


def test_a_slice_has_its_share_of_the_cache() -> None:
    one = workload()
    whole = divide_host(MODEL, 1.0, one, on_the_drive(one.hardware), 240 * MIB)
    part = divide_host(MODEL.sliced(6), 2.0, one, on_the_drive(one.hardware), 240 * MIB)
    assert 2 * part.division.cache == pytest.approx(whole.division.cache, rel=0.15)
    with pytest.raises(CapacityError, match=r"(?s)than the 30.0 MiB of host memory.*fix:"):
        divide_host(MODEL.sliced(1), 12.0, one, on_the_drive(one.hardware), 30 * MIB)
