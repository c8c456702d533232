"""Folders as `save_pretrained` writes them, of a prepared model: weights are streamed, adapters stay small.

Shared by the integrations; knows nothing of trainers.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch
from torch import nn

from zero_infinity import api
from zero_infinity.checkpoint.export import export_checkpoint
from zero_infinity.checkpoint.weight_files import INDEX

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def has_adapters(model: nn.Module) -> bool:
    """True if PEFT has put adapters into the model: these are what is saved."""
    return hasattr(model, "peft_config")


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of what adapters train, for `save_pretrained(state_dict=...)`; on every rank.

    Without adapters nothing: then it writes what belongs in the folder besides the weights.
    """
    if not has_adapters(model):
        return {}
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def write_weights(model: nn.Module, folder: Path, states: Path | None = None) -> None:
    """Write a prepared model's weights into an existing folder, in place of those that are there; on every rank.

    `states`: a checkpoint with the same weights, if there is one.
    """
    floating = {p.dtype for p in model.parameters() if p.is_floating_point()}
    dtype = floating.pop() if len(floating) == 1 else None
    aside = folder / ".weights"
    ranks = api.engine_of(model).ranks
    is_first = ranks is None or ranks.rank == 0
    if is_first and aside.exists():
        shutil.rmtree(aside)  # of a run that was killed here
    if states is None:
        api.export(aside, model, dtype=dtype)
    elif is_first:
        export_checkpoint(states, aside, dtype=dtype, model=model)
    if is_first:
        _replace_weights(folder, aside)


def _replace_weights(folder: Path, fresh: Path) -> None:
    """Move the weights of the folder `fresh` into `folder`, in place of those that are there."""
    for path in folder.iterdir():
        if _WEIGHTS.fullmatch(path.name):
            path.unlink()
    weights = [path for path in fresh.iterdir() if _WEIGHTS.fullmatch(path.name)]
    for path in sorted(weights, key=lambda path: path.name == INDEX):
        os.rename(path, folder / path.name)
    shutil.rmtree(fresh)
