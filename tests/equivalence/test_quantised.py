"""Quantised weights are streamed, never written, and training is the same bits."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.quantised import KINDS, WIDTH, adapted, base_bytes, sgd, train
from support.ranks import run_ranks
from torch import nn

import zero_infinity as zi
from zero_infinity.params.packed_tensor import PackedTensor

TIGHT = 256 << 10  # two of the layers


def prepared(kind: str, **settings: Any) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = adapted(kind)
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(**{"memory": TIGHT, **settings}))
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_the_same_and_the_base_is_written_once(kind: str, tmp_path: Path) -> None:
    plain = adapted(kind)
    expected = train(plain, sgd(plain))
    model, optimizer = prepared(kind, nvme=tmp_path, trace=tmp_path / "trace.json")
    assert train(model, optimizer, 4) == expected[:4]
    zi.synchronize(model)
    before = zi.stats(model)
    assert train(model, optimizer) is not None
    zi.synchronize(model)
    after = zi.stats(model)
    base = base_bytes(model)
    assert after.memory_peak <= TIGHT < base
    # Forward and backward of five steps each read what is not kept; adapters are small, and kept in RAM.
    assert base < (after.bytes_read - before.bytes_read) / 5 <= 2 * base
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    writes = Counter(event["name"] for event in events if "write" in json.dumps(event))
    base = {name: count for name, count in writes.items() if ".base" in name}
    assert len(base) >= 4
    assert set(base.values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inside_init", [False, True])
def test_a_model_stays_what_it_is(kind: str, inside_init: bool, tmp_path: Path) -> None:
    plain = adapted(kind)
    config = zi.Config(memory=TIGHT, nvme=tmp_path)
    with zi.init(config) if inside_init else nullcontext():
        model = adapted(kind)
    before = {name: (p, type(p), p.shape, p.dtype) for name, p in model.named_parameters()}
    model, optimizer = zi.prepare(model, sgd(model), config)
    assert zi.stats(model).memory_peak <= TIGHT
    for name, p in model.named_parameters():
        known, kind_before, shape, dtype = before[name]
        assert p is known
        assert isinstance(p, kind_before)
        assert (p.shape, p.dtype) == (shape, dtype)
    x = torch.randn(2, WIDTH)
    assert train(model, optimizer) == train(plain, sgd(plain))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    if kind == "subclass":
        return  # it can neither be copied nor compared
    state = model.state_dict()
    assert not any(isinstance(value, PackedTensor) for value in state.values())
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())
    copied = copy.deepcopy(model)
    assert not any(isinstance(value, PackedTensor) for value in (*copied.parameters(), *copied.buffers()))
    with torch.no_grad():
        assert torch.equal(copied(x), plain(x))
        for value in plain.state_dict().values():
            value.zero_()
    model.load_state_dict(plain.state_dict())
    assert not any(value.any() for value in model.state_dict().values())


def test_edits_are_kept(tmp_path: Path) -> None:
    model, _ = prepared("state", nvme=tmp_path)
    weight = model[0].base.weight
    expected = weight.to(torch.int16)
    with torch.no_grad():
        weight[0].zero_()
        weight.data[1, ::2] = 7
        weight[2:4].copy_(weight[4:6])
    expected[0], expected[1, ::2], expected[2:4] = 0, 7, expected[4:6].clone()
    train(model, torch.optim.SGD([torch.zeros(1, requires_grad=True)]), 0)
    with torch.no_grad():
        for layer in model:  # until the first one has left memory
            layer(torch.ones(1, WIDTH))
    assert torch.equal(weight.to(torch.int16), expected)
    weight.data = torch.ones(WIDTH, WIDTH, dtype=torch.int8)
    assert (weight == 1).all()
    with pytest.raises(zi.UsageError, match=r"(?s)replaced by one of shape \(2, 2\).*before zi.prepare"):
        weight.data = torch.ones(2, 2)
    with pytest.raises(zi.UsageError, match="cannot be pickled"):
        pickle.dumps(weight)


def test_checkpoints_have_the_base_unless_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    model, optimizer = prepared("state", nvme=tmp_path)
    train(model, optimizer, 2)
    whole = zi.save(tmp_path / "whole", model, optimizer)
    trained = zi.save(tmp_path / "trained", model, optimizer, trained_only=True)
    expected = train(model, optimizer, 2)
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in (whole, trained)]
    assert sizes[0] - sizes[1] > base_bytes(model)
    for folder, strict in ((whole, True), (trained, False)):
        again, its_optimizer = prepared("state", nvme=tmp_path)
        if strict:
            with torch.no_grad():
                again[1].base.weight.zero_()
        zi.load(folder, again, its_optimizer, strict=strict)
        assert train(again, its_optimizer, 2) == expected
    with pytest.raises(zi.UsageError, match=r"(?s)'0.base.quantised'.*from_pretrained cannot read.*fix:"):
        zi.export(tmp_path / "exported", model)


def test_inference_keeps_what_fits(tmp_path: Path) -> None:
    plain = adapted("state")
    model = zi.prepare(adapted("state"), config=zi.Config(memory="360KiB", nvme=tmp_path))
    moved = []
    for number in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        moved.append(zi.stats(model).bytes_read)
    assert 0 < moved[-1] - moved[-2] < base_bytes(model)
    streamed = dict(zi.stream_weights(model))
    assert all(torch.equal(value, streamed[name]) for name, value in plain.named_parameters())


def test_a_budget_of_device_memory(tmp_path: Path) -> None:
    plain = adapted("state")
    expected = train(plain, sgd(plain))
    model = adapted("state")
    device = zi.EmulatedAccelerator(TIGHT)
    model, optimizer = zi.prepare(model, sgd(model), zi.Config(memory="1MiB", nvme=tmp_path), device=device)
    assert train(model, optimizer) == expected


def on_a_rank(_: int, folder: Path) -> list[list[float]]:
    """Ranks with the same data: the mean of their gradients is each one's."""
    losses = []
    for stage, memory in ((0, "4MiB"), (3, "1MiB")):
        config = zi.Config(memory=memory, nvme=folder, stage=stage)
        with zi.init(config):
            model = adapted("state")
        model, optimizer = zi.prepare(model, sgd(model), config)
        losses.append(train(model, optimizer))
    return losses


def test_two_ranks(tmp_path: Path) -> None:
    plain = adapted("state")
    expected = train(plain, sgd(plain))
    for losses in run_ranks(2, on_a_rank, tmp_path):
        assert losses == [expected, expected]
