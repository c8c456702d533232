"""Adapters of PEFT on a base that is streamed: the same losses, a base that is never written again, PEFT's own files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.trainers import Tokens, assert_same, make_trainer, outcome, tiny_llama, train
from torch import nn
from transformers import LlamaForCausalLM

import zero_infinity as zi
from zero_infinity.integrations.peft import save_merged
from zero_infinity.integrations.transformers import STATES

CLIPS = {"max_grad_norm": 1e-2, "gradient_accumulation_steps": 4}
TARGETS = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS),
    "dora": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS, use_dora=True),
    "ia3": peft.IA3Config(task_type="CAUSAL_LM"),
    "head too": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS, modules_to_save=["lm_head"]),
}


def adapted(kind: str, **shape: Any) -> Any:
    model = tiny_llama(**shape)
    torch.manual_seed(1)
    return peft.get_peft_model(model, KINDS[kind])


@pytest.fixture
def tight(tmp_path: Path) -> zi.Config:
    swap = tmp_path / "swap"
    swap.mkdir()
    return zi.Config(memory="256KiB", nvme=swap)


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_adapters_is_the_same(kind: str, tight: zi.Config, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 2, **CLIPS}
    plain = train(tmp_path / "plain", None, model=adapted(kind), **changes)
    ours = train(tmp_path / "ours", tight, model=adapted(kind), **changes)
    assert_same(plain, ours)
    saved, expected = tmp_path / "ours" / "checkpoint-2", tmp_path / "plain" / "checkpoint-2"
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in saved.iterdir()} == names - {"optimizer.pt"} | {STATES}
    weights = peft.utils.load_peft_weights(str(saved), device="cpu")
    theirs = peft.utils.load_peft_weights(str(expected), device="cpu")
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(value, weights[name]) for name, value in theirs.items())
    resumed = train(tmp_path / "resumed", tight, model=adapted(kind), resume=saved, **CLIPS)
    assert all(torch.equal(value, resumed.weights[name]) for name, value in ours.weights.items())


def test_a_checkpoint_has_no_base(tight: zi.Config, tmp_path: Path) -> None:
    train(tmp_path, tight, model=adapted("lora"), max_steps=2, save_strategy="steps", save_steps=2)
    manifest = json.loads((tmp_path / "checkpoint-2" / STATES / "latest" / "manifest.json").read_text())
    assert "base_layer" not in json.dumps(manifest["tensors"])
    assert "lora_A" in json.dumps(manifest["tensors"])


@pytest.mark.parametrize("in_optimizer", [False, True], ids=["only adapters", "all parameters"])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_the_base_is_written_once(kind: str, in_optimizer: bool, tmp_path: Path) -> None:
    model: nn.Module = adapted(kind, hidden_size=64, intermediate_size=128, num_hidden_layers=4)
    frozen = {name.rpartition(".")[0] for name, p in model.named_parameters() if not p.requires_grad}
    base = sum(p.numel() * 4 for p in model.parameters() if not p.requires_grad)
    trained = [p for p in model.parameters() if p.requires_grad or in_optimizer]
    config = zi.Config(memory="300KiB", nvme=tmp_path, trace=tmp_path / "trace.json")
    model, optimizer = zi.prepare(model, torch.optim.AdamW(trained), config)
    moved = []
    for number in range(6):
        row = Tokens()[number]["input_ids"][None]
        model(input_ids=row, labels=row).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zi.synchronize(model)
        moved.append(zi.stats(model).bytes_read)
    writes = Counter(
        event["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if "write" in json.dumps(event)
    )
    assert writes
    assert {name: count for name, count in writes.items() if name in frozen and count > 1} == {}
    # Forward and backward each read what is not kept, and the adapters with their records come on top.
    records = sum(4096 * 3 for p in model.parameters() if p.requires_grad)
    assert 0 < moved[-1] - moved[-2] <= 2 * base + 3 * records


def test_adapters_are_merged_layer_by_layer(tight: zi.Config, tmp_path: Path) -> None:
    merged = []
    for config in (None, tight):
        trainer = make_trainer(tmp_path, config, model=adapted("lora"), max_steps=2)
        trainer.train()
        trainer.model.merge_adapter()
        merged.append(outcome(trainer).weights)
    assert all(torch.equal(value, merged[1][name]) for name, value in merged[0].items())


def test_what_is_trained_is_saved_without_the_rest(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)  # its bias is trained: one unit has both
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), zi.Config())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    folder = zi.save(tmp_path, model, optimizer, trained_only=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(zi.CheckpointError, match=r"only in the model \(1\): 0.weight"):
        zi.load(folder, model, optimizer)
    zi.load(folder, model, optimizer, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_are_saved_layer_by_layer_and_the_base_stays(kind: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    config = zi.Config(memory="300KiB", nvme=tmp_path)
    plain = make_trainer(tmp_path, None, model=adapted(kind, **shape), max_steps=2)
    ours = make_trainer(tmp_path, config, model=adapted(kind, **shape), max_steps=2)
    for trainer in (plain, ours):
        trainer.train()
    expected = plain.model.merge_and_unload().state_dict()
    before = outcome(ours).weights
    zi.synchronize(ours.model)
    written = zi.stats(ours.model).bytes_written
    save_merged(ours.model, tmp_path / "merged")
    zi.synchronize(ours.model)
    assert zi.stats(ours.model).memory_peak <= 300 << 10
    base = sum(p.nbytes for p in ours.model.parameters() if not p.requires_grad)
    # Blocks of adapters and their records may be evicted; no block of the base is written again.
    assert zi.stats(ours.model).bytes_written - written < base / 4
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in expected.items())
    assert all(torch.equal(value, before[name]) for name, value in outcome(ours).weights.items())


def test_what_cannot_be_merged_is_told(tmp_path: Path) -> None:
    with pytest.raises(zi.UsageError, match="has no adapters"):
        save_merged(tiny_llama(), tmp_path / "x")
    ours = make_trainer(tmp_path, zi.Config(), model=adapted("lora"), max_steps=1)
    ours.train()
    ours.model.merge_adapter()
    with pytest.raises(zi.UsageError, match="is merged already"):
        save_merged(ours.model, tmp_path / "x")


def test_a_model_without_its_adapters_is_exported(tmp_path: Path) -> None:
    """PEFT's own way: the adapters are gone from the model, and the engine still has them."""
    exported = []
    for config in (None, zi.Config(memory="256KiB", nvme=tmp_path)):
        trainer = make_trainer(tmp_path, config, model=adapted("lora"), max_steps=2)
        trainer.train()
        merged = trainer.model.merge_and_unload()
        folder = tmp_path / f"{config is None}"
        merged.save_pretrained(folder) if config is None else zi.export(folder, merged)
        exported.append(LlamaForCausalLM.from_pretrained(folder).state_dict())
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())
