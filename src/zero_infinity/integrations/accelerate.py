"""The `Accelerator` of accelerate with a memory budget: `prepare` prepares models and optimizers by `zi.prepare`.

Data loaders, schedulers, mixed precision (autocast) and random states stay accelerate's business. A step that only
accumulates is one for the engine, too; `save_state` and `load_state` stream.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from zero_infinity import api
from zero_infinity.config import Config
from zero_infinity.errors import UsageError
from zero_infinity.integrations.log_figures import LogFigures
from zero_infinity.integrations.pretrained_folder import write_weights
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer
from zero_infinity.params.offloaded_param import managed


class AccumulatingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Steps only when accelerate has accumulated enough; the states stay with the engine."""

    def __init__(self, optimizer: StreamedOptimizer) -> None:
        super().__init__(optimizer, device_placement=False)
        self._is_accelerate_prepared = True

    @property
    def step_was_skipped(self) -> bool:
        """True if gradients had overflowed in float16."""
        return bool(self.optimizer.step_was_skipped)

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the last step, if `Config(max_grad_norm=...)` is set."""
        norm: torch.Tensor | None = self.optimizer.grad_norm
        return norm


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """The `Accelerator` of accelerate, within a memory budget.

    `prepare` takes a model and its optimizer in one call, plain or prepared already.
    """

    def __init__(self, *args: Any, zero_infinity: Config | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        """Make it with accelerate's own arguments.

        Args:
            zero_infinity: The settings, or a file of them. Default: `Config()`.
        """
        super().__init__(*args, **kwargs)
        given = zero_infinity if zero_infinity is not None else Config()
        config = given if isinstance(given, Config) else Config.from_file(given)
        if config.gradient_accumulation_steps not in (1, self.gradient_accumulation_steps):
            raise UsageError(
                f"gradient_accumulation_steps is {config.gradient_accumulation_steps} in zi.Config and "
                f"{self.gradient_accumulation_steps} in the Accelerator\n  fix:   set it in the Accelerator only"
            )
        changes: dict[str, Any] = {"gradient_accumulation_steps": 1}  # see no_sync
        if config.max_grad_norm is None:
            changes["update"] = "after_backward"  # so that clip_grad_norm_ finds all gradients
        if self.mixed_precision == "fp16":  # the engine scales the loss of float16 parameters itself
            changes["param_dtype"] = config.param_dtype or "float16"
            self.scaler, self.native_amp = None, False
        self._config = config.replace(**changes)
        self._ours: list[tuple[nn.Module, AccumulatingOptimizer]] = []
        self._figures: list[LogFigures] = []
        self.register_save_state_pre_hook(self._save_ours)
        self.register_load_state_pre_hook(self._load_ours)

    # ------------------------------------------------------------------ preparing

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models with their optimizers by `zi.prepare`, and everything else as accelerate does."""
        models = [item for item in objects if isinstance(item, nn.Module)]
        ready = [
            self._prepare_training(item, models)
            if isinstance(item, Optimizer) and not isinstance(item, AcceleratedOptimizer)
            else item
            for item in objects
        ]
        return super().prepare(*ready, device_placement=device_placement)

    def _prepare_training(self, optimizer: Optimizer, models: list[nn.Module]) -> AccumulatingOptimizer:
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        model = next((m for m in models if any(id(p) in trained for p in m.parameters())), None)
        if model is None:
            raise UsageError(
                "accelerator.prepare got an optimizer without its model\n"
                "  fix:   accelerator.prepare(model, optimizer, ...) in one call"
            )
        # Autocast, if it was asked for. The device and the other ranks are the engine's business.
        self.prepare_model(model, device_placement=False, evaluation_mode=True)
        if not isinstance(optimizer, StreamedOptimizer):
            _, optimizer = api.prepare(model, optimizer, self._config, device=self.device)
        mine = AccumulatingOptimizer(optimizer)
        self._ours.append((model, mine))
        self._figures.append(LogFigures(model))
        return mine

    def free_memory(self, *objects: Any) -> Any:
        self._ours.clear()
        self._figures.clear()
        return super().free_memory(*objects)

    # ------------------------------------------------------------------ steps

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward passes inside only accumulate; `accumulate` uses it for all but the last one."""
        mine = next((optimizer for known, optimizer in self._ours if known is model), None)
        with super().no_sync(model) if mine is None else mine.optimizer.no_sync():
            yield

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clip gradients; for a prepared model over all ranks."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if norm_type == 2 and any(managed(p) is not None for p in listed):
            return api.clip_grad_norm_(listed, max_norm)
        return super().clip_grad_norm_(listed, max_norm, norm_type)

    def log(self, values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Give values to the trackers, and with them what the first prepared model moved since the last call."""
        figures = self._figures[0].since_last() if self._figures else {}
        super().log(values | figures, *args, **kwargs)

    # ------------------------------------------------------------------ saving

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save everything that was prepared: models and optimizers by `zi.save`, the rest as accelerate does."""
        return self._with_ours_apart(lambda: super(Accelerator, self).save_state(*args, **kwargs))

    def load_state(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `save_state` has saved."""
        return self._with_ours_apart(lambda: super(Accelerator, self).load_state(*args, **kwargs))

    def save_model(self, model: nn.Module, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write a prepared model's weights as safetensors; on every rank."""
        if not any(known is model for known, _ in self._ours):
            super().save_model(model, save_directory, *args, **kwargs)
            return
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_weights(model, Path(save_directory))

    def _with_ours_apart(self, call: Callable[[], Any]) -> Any:
        """While accelerate saves or loads, the hooks below take care of prepared models and optimizers."""
        models: list[nn.Module] = self._models  # type: ignore[has-type]
        optimizers: list[Optimizer] = self._optimizers  # type: ignore[has-type]
        self._models = [m for m in models if not any(m is known for known, _ in self._ours)]
        self._optimizers = [o for o in optimizers if not isinstance(o, AccumulatingOptimizer)]
        try:
            return call()
        finally:
            self._models, self._optimizers = models, optimizers

    def _save_ours(self, _: Any, __: Any, output_dir: str) -> None:
        for number, (model, optimizer) in enumerate(self._ours):
            api.save(Path(output_dir) / f"zero_infinity_{number}", model, optimizer.optimizer, keep=1)

    def _load_ours(self, _: Any, input_dir: str) -> None:
        for number, (model, optimizer) in enumerate(self._ours):
            api.load(Path(input_dir) / f"zero_infinity_{number}", model, optimizer.optimizer)
