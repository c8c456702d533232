"""A strategy of Lightning: `Trainer(strategy=ZeroInfinityStrategy(config))`, or `strategy="zero_infinity"`.

The module is prepared; nothing wraps it. A checkpoint is a folder: Lightning's own file without states, and one of
`zi.save`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

from zero_infinity import api
from zero_infinity.config import Config
from zero_infinity.errors import UsageError
from zero_infinity.integrations.log_figures import LogFigures
from zero_infinity.optim.wrapped_optimizer import StreamedOptimizer
from zero_infinity.params.offloaded_param import managed

_REST, _STATES = "lightning.ckpt", "zero_infinity"  # in the folder of a checkpoint


class ZeroInfinityStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains a `LightningModule` within a memory budget, on one or several ranks."""

    model: Any
    optimizers: Any

    def __init__(self, zero_infinity: Config | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        """Make it with the settings, or a file of them, and the arguments of Lightning's strategies."""
        super().__init__(**kwargs)
        self.num_nodes = 1  # set by Lightning, too
        given = zero_infinity if zero_infinity is not None else Config()
        self._config = given if isinstance(given, Config) else Config.from_file(given)
        self._streamed: StreamedOptimizer | None = None
        self._loading: Path | None = None  # a checkpoint of ours that Lightning restores now

    # ------------------------------------------------------------------ processes

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices
        return devices[self.local_rank] if devices else torch.device("cpu")

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or [None])

    @property
    def is_distributed(self) -> bool:
        """True if there are several ranks, so that each needs its own part of the data."""
        return self.num_processes * self.num_nodes > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.num_processes * self.num_nodes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        if self.is_distributed:
            self._launcher = _SubprocessScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Called by Lightning once it knows the devices."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Connect to the other ranks, if there are any."""
        super().setup_environment()
        self.set_world_ranks()
        if self.is_distributed and not dist.is_initialized():
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            dist.init_process_group(rank=self.global_rank, world_size=self.world_size)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a metric's mean (or sum) over the ranks."""
        if not isinstance(tensor, torch.Tensor) or not self.is_distributed:
            return tensor
        total = tensor.clone() if tensor.is_floating_point() else tensor.float()
        dist.all_reduce(total, group=group)
        return total / self.world_size if str(reduce_op).lower() in ("mean", "avg") else total

    def barrier(self, *_: Any, **__: Any) -> None:
        if self.is_distributed:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        objects = [obj]
        if self.is_distributed:
            dist.broadcast_object_list(objects, src)
        return objects[0]

    # ------------------------------------------------------------------ preparing

    def setup(self, trainer: Trainer) -> None:
        """Prepare the module: to train it, or only to use it."""
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        elif all(managed(p) is None for p in self.lightning_module.parameters()):
            api.prepare(self.lightning_module, config=self._config, device=self.root_device)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """The engine moves what has to be there, when it has to be there."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the module's optimizer and prepare the module with it."""
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise UsageError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers; a prepared model has one\n"
                "  fix:   one optimizer with several parameter groups"
            )
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise UsageError(
                'precision="16-mixed" scales the loss by a GradScaler, which cannot see streamed gradients\n'
                '  fix:   precision="32-true" and zi.Config(param_dtype="float16"): the engine scales the loss'
            )
        config = self._config.replace(max_grad_norm=self._norm_to_clip_to(trainer))
        _, self._streamed = api.prepare(self.lightning_module, self.optimizers[0], config, device=self.root_device)
        self.optimizers = [self._streamed]

    def _norm_to_clip_to(self, trainer: Trainer) -> float | None:
        """What the Trainer is asked to clip to. From now on the engine does, in `step()`."""
        norm, trainer.gradient_clip_val = trainer.gradient_clip_val, None
        if not norm:
            return self._config.max_grad_norm
        if trainer.gradient_clip_algorithm == "value":
            raise UsageError(
                'gradient_clip_algorithm="value" is not supported\n  fix:   gradient_clip_algorithm="norm"'
            )
        return float(norm)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning accumulates: backward passes inside are not the last one before a step."""
        with self._streamed.no_sync() if self._streamed is not None else nullcontext():
            yield

    def teardown(self) -> None:
        """Leave the module prepared. Lightning would move states and parameters to the CPU."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: states are loaded into a prepared module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: values are saved by the engine."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: states are saved by the engine."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a folder with Lightning's own file and the engine's checkpoint; on every rank."""
        folder = Path(self.broadcast(str(filepath)))
        with_states = "optimizer_states" in checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        api.save(folder / _STATES, self.lightning_module, self._streamed if with_states else None, keep=1)
        super().save_checkpoint(checkpoint, folder / _REST, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read Lightning's own file. The engine's checkpoint beside it is loaded when the module's states are."""
        path = Path(checkpoint_path)
        self._loading = path / _STATES if path.is_dir() else None
        loaded: dict[str, Any] = super().load_checkpoint(path / _REST if path.is_dir() else path, weights_only)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._loading is None:
            super().load_model_state_dict(checkpoint, strict)
        else:
            with_states = self.lightning_module.trainer.training and "optimizer_states" in checkpoint
            api.load(self._loading, self.lightning_module, self._streamed if with_states else None, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The states of a plain checkpoint; the engine's were loaded with the values."""
        if self._loading is None:
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)


class FiguresCallback(Callback):  # type: ignore[misc]
    """Logs bytes moved, seconds waited, memory and the norm of clipped gradients with the module's logger."""

    def __init__(self) -> None:
        self._figures: LogFigures | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        self._figures = LogFigures(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._figures is None:
            return
        figures = {name: torch.tensor(value) for name, value in self._figures.since_last().items()}
        norm = getattr(trainer.optimizers[0], "grad_norm", None)
        pl_module.log_dict(figures | ({} if norm is None else {"grad_norm": norm}))


if "zero_infinity" not in StrategyRegistry:
    StrategyRegistry.register("zero_infinity", ZeroInfinityStrategy, description="Trains within a memory budget")
