"""The numbers of a prepared model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_infinity as zi
from zero_infinity.api import engine_of
from zero_infinity.comm.channel import Traffic
from zero_infinity.engine import TrainingEngine
from zero_infinity.engine_stats import Stats, collect_stats


def prepare(nvme: Path | None) -> tuple[nn.Module, TrainingEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False))
    config = zi.Config(memory="8MiB", nvme=nvme)
    model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), momentum=0.9), config)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    zi.synchronize(model)
    return model, engine_of(model)


def collect(engine: TrainingEngine, *traffics: Traffic, activation_bytes: int = 0) -> Stats:
    return collect_stats(
        engine.parameter_store,
        engine._layout,
        num_steps=1,
        traffics=traffics,
        activation_bytes=activation_bytes,
        bytes_read_directly=11,
        device_budget=222,
        device_others=33,
    )


def test_what_a_model_has_at_home_is_counted_by_kind() -> None:
    _model, engine = prepare(None)
    stats = collect(engine, activation_bytes=12345)
    assert stats.num_parameters == 64 * 64 + 64 + 8 * 64
    assert stats.parameter_bytes >= 4 * stats.num_parameters
    assert stats.optimizer_bytes >= 4 * stats.num_parameters, "momentum"
    assert stats.state_bytes == stats.parameter_bytes + stats.optimizer_bytes
    assert stats.activation_bytes == 12345
    assert (stats.bytes_read_directly, stats.device_budget, stats.device_others) == (11, 222, 33)
    assert stats.num_steps == 1
    assert stats.pending_updates == 0


def test_memory_is_what_the_pool_says() -> None:
    _model, engine = prepare(None)
    stats, pool = collect(engine), engine.parameter_store.store.pool
    assert stats.memory_budget == pool.budget == 8 << 20
    assert 0 < stats.memory_held == pool.held_bytes <= stats.memory_peak <= stats.memory_budget


def test_without_nvme_nothing_is_read_or_written() -> None:
    _model, engine = prepare(None)
    stats = collect(engine)
    assert (stats.bytes_read, stats.bytes_written, stats.read_requests, stats.write_requests) == (0, 0, 0, 0)
    assert (stats.swap_bytes, stats.io_busy_seconds) == (0, 0.0)


def test_the_counters_of_the_drive_are_passed_on(tmp_path: Path) -> None:
    _model, engine = prepare(tmp_path)
    io = engine.parameter_store.store.engine
    assert io is not None
    stats, counters = collect(engine), io.counters()
    assert (stats.bytes_read, stats.bytes_written) == (counters.bytes_read, counters.bytes_written)
    assert (stats.read_requests, stats.write_requests) == (counters.read_requests, counters.write_requests)


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_waits_are_those_of_the_computing_thread(seconds: float) -> None:
    _model, engine = prepare(None)
    before = collect(engine).waited_seconds
    engine.parameter_store.compute_thread.waited_seconds += seconds
    assert collect(engine).waited_seconds == before + seconds


def test_the_traffic_of_several_groups_is_told_by_kind() -> None:
    _model, engine = prepare(None)
    ranks, replicas = Traffic(), Traffic()
    ranks.add("gradient sum", 100)
    ranks.add("gradient sum", 20)
    replicas.add("activations", 3)
    stats = collect(engine, ranks, replicas)
    assert stats.sent_bytes == {"gradient sum": 120, "activations": 3}
    assert stats.num_exchanges == {"gradient sum": 2, "activations": 1}
    replicas.add("gradient sum", 5)
    assert collect(engine, ranks, replicas).sent_bytes["gradient sum"] == 125, "both groups have sent of this kind"
    alone = collect(engine)
    assert (alone.sent_bytes, alone.num_exchanges) == ({}, {})


def test_where_the_states_are_is_said_in_words() -> None:
    _model, engine = prepare(None)
    stats = collect(engine)
    assert stats.homes == "100% RAM"
    shares = {"device_state_bytes": 5, "ram_state_bytes": 55, "nvme_state_bytes": 40, "state_bytes": 100}
    assert dataclasses.replace(stats, **shares).homes == "5% device, 55% RAM, 40% NVMe"


def test_a_notebook_shows_what_is_not_zero_with_units(tmp_path: Path) -> None:
    _model, engine = prepare(tmp_path)
    traffic = Traffic()
    traffic.add("gather", 2048)
    shown = collect(engine, traffic)._repr_html_()
    assert "<tr><th>memory_budget</th><td>8.0 MiB</td></tr>" in shown
    assert "<tr><th>num_parameters</th><td>4,672</td></tr>" in shown
    assert "<tr><th>sent_bytes</th><td>gather 2.0 KiB</td></tr>" in shown
    assert "homes: 100% RAM" in shown
    assert "pending_updates" not in shown
