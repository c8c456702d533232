"""Converts DeepSpeed's JSON settings into those of `zi.Config`, and says of every other field why it is left out.

Plain data: knows nothing of torch or of DeepSpeed's code, only the fields that DeepSpeed documents.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zero_infinity.errors import ConfigError

_AUTO = "auto"  # "the Trainer knows": as if it were not there


class Verdict(enum.Enum):
    """What becomes of a field."""

    CONVERTED = "converted"
    IN_SCRIPT = "in your script"
    NOT_NEEDED = "not needed"
    NOT_SUPPORTED = "not supported"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Note:
    """What became of one field of the file."""

    field: str  # "zero_optimization.stage"
    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class Converted:
    """Settings for `zi.Config.from_dict`, and a note on each field that the file has."""

    settings: dict[str, object]
    notes: tuple[Note, ...]


_BUFFERS = "buffers and prefetch distances follow from the order of accesses and the budgets"
_BUCKETS = "buckets have a fixed size that follows from memory"
_ALWAYS = "always so"
_ONE_REASON = {
    _BUFFERS: (
        "sub_group_size stage3_prefetch_bucket_size prefetch_bucket_size stage3_param_persistence_threshold "
        "param_persistence_threshold stage3_model_persistence_threshold model_persistence_threshold "
        "stage3_max_live_parameters max_live_parameters stage3_max_reuse_distance max_reuse_distance "
        "stage3_module_granularity_threshold module_granularity_threshold offload_param.buffer_count "
        "offload_param.buffer_size offload_param.max_in_cpu offload_optimizer.buffer_count offload_optimizer.pipeline "
        "offload_optimizer.pipeline_read offload_optimizer.pipeline_write offload_optimizer.fast_init "
        "offload_optimizer.buffer_size log_trace_cache_warnings fast_sharding_for_leaf_module"
    ),
    _BUCKETS: (
        "allgather_bucket_size reduce_bucket_size allgather_partitions use_multi_rank_bucket_allreduce reduce_scatter "
        "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params round_robin_gradients"
    ),
    _ALWAYS: (
        "overlap_comm contiguous_gradients grad_hooks memory_efficient_linear ignore_unused_parameters legacy_stage1 "
        "elastic_checkpoint load_from_fp32_weights offload_param.pin_memory offload_optimizer.pin_memory "
        "enable_sanity_checks override_module_apply stage3_allow_memory_efficient_linear"
    ),
}
_ZERO: dict[str, tuple[Verdict, str]] = {
    name: (Verdict.NOT_NEEDED, reason) for reason, names in _ONE_REASON.items() for name in names.split()
} | {
    "stage3_gather_16bit_weights_on_model_save": (Verdict.NOT_NEEDED, "zi.export writes whole weights, streamed"),
    "gather_16bit_weights_on_model_save": (Verdict.NOT_NEEDED, "zi.export writes whole weights, streamed"),
    "offload_optimizer.ratio": (Verdict.NOT_NEEDED, "what fits in memory stays there"),
    "offload_optimizer.super_offload": (Verdict.NOT_NEEDED, "updates run during backward"),
    "offload_optimizer.cpuadam_cores_perc": (Verdict.NOT_NEEDED, "updates take the cores that are idle"),
    "leaf_module": (Verdict.NOT_NEEDED, "experts that ranks choose differently are found"),
    "zero_hpz_partition_size": (Verdict.NOT_SUPPORTED, "no second copy of parameters within a machine (ZeRO++)"),
    "zero_quantized_weights": (Verdict.NOT_SUPPORTED, "parameters are sent as stored; param_dtype halves them"),
    "zero_quantized_nontrainable_weights": (Verdict.NOT_SUPPORTED, "parameters are sent as stored"),
    "zero_quantized_gradients": (Verdict.NOT_SUPPORTED, "gradients are not quantized; reduce_dtype halves them"),
    "zeropp_loco_param": (Verdict.NOT_SUPPORTED, "gradients are not quantized"),
    "mics_shard_size": (Verdict.NOT_SUPPORTED, "states are sharded over all ranks of the group"),
    "mics_hierarchical_params_gather": (Verdict.NOT_SUPPORTED, "states are sharded over all ranks of the group"),
}
_LOOP = "the batches of your own loop; gradient_accumulation_steps is the number for each step"
_TOP: dict[str, tuple[Verdict, str]] = {
    "train_batch_size": (Verdict.IN_SCRIPT, _LOOP),
    "train_micro_batch_size_per_gpu": (Verdict.IN_SCRIPT, _LOOP),
    "scheduler": (Verdict.IN_SCRIPT, "any scheduler of torch.optim.lr_scheduler, on either optimizer"),
    "steps_per_print": (Verdict.IN_SCRIPT, "print zi.stats(model) or optimizer.grad_norm when you like"),
    "dump_state": (Verdict.IN_SCRIPT, "print(config)"),
    "dataloader_drop_last": (Verdict.IN_SCRIPT, "drop_last of your DataLoader"),
    "tensorboard": (Verdict.IN_SCRIPT, "log from your loop: zi.stats(model), optimizer.grad_norm"),
    "wandb": (Verdict.IN_SCRIPT, "log from your loop: zi.stats(model), optimizer.grad_norm"),
    "comet": (Verdict.IN_SCRIPT, "log from your loop: zi.stats(model), optimizer.grad_norm"),
    "csv_monitor": (Verdict.IN_SCRIPT, "log from your loop: zi.stats(model), optimizer.grad_norm"),
    "compile": (Verdict.IN_SCRIPT, "torch.compile(model), before or after zi.prepare"),
    "tensor_parallel": (Verdict.IN_SCRIPT, "parallelize_module of torch, then zi.prepare(..., group=mesh['dp'])"),
    "wall_clock_breakdown": (Verdict.IN_SCRIPT, "trace= in zi.Config, then zero-infinity report"),
    "memory_breakdown": (Verdict.IN_SCRIPT, "zi.stats(model)"),
    "comms_logger": (Verdict.IN_SCRIPT, "trace= in zi.Config; zi.stats(model).sent_bytes"),
    "flops_profiler": (Verdict.IN_SCRIPT, "torch.profiler; zero-infinity plan counts operations"),
    "autotuning": (Verdict.NOT_NEEDED, "there is nothing to tune; zero-infinity plan predicts memory and time"),
    "aio": (Verdict.NOT_NEEDED, "requests, threads and queue depth are chosen; zero-infinity bench io measures"),
    "zero_allow_untested_optimizer": (Verdict.NOT_NEEDED, "each optimizer is tested when the model is prepared"),
    "zero_force_ds_cpu_optimizer": (Verdict.NOT_NEEDED, "updates run your own optimizer's class"),
    "disable_allgather": (Verdict.NOT_NEEDED, _BUCKETS),
    "prescale_gradients": (Verdict.NOT_NEEDED, "gradients are summed in float32 and divided once"),
    "gradient_predivide_factor": (Verdict.NOT_NEEDED, "gradients are summed in float32 and divided once"),
    "data_types": (Verdict.NOT_NEEDED, "gradients are accumulated in the dtype of the optimizer's states"),
    "checkpoint": (Verdict.NOT_NEEDED, "checkpoints do not depend on ranks, stage or placement"),
    "load_universal_checkpoint": (Verdict.NOT_NEEDED, "checkpoints do not depend on ranks, stage or placement"),
    "use_node_local_storage": (Verdict.NOT_SUPPORTED, "zi.save needs a directory that all ranks see"),
    "nebula": (Verdict.NOT_SUPPORTED, "zi.save(background=True) writes beside training"),
    "elasticity": (Verdict.NOT_NEEDED, "a checkpoint loads with another number of ranks"),
    "sparse_gradients": (Verdict.NOT_SUPPORTED, "gradients are dense; leave sparse=True of embeddings out"),
    "amp": (Verdict.NOT_SUPPORTED, 'Apex is not used; param_dtype="float16" scales the loss by itself'),
    "torch_autocast": (Verdict.NOT_SUPPORTED, "param_dtype and compute_dtype, or torch.autocast in your script"),
    "seq_parallel_communication_data_type": (Verdict.NOT_SUPPORTED, "there is no sequence parallelism"),
    "pipeline": (Verdict.NOT_SUPPORTED, "there is no pipeline parallelism"),
    "sparse_attention": (Verdict.NOT_SUPPORTED, "attention is the model's own"),
    "progressive_layer_drop": (Verdict.NOT_SUPPORTED, "layers are the model's own"),
    "eigenvalue": (Verdict.NOT_SUPPORTED, "no quantization-aware training"),
    "quantize_training": (Verdict.NOT_SUPPORTED, "no quantization-aware training"),
    "compression_training": (Verdict.NOT_SUPPORTED, "no compression while training"),
    "weight_quantization": (Verdict.NOT_SUPPORTED, "no quantization of weights"),
    "data_efficiency": (Verdict.NOT_SUPPORTED, "sampling and dropping of tokens belong into your loader and model"),
    "curriculum_learning": (Verdict.NOT_SUPPORTED, "a curriculum belongs into your loader"),
    "hybrid_engine": (Verdict.NOT_SUPPORTED, "generate with the prepared model itself"),
}
_LOSS_SCALE = {
    "auto_cast": "inputs are cast to the compute dtype",
    "initial_scale_power": "the loss scale is dynamic and finds its value",
    "loss_scale_window": "the loss scale is dynamic",
    "hysteresis": "the loss scale is dynamic",
    "consecutive_hysteresis": "the loss scale is dynamic",
    "min_loss_scale": "the loss scale is dynamic",
}
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16", "fp32": "float32"}
_OPTIMIZERS = {
    "adam": "torch.optim.AdamW(model.parameters(), ..., fused=True); Adam with adam_w_mode off",
    "adamw": "torch.optim.AdamW(model.parameters(), ..., fused=True)",
    "adagrad": "torch.optim.Adagrad(model.parameters(), ...)",
    "sgd": "torch.optim.SGD(model.parameters(), ...)",
    "lion": "lion_pytorch.Lion(model.parameters(), ...)",
}


def convert(settings: Mapping[str, object]) -> Converted:
    """Convert the content of a ds_config.json."""
    return _Conversion(settings).run()


class _Conversion:
    """One conversion: fields are taken one after the other, and each leaves a note."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._given = settings
        self._settings: dict[str, object] = {"stage": 0}
        self._notes: list[Note] = []

    def run(self) -> Converted:
        for name, value in self._given.items():
            if value == _AUTO:
                self._note(name, Verdict.NOT_NEEDED, '"auto": as if it were not given')
            elif name == "zero_optimization":
                self._zero(self._table(name, value))
            elif name in ("fp16", "bf16", "bfloat16"):
                self._precision(name, self._table(name, value))
            elif name == "activation_checkpointing":
                self._activations(self._table(name, value))
            elif name == "optimizer":
                self._optimizer(self._table(name, value))
            elif name == "gradient_accumulation_steps":
                self._set(name, name, value)
            elif name == "gradient_clipping":
                self._clipping(value)
            elif name == "communication_data_type":
                self._set(name, "reduce_dtype", _DTYPES.get(str(value), value))
            else:
                self._other(name, value)
        return Converted(self._settings, tuple(self._notes))

    def _zero(self, zero: Mapping[str, object]) -> None:
        if zero.get("stage", _AUTO) != _AUTO:
            self._set("zero_optimization.stage", "stage", zero["stage"])
        for name, value in zero.items():
            if name in ("offload_param", "offload_optimizer"):
                self._offload(name, self._table(f"zero_optimization.{name}", value))
            elif name in ("cpu_offload", "cpu_offload_params", "cpu_offload_use_pin_memory"):
                text = "what fits in memory= of host RAM stays there, the rest goes to nvme="
                self._note(f"zero_optimization.{name}", Verdict.NOT_NEEDED, text)
            elif name != "stage":
                self._look_up(f"zero_optimization.{name}", _ZERO, name)

    def _offload(self, name: str, table: Mapping[str, object]) -> None:
        full = f"zero_optimization.{name}"
        for key, value in table.items():
            if key == "device":
                text = "nvme=" if value == "nvme" else "states are in host RAM within memory=, and on nvme= beyond it"
                verdict = Verdict.CONVERTED if value == "nvme" else Verdict.NOT_NEEDED
                if value == "nvme" and table.get("nvme_path", _AUTO) == _AUTO:
                    verdict, text = Verdict.IN_SCRIPT, "nvme= needs a directory: the file has no nvme_path"
                self._note(f"{full}.device", verdict, text)
            elif key == "nvme_path":
                if table.get("device") == "nvme" and value != _AUTO:
                    self._set(f"{full}.nvme_path", "nvme", self._paths(str(value)))
                else:
                    self._note(f"{full}.nvme_path", Verdict.NOT_NEEDED, "nothing is offloaded to it")
            else:
                self._look_up(f"{full}.{key}", _ZERO, f"{name}.{key}")

    def _paths(self, path: str) -> list[str]:
        """Parameters and optimizer states may have a directory each: both are used for both, striped."""
        known = self._settings.get("nvme")
        return list(dict.fromkeys([*(known if isinstance(known, list) else []), path]))

    def _precision(self, section: str, table: Mapping[str, object]) -> None:
        if not table.get("enabled", False) or table["enabled"] == _AUTO:
            self._note(section, Verdict.NOT_NEEDED, "not enabled")
            return
        dtype = "float16" if section == "fp16" else "bfloat16"
        self._set(f"{section}.enabled", "param_dtype", dtype)
        self._settings["compute_dtype"] = dtype
        for name, value in table.items():
            full = f"{section}.{name}"
            if name == "loss_scale":
                if value in (0, 0.0, _AUTO):
                    self._note(full, Verdict.NOT_NEEDED, "0 is a dynamic loss scale, as here")
                else:
                    self._note(full, Verdict.NOT_SUPPORTED, f"a fixed loss scale of {value}: it is dynamic here")
            elif name == "fp16_master_weights_and_grads" and value:
                self._set(full, "optim_dtype", "float16")
            elif name == "bf16_master_weights_and_grads" and value:
                self._set(full, "optim_dtype", "bfloat16")
            elif name in _LOSS_SCALE:
                self._note(full, Verdict.NOT_NEEDED, _LOSS_SCALE[name])
            elif name != "enabled":
                self._note(full, Verdict.NOT_NEEDED, "follows from param_dtype and optim_dtype")

    def _activations(self, table: Mapping[str, object]) -> None:
        for name, value in table.items():
            full = f"activation_checkpointing.{name}"
            if name == "cpu_checkpointing" and value:
                self._set(full, "offload_activations", True)
                self._settings["checkpoint_activations"] = True
            elif name == "partition_activations" and value:
                self._note(full, Verdict.IN_SCRIPT, "zi.prepare(..., activation_group=) with checkpoint_activations")
            elif name in ("contiguous_memory_optimization", "number_checkpoints") and value:
                self._note(
                    full, Verdict.NOT_NEEDED, 'activations do not fragment memory; or offload_activations="arena"'
                )
            else:
                self._note(full, Verdict.NOT_NEEDED, "checkpoint_activations=True finds the repeated blocks")

    def _optimizer(self, table: Mapping[str, object]) -> None:
        kind = str(table.get("type", ""))
        known = _OPTIMIZERS.get(kind.lower())
        params = table.get("params", {})
        asked = ", ".join(f"{k}={v}" for k, v in params.items()) if isinstance(params, Mapping) else ""
        if known is None:
            text = (
                f"{kind} is not streamed; the nearest is torch.optim.AdamW (any element-wise torch.optim class works)"
            )
            self._note("optimizer", Verdict.NOT_SUPPORTED, text)
        else:
            text = f"zi.prepare(model, {known}, config)" + (f" with {asked}" if asked else "")
            self._note("optimizer", Verdict.IN_SCRIPT, text)

    def _clipping(self, value: object) -> None:
        if value:
            self._set("gradient_clipping", "max_grad_norm", value)
        else:
            self._note("gradient_clipping", Verdict.NOT_NEEDED, "0 is no clipping")

    def _other(self, name: str, value: object) -> None:
        is_off = value is False or (isinstance(value, Mapping) and value.get("enabled") is False)
        if is_off and name in _TOP:
            self._note(name, Verdict.NOT_NEEDED, "not enabled")
        else:
            self._look_up(name, _TOP, name)

    # ------------------------------------------------------------------ notes

    def _set(self, field: str, name: str, value: object) -> None:
        self._settings[name] = value
        self._note(field, Verdict.CONVERTED, f"{name}={value!r}")

    def _look_up(self, field: str, table: Mapping[str, tuple[Verdict, str]], name: str) -> None:
        if name in table:
            self._note(field, *table[name])
            return
        near = difflib.get_close_matches(name, table, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        self._note(field, Verdict.UNKNOWN, f"not a field that DeepSpeed documents{hint}")

    def _note(self, field: str, verdict: Verdict, text: str) -> None:
        self._notes.append(Note(field, verdict, text))

    @staticmethod
    def _table(field: str, value: object) -> Mapping[str, object]:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{field} of the DeepSpeed config is {value!r}; accepted: a table of settings")
        return value


def documented_fields() -> Iterator[str]:
    """Every field that is known, for documentation and tests."""
    yield from (*_TOP, *(f"zero_optimization.{name}" for name in _ZERO))
