"""The `Trainer` of transformers, and the trainers derived from it, over a prepared model.

`Mixin` goes before a trainer class: `class MyTrainer(Mixin, SFTTrainer)`. It prepares the model when the trainer
creates its optimizer. From there on the trainer runs its own loop; only what would need whole states in memory (saving,
resuming) or gradients on the parameters (clipping) is done by the engine.

A checkpoint folder is the trainer's own, with the weights as `save_pretrained` writes them. Its folder `zero_infinity`
has the optimizer states in place of `optimizer.pt`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from zero_infinity import api
from zero_infinity.checkpoint.checkpoint_directory import has_checkpoint
from zero_infinity.config import Config
from zero_infinity.errors import ConfigError
from zero_infinity.integrations.log_figures import LogFigures
from zero_infinity.integrations.pretrained_folder import adapter_tensors, has_adapters, write_weights
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer

_TRL = "zero_infinity.integrations.trl"
STATES = "zero_infinity"  # the folder in a checkpoint of the trainer
SCHEDULER_NAME = "scheduler.pt"  # as the trainer names it


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """The trainer's arguments with the path of a `zi.Config` file: `--zero_infinity config.toml`."""

    zero_infinity: str | None = field(default=None, metadata={"help": "A .toml or .json file of zero_infinity.Config."})


class Mixin:
    """Before a trainer class, it trains that class's model within a memory budget."""

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, zero_infinity: Config | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        """Make the trainer with its own arguments.

        Args:
            zero_infinity: The settings, or a file of them. Default: `args.zero_infinity`, else `Config()`.
        """
        self._zero_infinity = zero_infinity
        self._figures: LogFigures | None = None
        super().__init__(*args, **kwargs)
        self._config()  # a mistake in it is told now

    # ------------------------------------------------------------------ preparing

    def create_optimizer(self, model: Any = None) -> StreamedOptimizer:
        """Create the trainer's optimizer and prepare the model with it."""
        if not isinstance(self.optimizer, StreamedOptimizer):
            optimizer = super().create_optimizer(model)  # type: ignore[misc]
            # Autocast, if the arguments ask for it. The device and the other ranks are the engine's business.
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            _, self.optimizer = api.prepare(self.model, optimizer, self._config(), device=self.args.device)
            # accelerate leaves it as it is: its own wrapper would move the states to one device.
            vars(self.optimizer)["_is_accelerate_prepared"] = True
            self._figures = LogFigures(self.model)
            if self.args.world_size > 1:
                _generate_together(self.model)
            if hasattr(self, "vllm_generation"):  # of TRL
                import_module(_TRL).hand_over_weights(self)
        return self.optimizer

    def _config(self) -> Config:
        """The settings, with what the trainer's arguments say already."""
        given = self._zero_infinity
        if given is None:
            given = getattr(self.args, "zero_infinity", None)
        config = given if isinstance(given, Config) else Config() if given is None else Config.from_file(given)
        _refuse_two(config, "gradient_accumulation_steps", self.args.gradient_accumulation_steps, unset=1)
        _refuse_two(config, "max_grad_norm", self.args.max_grad_norm, unset=None)
        return config.replace(
            gradient_accumulation_steps=1,  # the trainer says which backward is the last: see training_step
            max_grad_norm=self.args.max_grad_norm or None,
            param_dtype=config.param_dtype or ("float16" if self.args.fp16 else None),
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Without the gradient scaler of accelerate: the engine scales the loss of float16 parameters."""
        built: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        return built | {"mixed_precision": "no"} if self.args.fp16 else built

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """The engine moves what has to be there, when it has to be there."""

    @property
    def _is_prepared(self) -> bool:
        return isinstance(self.optimizer, StreamedOptimizer)

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward. Only the last backward before a step may update parameters."""
        with nullcontext() if self.accelerator.sync_gradients else self.optimizer.no_sync():
            loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss

    def _clip_grad_norm(self, model: Any) -> None:
        """The engine clips, in `step()`."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """Known after `step()`: see _maybe_log_save_evaluate."""

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        norm = self.optimizer.grad_norm if grad_norm is None else grad_norm
        super()._maybe_log_save_evaluate(tr_loss, norm, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Also log what was moved and waited for since the last loss was logged."""
        if self._figures is not None and "loss" in logs:
            logs |= self._figures.since_last()
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Also while generating, every rank runs as many forwards as the others: parameters are gathered from all."""
        if hasattr(self, "_gen_kwargs"):
            self._gen_kwargs.setdefault("synced_gpus", self.args.world_size > 1)
        return super().prediction_step(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as `save_pretrained` does, and beside it what is needed to go on, in a checkpoint."""
        if not self._is_prepared:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        states = None
        if _internal_call and output_dir is not None and not self.args.save_only_model:
            adapters = has_adapters(self.model)
            states = api.save(folder / STATES, self.model, self.optimizer, keep=1, trained_only=adapters)
        small = adapter_tensors(self.model)
        if self.args.should_save:
            super()._save(str(folder), state_dict=small)  # type: ignore[misc]
        if not has_adapters(self.model):
            write_weights(self.model, folder, states)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The scheduler. The optimizer states were saved together with the weights."""
        if not self._is_prepared:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    # ------------------------------------------------------------------ going on

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights to start from. Those of our own checkpoints are loaded with the states, into the prepared model."""
        if not has_checkpoint(Path(resume_from_checkpoint) / STATES):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_checkpoint(Path(checkpoint) / STATES):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        api.load(Path(checkpoint) / STATES, self.model, self.optimizer, strict=not has_adapters(self.model))
        scheduler = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)  # type: ignore[attr-defined]
        if has_checkpoint(best / STATES):
            api.load(best / STATES, self.model, strict=not has_adapters(self.model))
        elif self._is_prepared and not has_adapters(self.model):
            api.load_pretrained(self.model, best)
        else:
            super()._load_best_model()  # type: ignore[misc]


class ZeroInfinityTrainer(Mixin, transformers.Trainer):
    """The `Trainer` of transformers, within a memory budget."""


def _generate_together(model: Any) -> None:
    """Let every rank run as many forwards as the others while it generates: parameters are gathered from all."""
    base = model.get_base_model() if has_adapters(model) else model
    if hasattr(base, "generate"):
        base.generate = partial(base.generate, synced_gpus=True)


def _refuse_two(config: Config, name: str, theirs: Any, *, unset: Any) -> None:
    ours = getattr(config, name)
    if ours not in (unset, theirs):
        raise ConfigError(
            f"{name} is {ours} in zi.Config and {theirs} in the trainer's arguments\n"
            "  fix:   set it in the trainer's arguments only"
        )
