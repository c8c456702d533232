"""`train --output DIR`: what was trained, as a folder that transformers or PEFT reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zero_infinity import api
from zero_infinity.checkpoint.io_thread_pool import Progress
from zero_infinity.cli.train_workload import FineTune
from zero_infinity.errors import ConfigError
from zero_infinity.models.hugging_face_tokenizer import read_tokenizer


def check_output(directory: Path) -> None:
    """Raise now, not after the last step, if the folder has anything in it."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"--output {directory} exists and is not empty\n  fix:   a new folder")


def write_folder(directory: Path, model: nn.Module, source: object, progress: Progress | None) -> None:
    """Write the weights, or only the adapters; on every rank. `source`: what the model was made from."""
    ranks = api.engine_of(model).ranks
    is_first = ranks is None or ranks.rank == 0
    if isinstance(source, FineTune) and source.lora is not None:
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        adapted: Any = model
        if is_first:
            adapted.save_pretrained(directory, state_dict=trained)
    else:
        api.export(directory, model, progress=progress)
    if is_first and isinstance(source, FineTune):
        read_tokenizer(source.folder).save_pretrained(directory)
