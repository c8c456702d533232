"""What `zero-infinity train` trains, and on what: a model, its batches, and the losses of a step.

Bytes for the built-in GPT and models by their config; tokens of the model's own tokenizer for a folder with both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero_infinity.cli import hugging_face_shape
from zero_infinity.cli.ranks import Ranks
from zero_infinity.errors import ConfigError, UsageError
from zero_infinity.models import hugging_face_config, hugging_face_tokenizer, text
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.hugging_face_config import HuggingFaceConfig, reason
from zero_infinity.models.hugging_face_tokenizer import RowReader
from zero_infinity.models.presets import Shape
from zero_infinity.models.token_batches import JsonLines, TextWindows, TokenBatches
from zero_infinity.models.token_batches import Rows as TokenRows

_DEFAULT_SEQ = 256  # of a Hugging Face model on bytes
_DEFAULT_TOKENS = 1024  # at most, of a row
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class FineTune:
    """A Hugging Face folder with weights and a tokenizer, and what of it is trained."""

    folder: Path
    lora: int | None  # the rank of adapters; None: all weights
    lora_targets: tuple[str, ...]  # names of modules; empty: all linear ones
    everything: bool  # learn prompts, too


@dataclass(frozen=True, slots=True)
class DataJob:
    """Which data, in what batches."""

    paths: tuple[Path, ...]  # empty: the standard library's source
    seq: int | None
    batch: int
    seed: int


class Positioned(Protocol):
    """Endless batches that go on from a position."""

    position: int


class TrainWorkload(Protocol):
    """A model and its batches."""

    @property
    def batches(self) -> Positioned: ...
    @property
    def seq(self) -> int:
        """Tokens of a sequence, at most."""
        ...

    def describe(self) -> str:
        """How much data there is; the same on every rank."""
        ...

    def build(self) -> nn.Module: ...
    def losses(self, model: nn.Module, num_batches: int, ranks: Ranks) -> Iterator[Tensor]:
        """Yield what to call backward on, for each batch of a step; their sum over batches is this rank's loss."""
        ...


def make_workload(model: Shape | Path | FineTune, data: DataJob, ranks: Ranks) -> TrainWorkload:
    """Read and check everything that does not need the model's memory."""
    if isinstance(model, FineTune):
        return _Tokens(model, data, ranks)
    if isinstance(model, Shape):
        return _Bytes(model, model.seq, data, ranks)
    config = hugging_face_config.read_config(model)
    hugging_face_shape.check(config)
    limit = config.max_seq
    seq = data.seq or min(_DEFAULT_SEQ, limit or _DEFAULT_SEQ)
    return _Bytes(config, _checked(seq, limit, model), data, ranks)


def _checked(seq: int, limit: int | None, model: Path) -> int:
    if limit is not None and seq > limit:
        raise UsageError(f"--seq is {seq}, but {model} has positions for {limit}\n  fix:   --seq {limit}")
    return seq


class _Bytes:
    """Windows of bytes, all equally long."""

    def __init__(self, model: Shape | HuggingFaceConfig, seq: int, data: DataJob, ranks: Ranks) -> None:
        self._model = model
        self.seq = seq
        corpus = text.collect(data.paths) if data.paths else text.standard_library()
        self.batches = text.ByteBatches(corpus, data.batch, seq, data.seed, rank=ranks.rank, num_ranks=ranks.num_ranks)

    def describe(self) -> str:
        return f"{self.batches.text.num_bytes:,} bytes of text"

    def build(self) -> nn.Module:
        return ByteGPT(self._model) if isinstance(self._model, Shape) else self._model.build()

    def losses(self, model: nn.Module, num_batches: int, ranks: Ranks) -> Iterator[Tensor]:  # noqa: ARG002
        for _ in range(num_batches):
            inputs, targets = next(self.batches)
            if isinstance(self._model, Shape):
                yield model(inputs, targets) / num_batches
            else:
                yield hugging_face_config.loss_of(model, inputs) / num_batches


class _Tokens:
    """Rows or windows of text as tokens of the model's own tokenizer.

    The loss is the mean over all tokens that are learnt in a step, on all ranks: a short answer counts as little as it
    is long, wherever it is.
    """

    def __init__(self, job: FineTune, data: DataJob, ranks: Ranks) -> None:
        self._job = job
        if not data.paths:
            raise ConfigError("--model needs --data\n  fix:   --data FILE.jsonl, or text files")
        config = hugging_face_config.read_any_config(job.folder)
        tokenizer = hugging_face_tokenizer.read_tokenizer(job.folder)
        tokenizer.model_max_length = 1 << 62  # rows are cut here
        limit = config.max_seq
        self.seq = _checked(data.seq or min(_DEFAULT_TOKENS, limit or _DEFAULT_TOKENS), limit, job.folder)
        if self.seq < 2:
            raise UsageError("--seq is 1, but nothing predicts the first token\n  fix:   --seq 2 or more")
        self._rows = _rows(data.paths, job, tokenizer, self.seq)
        self.batches = TokenBatches(
            self._rows,
            data.batch,
            self.seq,
            tokenizer.pad_token_id,
            data.seed,
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
        )
        self.tokenizer = tokenizer

    def describe(self) -> str:
        return self._rows.describe()

    def build(self) -> nn.Module:
        transformers: Any = import_module("transformers")
        transformers.logging.disable_progress_bar()
        try:
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                self._job.folder, dtype=torch.float32, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{self._job.folder} cannot be read: {reason(error)}\n"
                "  fix:   a folder of a causal model with *.safetensors, as save_pretrained writes it"
            ) from None
        return self._with_adapters(model.train()) if self._job.lora is not None else model.train()

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            peft: Any = import_module("peft")
        except ImportError:
            raise ConfigError("--lora needs peft\n  fix:   pip install 'zero-infinity[integrations]'") from None
        rank = self._job.lora or 0
        targets: Any = list(self._job.lora_targets) or "all-linear"
        try:
            adapted: nn.Module = peft.get_peft_model(
                model, peft.LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=targets)
            )
        except ValueError as error:
            raise ConfigError(f"--lora-targets: {reason(error)}\n  fix:   names of the model's linear layers") from None
        return adapted

    def losses(self, model: nn.Module, num_batches: int, ranks: Ranks) -> Iterator[Tensor]:
        batches = [next(self.batches) for _ in range(num_batches)]
        by_rank = ranks.tell([float(sum(batch.num_learnt for batch in batches))])
        total = sum(number for (number,) in by_rank)
        if not total:
            raise ConfigError(
                f"no row of a step has anything to learn within {self.seq} tokens\n  fix:   --seq with a larger number"
            )
        for batch in batches:
            loss: Tensor = model(**batch.inputs, use_cache=False).loss
            yield loss * (batch.num_learnt * ranks.num_ranks / total)


def _rows(paths: tuple[Path, ...], job: FineTune, tokenizer: Any, length: int) -> TokenRows:
    lines = [path for path in paths if path.suffix in _JSON_LINES]
    if not lines:
        return TextWindows(text.collect(paths), tokenizer, length)
    if len(lines) < len(paths):
        raise ConfigError(
            f'--data has JSON lines ({lines[0]}) and text\n  fix:   one of both; text as rows of {{"text": ...}}'
        )
    rows = JsonLines(lines, RowReader(tokenizer, everything=job.everything))
    rows.row(0)  # a mistake in the form of the data is told now
    return rows
