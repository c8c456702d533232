from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from support.effort import num_calls

from zero_infinity.errors import CapacityError, ConfigError
from zero_infinity.planner import plan_inputs as setups
from zero_infinity.planner import simulator as simulators
from zero_infinity.planner.hardware import Hardware, HardwareTier, TierKind, load
from zero_infinity.planner.model_shapes import ModelShape, known, transformer
from zero_infinity.planner.outcome import SimulatedStep
from zero_infinity.planner.plan_inputs import prepare
from zero_infinity.planner.simulator import Simulator, simulate
from zero_infinity.planner.training_job import SINGLE, HomeRule, PartitionMode, TrainingJob
from zero_infinity.trace import Category, Trace

GB = 10**9
MODEL = transformer(12, 512, 8, 128)  # 38M parameters, 150 MB in float32


def machine(**changes: Any) -> Hardware:
    """A CPU with a drive; every figure is round."""
    ram = HardwareTier("RAM", TierKind.HOST, GB, 10e9, 10e9, 10e9, 0.0)
    drive = HardwareTier("NVMe", TierKind.STORAGE, 100 * GB, 2e9, 2e9, 2e9, 0.0, endurance=10**15)
    plain = Hardware("test", "test", 1, 1e12, float("inf"), float("inf"), 0.0, 1e15, (ram, drive), {})
    return replace(plain, **changes)


def with_drive(bytes_per_second: float) -> Hardware:
    ram, drive = machine().tiers
    return machine(
        tiers=(ram, replace(drive, read=bytes_per_second, write=bytes_per_second, one_device=bytes_per_second))
    )


def run(hardware: Hardware, job: TrainingJob, model: ModelShape = MODEL, trace: Trace | None = None) -> SimulatedStep:
    return simulate(prepare(model, hardware, job), trace)


def test_nothing_moves_when_everything_fits() -> None:
    outcome = run(machine(), TrainingJob(batch=4, states=SINGLE, memory=800_000_000))
    assert (outcome.read_bytes, outcome.written_bytes, outcome.wait_seconds) == (0, 0, 0.0)
    # Forward, again, and twice for backward; attention's scores besides the parameters' products.
    assert outcome.flops == pytest.approx(4 * MODEL.forward_flops(4 * 128))
    assert outcome.seconds == pytest.approx(outcome.flops / 1e12, rel=1e-3)


def test_a_slow_drive_is_the_bottleneck_and_sets_the_time() -> None:
    outcome = run(with_drive(1e8), TrainingJob(batch=1, states=SINGLE, memory=200_000_000))
    moved = outcome.read_bytes + outcome.written_bytes
    assert moved > 3e8
    assert outcome.bottleneck == "NVMe"
    assert outcome.seconds == pytest.approx(moved / 1e8, rel=0.05)


def test_a_fast_drive_hides_behind_computing() -> None:
    outcome = run(with_drive(1e11), TrainingJob(batch=16, states=SINGLE, memory=200_000_000))
    assert outcome.read_bytes > 0
    assert outcome.wait_seconds < 0.02 * outcome.seconds


def test_every_state_that_is_not_kept_moves_once() -> None:
    memory = 200_000_000
    outcome = run(machine(), TrainingJob(batch=1, states=SINGLE, memory=memory))
    states = 12 * MODEL.num_parameters
    assert (states - memory) * 0.8 < outcome.read_bytes < 1.5 * states
    # All but what stays in memory from one step to the next is written.
    assert outcome.written_bytes <= outcome.read_bytes


@pytest.mark.parametrize("memory", [120_000_000, 200_000_000, 400_000_000])
def test_memory_is_never_more_than_the_budget(memory: int) -> None:
    outcome = run(machine(), TrainingJob(batch=1, states=SINGLE, memory=memory))
    assert 0 < outcome.peak_bytes["RAM"] <= memory


def test_more_memory_moves_less() -> None:
    moved = [
        run(machine(), TrainingJob(batch=1, states=SINGLE, memory=memory)).read_bytes
        for memory in (120_000_000, 200_000_000, 300_000_000, 400_000_000)
    ]
    assert moved == sorted(moved, reverse=True)


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(CapacityError, match="memory"):
        run(machine(), TrainingJob(batch=1, states=SINGLE, memory=500_000))


def test_overlap_and_early_updates_only_help() -> None:
    job = TrainingJob(batch=1, memory=GB // 2, num_nodes=2)
    hardware = replace(load("rtx4090"), cluster_link=5e9)
    model = known("gpt2-1.5b")
    best, late, worst = (
        run(hardware, replace(job, **changes), model).seconds
        for changes in ({}, {"early_update": False}, {"early_update": False, "overlap": False})
    )
    assert best < late < worst


def test_the_same_job_gives_the_same_outcome() -> None:
    job = TrainingJob(batch=1, states=SINGLE, memory=200_000_000)
    assert run(machine(), job) == run(machine(), job)


def test_all_links_are_faster_than_the_owner_s() -> None:
    model = transformer(10, 4096, 32, 1024)
    job = TrainingJob(batch=1, num_nodes=4, placement=HomeRule.PAPER, parameters_on="CPU", optimizer_on="CPU")
    split, owned = (
        run(load("dgx2"), replace(job, partition=p), model) for p in (PartitionMode.ALL, PartitionMode.OWNER)
    )
    assert split.seconds < owned.seconds
    busy = [next(t.busy_seconds for t in o.traffic if t.link == "CPU to device") for o in (split, owned)]
    # 64 GPUs with 3 GB/s each against one with 12 GB/s.
    assert busy[1] / busy[0] == pytest.approx(64 * 3 / 12, rel=0.01)


def test_a_node_s_devices_share_its_drives() -> None:
    model = transformer(10, 4096, 32, 1024)
    job = TrainingJob(batch=1, memory=40 * GB, parameters_on="NVMe", optimizer_on="NVMe", early_update=False)
    seconds = {}
    for devices in (1, 16):
        outcome = run(load("dgx2"), replace(job, devices_per_node=devices), model)
        moved = outcome.read_bytes + outcome.written_bytes
        busy = next(t.busy_seconds for t in outcome.traffic if t.link == "NVMe")
        seconds[devices] = busy / moved
    assert seconds[1] == pytest.approx(1 / 12e9, rel=0.01)
    assert seconds[16] == pytest.approx(1 / 1.6e9, rel=0.01)


def test_a_slice_stands_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = transformer(48, 1024, 16, 256)
    job = TrainingJob(batch=1, num_nodes=2, memory=GB)
    hardware = replace(load("rtx4090"), cluster_link=5e9)
    whole = run(hardware, job, model)
    monkeypatch.setattr(setups, "MAX_UNITS", 50)
    part = prepare(model, hardware, job)
    assert len(part.units) <= 50
    sliced = simulate(part)
    assert sliced.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert sliced.read_bytes == pytest.approx(whole.read_bytes, rel=0.06)
    assert sliced.flops == pytest.approx(whole.flops, rel=0.001)


def test_coarser_chunks_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    job = TrainingJob(batch=1, states=SINGLE, memory=200_000_000)
    fine = run(with_drive(3e8), job)
    monkeypatch.setattr(simulators, "_MAX_CHUNKS", 60)
    assert run(with_drive(3e8), job).seconds == pytest.approx(fine.seconds, rel=0.05)


def test_checkpoints_on_the_host_cost_their_traffic() -> None:
    model = transformer(5, 2048, 16, 1024)
    job = TrainingJob(batch=4, placement=HomeRule.PAPER)
    kept, offloaded = (run(load("dgx2"), replace(job, offload_checkpoints=o), model) for o in (False, True))
    assert kept.seconds < offloaded.seconds < 1.2 * kept.seconds
    sent = {t.link: t.num_bytes for t in offloaded.traffic}["device to CPU"]
    assert sent == 5 * 2 * 4 * 1024 * 2048


def test_the_trace_shows_the_step() -> None:
    trace = Trace()
    outcome = run(with_drive(3e8), TrainingJob(batch=1, states=SINGLE, memory=200_000_000), trace=trace)
    spans = list(trace.spans)
    lanes = {
        lane: sorted((s.start, s.start + s.seconds) for s in spans if s.lane == lane)
        for lane in {s.lane for s in spans}
    }
    assert {"compute", "NVMe", "update"} <= set(lanes)
    for lane in lanes.values():
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(lane))
    moved = sum(s.num_bytes for s in spans if s.category in (Category.FETCH, Category.WRITE_BACK))
    assert moved == 2 * (outcome.read_bytes + outcome.written_bytes)  # two steps, alike
    waited = sum(s.seconds for s in spans if s.category == Category.WAIT)
    assert waited == pytest.approx(2 * outcome.wait_seconds, rel=0.01)
    assert max(sample.num_bytes for sample in trace.samples) <= outcome.peak_bytes["RAM"]


def test_a_hundred_trillion_parameters_take_seconds() -> None:
    """Five million calls, which take one core some seconds."""
    outcomes = []
    calls = num_calls(lambda: outcomes.append(run(load("dgx2"), TrainingJob(batch=2, num_nodes=96), known("zi-100t"))))
    assert calls < 7_000_000
    (outcome,) = outcomes
    assert outcome.num_ranks == 1536
    assert outcome.flops * 1536 > 4 * 2 * 1e14 * 2 * 1024 * 1536


def test_impossible_jobs_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch is 0"):
        TrainingJob(batch=0)
    with pytest.raises(ConfigError, match="nodes is 0"):
        TrainingJob(batch=1, num_nodes=0)
    with pytest.raises(ConfigError, match="interval is -1"):
        TrainingJob(batch=1, interval=-1)
    with pytest.raises(ConfigError, match="gpus is 17, but a node of DGX-2"):
        run(load("dgx2"), TrainingJob(batch=1, devices_per_node=17))
    with pytest.raises(ConfigError, match="has no tier 'tape'; there are: GPU, CPU, NVMe"):
        run(load("dgx2"), TrainingJob(batch=1, optimizer_on="tape"))
    with pytest.raises(ConfigError, match=r"memory is 1\.8 TiB, but RAM of test has"):
        run(machine(), TrainingJob(batch=1, memory=2 * 10**12))
    with pytest.raises(CapacityError, match="one device needs"):
        run(load("rtx4090"), TrainingJob(batch=64), known("gpt3-13b"))


def test_many_backward_passes_are_extrapolated_from_a_few() -> None:
    job = TrainingJob(batch=1, states=SINGLE, memory=64 << 20, accumulation=9)
    inputs = prepare(transformer(6, 512, 8, 64), load("laptop"), job)
    whole, quick = Simulator(inputs).run(), simulate(inputs)
    assert quick.tokens == whole.tokens
    assert quick.compute_seconds == pytest.approx(whole.compute_seconds)
    assert quick.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert whole.read_bytes > 0
    assert quick.read_bytes == pytest.approx(whole.read_bytes, rel=0.02)
