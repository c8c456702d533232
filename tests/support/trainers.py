"""Tiny models trained by the trainers of other libraries, with and without zero_infinity."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate.state import GradientState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

import zero_infinity as zi
from zero_infinity.integrations.accelerate import Accelerator
from zero_infinity.integrations.transformers import ZeroInfinityTrainer

VOCABULARY = 64
# Figures that depend on the clock or are ours.
_NOT_COMPARED = ("runtime", "per_second", "zi_", "total_flos")
os.environ.setdefault("TQDM_DISABLE", "1")
transformers.logging.set_verbosity_error()


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **settings | changes))


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random rows, the same in every process."""

    def __init__(self, num_rows: int = 10, length: int = 12) -> None:
        self._num_rows, self._length = num_rows, length

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        row = torch.randint(0, VOCABULARY, (self._length,), generator=generator)
        return {"input_ids": row, "labels": row}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run leaves behind."""

    logs: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]


class _Logs(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        self.seen.append({k: v for k, v in logs.items() if not any(part in k for part in _NOT_COMPARED)})


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a `TrainingArguments` for a run of five steps an epoch."""
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "seed": 3,
        "save_strategy": "no",
    }
    return settings | changes


def make_trainer(
    folder: Path,
    config: zi.Config | None,
    *,
    model: nn.Module | None = None,
    kind: type = ZeroInfinityTrainer,
    **changes: Any,
) -> Any:
    """A trainer of a tiny model. `config`: None for transformers' own."""
    ours = {"zero_infinity": config} if config is not None else {}
    made = (kind if config is not None else transformers.Trainer)(
        model or tiny_llama(),
        TrainingArguments(**arguments(folder, **changes)),
        train_dataset=Tokens(),
        eval_dataset=Subset(Tokens(), range(4)),
        callbacks=[_Logs()],
        **ours,
    )
    made.remove_callback(PrinterCallback)
    return made


def outcome(trainer: Any) -> Trained:
    logs = next(c for c in trainer.callback_handler.callbacks if isinstance(c, _Logs))
    return Trained(logs.seen, {name: value.clone() for name, value in trainer.model.state_dict().items()})


def train(folder: Path, config: zi.Config | None, *, resume: Path | None = None, **changes: Any) -> Trained:
    trainer = make_trainer(folder, config, **changes)
    trainer.train(resume_from_checkpoint=str(resume) if resume is not None else None)
    return outcome(trainer)


def assert_same(plain: Trained, ours: Trained) -> None:
    """Every log line and every weight is the same, in every bit."""
    assert ours.logs == plain.logs
    assert plain.logs
    assert ours.weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        assert torch.equal(value, ours.weights[name]), name


def save_pretrained_folder(folder: Path) -> None:
    """A tiny model with its tokenizer, as they come from the hub: a word is a token."""
    words = [f"w{number}" for number in range(VOCABULARY - 2)]
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )
    wrapped.save_pretrained(folder)
    tiny_llama().save_pretrained(folder)


# ---------------------------------------------------------------------- on several ranks


def both_on_a_rank(rank: int, port: int, folder: Path, **changes: Any) -> tuple[Trained, Trained, Trained]:
    """A plain run, ours, and ours resumed from its first checkpoint, as torchrun would start them."""
    config = zi.Config(memory="1MiB", nvme=folder)
    _as_torchrun(rank, port)
    plain = train(folder / "plain", None, **changes)
    ours = train(folder / "ours", config, save_strategy="steps", save_steps=2, **changes)
    resumed = train(folder / "resumed", config, resume=folder / "ours" / "checkpoint-2", **changes)
    return plain, ours, resumed


# ---------------------------------------------------------------------- loops for accelerate


def loop_with_accelerate(
    config: zi.Config | None,
    *,
    max_norm: float | None,
    accumulate: int = 1,
    save_after: int = -1,
    load_before: int = 0,
    folder: Path | None = None,
    **settings: Any,
) -> Trained:
    """Ten batches as accelerate's documentation has it, with ours or the plain `Accelerator`."""
    ours = {"zero_infinity": config} if config is not None else {}
    kind = Accelerator if config is not None else accelerate.Accelerator
    accelerator = kind(cpu=True, gradient_accumulation_steps=accumulate, **ours, **settings)
    model: Any = tiny_llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader: Any = DataLoader(Tokens(), batch_size=1)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if load_before:
        accelerator.load_state(str(folder))
        loader = accelerator.skip_first_batches(loader, load_before)
    logs = []
    for number, batch in enumerate(loader, start=load_before):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = 0.0
            if accelerator.sync_gradients and max_norm is not None:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        logs.append({"loss": loss.item(), "norm": norm, "rate": schedule.get_last_lr()[0]})
        if number + 1 == save_after:
            accelerator.save_state(str(folder))
    weights = accelerator.unwrap_model(model).state_dict()
    return Trained(logs, {name: value.clone() for name, value in weights.items()})


def loop_on_a_rank(rank: int, port: int, folder: Path) -> tuple[Trained, Trained, Trained]:
    """A plain loop, ours, and ours from what it saved in the middle."""
    _as_torchrun(rank, port)
    config = zi.Config(memory="1MiB", nvme=folder)
    clips: dict[str, Any] = {"max_norm": 1e-2, "accumulate": 2, "folder": folder / "state"}
    runs = []
    for settings, changes in ((None, {}), (config, {"save_after": 2}), (config, {"load_before": 2})):
        GradientState._reset_state()
        runs.append(loop_with_accelerate(settings, **clips, **changes))
    plain, ours, resumed = runs
    return plain, ours, resumed


def _as_torchrun(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
