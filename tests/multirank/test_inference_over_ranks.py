"""Inference over ranks: the outputs of plain PyTorch, no gradients on the wire, and generation of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.rank_scripts import small_blocks
from support.ranks import run_ranks
from transformers import LlamaConfig, LlamaForCausalLM

import zero_infinity as zi


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompt(rank: int) -> torch.Tensor:
    return torch.randint(2, 100, (2, 5), generator=torch.Generator().manual_seed(rank))


def infer(rank: int, settings: list[dict[str, Any]]) -> list[bool]:
    """Each rank has its own prompts, and generates its own number of tokens."""
    small_blocks()
    torch.set_num_threads(1)
    asked = {"max_new_tokens": 4 + 3 * rank, "do_sample": False}
    plain = llama()
    expected = plain.generate(prompt(rank), **asked)
    right = []
    for setting in settings:
        model = zi.prepare(llama(), config=zi.Config(**setting))
        with torch.no_grad():
            same = all(torch.equal(model(prompt(rank)).logits, plain(prompt(rank)).logits) for _ in range(3))
        tokens = model.generate(prompt(rank), synced_gpus=True, **asked)
        zi.synchronize(model)
        kinds = set(zi.stats(model).sent_bytes)
        right += [same, torch.equal(tokens, expected), "gradient sum" not in kinds]
    return right


def test_every_stage_infers(tmp_path: Path) -> None:
    size = sum(p.nbytes for p in llama().parameters())
    settings = [{"stage": stage, "memory": "16MiB"} for stage in (0, 2, 3)]
    settings += [{"stage": 3, "memory": int(0.6 * size), "nvme": tmp_path}]
    for right in run_ranks(2, infer, settings):
        assert right == [True] * 12


def read(_: int, folder: Path, settings: list[dict[str, Any]]) -> list[bool]:
    """Read weights inside `zi.init`, where each rank keeps its shard."""
    small_blocks()
    torch.set_num_threads(1)
    plain = LlamaForCausalLM.from_pretrained(folder)
    right = []
    for setting in settings:
        config = zi.Config(**setting)
        with zi.init(config):
            model = LlamaForCausalLM.from_pretrained(folder)
        model = zi.prepare(model, config=config)
        with torch.no_grad():
            right.append(torch.equal(model(prompt(0)).logits, plain(prompt(0)).logits))
    return right


def test_pretrained_weights_are_read_by_every_rank(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    settings = [{"stage": stage, "memory": "16MiB"} for stage in (0, 3)]
    settings += [{"stage": 3, "memory": "1MiB", "nvme": tmp_path}]
    assert run_ranks(2, read, tmp_path, settings) == [[True] * 3] * 2
