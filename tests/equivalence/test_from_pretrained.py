"""`from_pretrained` inside `zi.init`: the same model as without it, within the budget."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import moved, on_device
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import zero_infinity as zi
from zero_infinity.params.offloaded_param import managed
from zero_infinity.params.unshard import store_of

_LAYERS = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
SAVED: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LAYERS)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**_LAYERS, tie_word_embeddings=True)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**_LAYERS, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=32)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    ),
}


def saved(name: str, folder: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    SAVED[name]().save_pretrained(folder / name, **settings)
    return folder / name


def stored_bytes(model: nn.Module) -> int:
    return sum(-(-p.nbytes // 4096) * 4096 for p in model.parameters())


def read_both(folder: Path, kind: Any, nvme: Path, **settings: Any) -> tuple[Any, Any, zi.Config]:
    """The plain model, and one read inside `zi.init` with half of its size in memory."""
    torch.manual_seed(1)
    plain = kind.from_pretrained(folder, **settings)
    config = zi.Config(memory=stored_bytes(plain) // 2, nvme=nvme)
    torch.manual_seed(1)
    with zi.init(config):
        model = kind.from_pretrained(folder, **settings)
    return plain, model, config


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("llama", LlamaForCausalLM, {}),
        ("llama", LlamaForCausalLM, {"dtype": torch.bfloat16}),
        ("tied", AutoModelForCausalLM, {"dtype": "auto"}),
        ("experts", MixtralForCausalLM, {}),
        ("gpt2", GPT2LMHeadModel, {}),
        ("gpt2", GPT2Model, {}),  # names have a prefix in the file
        ("t5", T5ForConditionalGeneration, {}),
        ("llama", LlamaForSequenceClassification, {}),  # a new head, initialised
    ],
)
def test_the_model_is_the_one_that_transformers_reads(
    name: str, kind: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    plain, model, _ = read_both(saved(name, tmp_path), kind, tmp_path, **settings)
    known = [managed(p) for p in model.parameters()]
    assert all(known)
    pool = store_of(known[0]).store.pool
    assert pool.peak_bytes <= pool.budget < stored_bytes(plain)
    expected, found = plain.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(found[key].dtype == value.dtype and torch.equal(found[key], value) for key, value in expected.items())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()], "tied otherwise"


def test_several_files_generate_and_train(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path, max_shard_size="100KB")
    assert len([*folder.glob("*.safetensors")]) > 2
    plain, model, config = read_both(folder, AutoModelForCausalLM, tmp_path)
    plain = moved(plain)
    model = zi.prepare(model, config=config)
    prompt = on_device(torch.randint(2, 96, (2, 5), generator=torch.Generator().manual_seed(1)))
    asked = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(prompt, **asked), plain.generate(prompt, **asked))

    roomy = zi.Config(memory="16MiB", nvme=tmp_path)
    with zi.init(roomy):
        model = AutoModelForCausalLM.from_pretrained(folder)
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), roomy)
    adamw = torch.optim.AdamW(plain.parameters())
    for _ in range(2):
        losses = [m(input_ids=prompt, labels=prompt).loss for m in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        optimizer.step()
        adamw.step()
        optimizer.zero_grad()
        adamw.zero_grad()
