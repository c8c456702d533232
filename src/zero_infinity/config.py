"""`Config`: all settings, checked and normalised on construction.

Owns the settings, their defaults, their text form (JSON, TOML) and their error messages. It does not import torch:
dtypes are names. It does not know how the engine uses a setting. It creates no file and only checks paths, so that
invalid settings fail before any data moves.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, Never, Self, TypeAlias, get_args

from zero_infinity.byte_sizes import format_bytes, parse_bytes
from zero_infinity.deepspeed_config import Verdict, convert
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory

DType: TypeAlias = Literal["float32", "bfloat16", "float16"]
Stage: TypeAlias = Literal[0, 1, 2, 3]
Master: TypeAlias = Literal["auto", "float32", "none"]
Update: TypeAlias = Literal["auto", "after_backward"]
OffloadActivations: TypeAlias = Literal[False, True, "all", "arena"]
Partition: TypeAlias = Literal["spread", "owner"]
PathLike: TypeAlias = str | os.PathLike[str]

# Share of the available memory. The rest is for what the budget does not cover: activations, the data loader, Python
# and torch themselves (about 0.3 GiB) and memory that the allocator keeps.
MEASURED_FRACTION = 0.7


class ConfigWarning(UserWarning):
    """A setting is valid but probably a mistake."""


# The constructor is written out because it accepts more types ("4GiB", one path or several, a torch.dtype) than the
# normalised fields have.
@dataclass(frozen=True, slots=True, init=False)
class Config:
    """The settings of one prepared model. Immutable; `replace` returns a changed copy.

    Args:
        memory: Host RAM that the engine may hold, for each rank: `"4GiB"`, or bytes. Default: see `memory_budget`.
        device_memory: Accelerator memory for parameters in use and, if it is given, for whole states as far as they
            fit. Default: what the first steps leave free, as `zi.stats` says.
        nvme: A directory on the drive to use as the slowest tier, or several directories to stripe over. Default: RAM
            only.
        stage: What is sharded over ranks: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters.
        param_dtype: How parameters are stored and sent: `"float32"`, `"bfloat16"`, `"float16"` or the torch dtype.
            Default: the model's own.
        compute_dtype: What modules compute in. Default: the model's own; with a 16-bit `param_dtype`, that dtype if the
            machine multiplies matrices in it at least half as fast as in float32 (measured).
        reduce_dtype: What gradients are sent in between ranks; they are summed in float32. Default: the gradient's own.
        optim_dtype: What optimizer states are kept in. `"bfloat16"` halves them: updates are computed in float32, and
            states rounded stochastically. Default: float32 if parameters are stored in 16 bits, otherwise the stored
            dtype.
        master: The copy that 16-bit parameters are updated by. `"auto"` keeps it in `optim_dtype`; `"float32"` in
            float32 whatever that is; `"none"` keeps none, and rounds each update stochastically to bfloat16.
        rounding_seed: Of the random numbers of stochastic rounding.
        gradient_accumulation_steps: Backward passes for each update.
        max_grad_norm: Clip the global gradient norm to this. Default: no clipping.
        update: `"auto"` updates a parameter during backward as soon as its gradient is complete; `"after_backward"`
            keeps gradients until `step()`.
        checkpoint_activations: `True` keeps only the inputs of the model's repeated blocks and recomputes the rest in
            backward; an integer k does so for every k-th block, starting with the first.
        checkpoint_modules: The class of these blocks, or its name, or several. Default: found automatically.
        offload_activations: `True` stores the inputs of recomputed blocks on the tiers, within the budget; `"all"`
            stores every saved tensor of 64 KiB or more that is not a parameter, with or without recomputation;
            `"arena"` stores the inputs in one contiguous buffer on the compute device, outside the budget.
        tile_above: Use a linear layer or embedding in tiles, one at a time, if its weight and gradient together exceed
            this size. Default: only if the model does not fit otherwise, and then an eighth of `memory`.
        partition: How stages 1 to 3 shard a layer: `"spread"` gives each rank an equal part; `"owner"` gives whole
            layers to one rank each (as ZeRO-Offload does; slower, for comparison).
        verify: Check a checksum of every block that is read back from a drive.
        trace: A file to write a timeline of the run to, one for each rank.
    """

    memory: int | None
    device_memory: int | None
    nvme: tuple[Path, ...]
    stage: Stage
    param_dtype: DType | None
    compute_dtype: DType | None
    reduce_dtype: DType | None
    optim_dtype: DType | None
    master: Master
    rounding_seed: int
    gradient_accumulation_steps: int
    max_grad_norm: float | None
    update: Update
    checkpoint_activations: bool | int
    checkpoint_modules: tuple[str, ...]
    offload_activations: OffloadActivations
    tile_above: int | None
    partition: Partition
    verify: bool
    trace: Path | None

    def __init__(
        self,
        *,
        memory: str | int | None = None,
        device_memory: str | int | None = None,
        nvme: PathLike | Iterable[PathLike] | None = None,
        stage: int = 3,
        param_dtype: object = None,
        compute_dtype: object = None,
        reduce_dtype: object = None,
        optim_dtype: object = None,
        master: str = "auto",
        rounding_seed: int = 0,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        update: str = "auto",
        checkpoint_activations: bool | int = False,
        checkpoint_modules: str | type | Iterable[str | type] | None = None,
        offload_activations: bool | str = False,
        tile_above: str | int | None = None,
        partition: str = "spread",
        verify: bool = False,
        trace: PathLike | None = None,
        **unknown: Never,  # a type checker rejects any; at run time the message suggests the nearest field
    ) -> None:
        _refuse_unknown(unknown)
        values = {
            "memory": _memory("memory", memory),
            "device_memory": _size("device_memory", device_memory),
            "nvme": _directories("nvme", nvme),
            "stage": _choice("stage", stage, get_args(Stage)),
            "param_dtype": _dtype("param_dtype", param_dtype),
            "compute_dtype": _dtype("compute_dtype", compute_dtype),
            "reduce_dtype": _dtype("reduce_dtype", reduce_dtype),
            "optim_dtype": _dtype("optim_dtype", optim_dtype),
            "master": _choice("master", master, get_args(Master)),
            "rounding_seed": _integer("rounding_seed", rounding_seed),
            "gradient_accumulation_steps": _positive_int("gradient_accumulation_steps", gradient_accumulation_steps),
            "max_grad_norm": _norm("max_grad_norm", max_grad_norm),
            "update": _choice("update", update, get_args(Update)),
            "checkpoint_activations": _interval("checkpoint_activations", checkpoint_activations),
            "checkpoint_modules": _class_names("checkpoint_modules", checkpoint_modules),
            "offload_activations": _choice("offload_activations", offload_activations, get_args(OffloadActivations)),
            "tile_above": _size("tile_above", tile_above),
            "partition": _choice("partition", partition, get_args(Partition)),
            "verify": _choice("verify", verify, (False, True)),
            "trace": _output_file("trace", trace),
        }
        if values["checkpoint_modules"] and not values["checkpoint_activations"]:
            raise ConfigError(
                "checkpoint_modules says which blocks, but checkpoint_activations is False\n"
                "  fix:   checkpoint_activations=True, or leave checkpoint_modules out"
            )
        if values["offload_activations"] in (True, "arena") and not values["checkpoint_activations"]:
            raise ConfigError(
                f"offload_activations={values['offload_activations']!r} is about the inputs of recomputed blocks; "
                "checkpoint_activations is False\n"
                '  fix:   checkpoint_activations=True, or offload_activations="all"'
            )
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen: the only place that sets

    def memory_budget(self, num_ranks: int = 1) -> int:
        """Return the bytes of host RAM that one of `num_ranks` engines on this machine may hold.

        This is `memory` if set. Otherwise it is 70% of the memory available now, or left under the container's limit,
        divided by the ranks. The result changes over time: the engine asks once, when the model is prepared.
        """
        if self.memory is not None:
            return self.memory
        return int(host_memory().available * MEASURED_FRACTION) // num_ranks

    def replace(self, **changes: object) -> Self:
        """Return a copy with some settings changed, checked like a new one."""
        return self.from_dict({name: getattr(self, name) for name in _field_names()} | changes)

    @classmethod
    def from_dict(cls, settings: Mapping[str, object]) -> Self:
        """Make a Config from a mapping such as `to_dict` returns; missing settings have their defaults."""
        return cls(**settings)  # type: ignore[arg-type]  # every value is checked by the constructor

    @classmethod
    def from_file(cls, path: PathLike) -> Self:
        """Read a .json or .toml file. Relative paths in it are relative to the working directory."""
        settings = read_settings(Path(path))
        try:
            return cls.from_dict(settings)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def from_deepspeed(cls, settings: Mapping[str, object] | PathLike) -> Self:
        """Make a Config from a DeepSpeed config, as a mapping or the path of its JSON file.

        Warns of fields that would change training and have no equivalent. `zero-infinity convert-config` shows what
        becomes of each field.
        """
        given = settings if isinstance(settings, Mapping) else read_settings(Path(settings))
        converted = convert(given)
        for note in converted.notes:
            if note.verdict in (Verdict.NOT_SUPPORTED, Verdict.UNKNOWN):
                text = f"DeepSpeed's {note.field} has no equivalent: {note.text}"
                warnings.warn(text, ConfigWarning, stacklevel=2)
        return cls.from_dict(converted.settings)

    def to_dict(self) -> dict[str, object]:
        """Return plain values (numbers, strings, lists, None), which `from_dict` turns into an equal Config."""
        return {name: _plain(getattr(self, name)) for name in _field_names()}

    def to_json(self) -> str:
        """Return the settings as JSON, for `from_file`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def to_toml(self) -> str:
        """Return the settings as TOML, for `from_file`. Settings that are None are left out."""
        # A JSON scalar or list of strings is TOML too, except that TOML wants DEL escaped.
        lines = (
            f"{name} = {json.dumps(value, ensure_ascii=False)}".replace("\x7f", "\\u007f")
            for name, value in self.to_dict().items()
            if value is not None
        )
        return "\n".join(lines) + "\n"


def _field_names() -> list[str]:
    return [field.name for field in fields(Config)]


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _wrong(field: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{field}={value!r} is not valid; accepted: {accepted}")


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for name in unknown:
        near = difflib.get_close_matches(name, _field_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(_field_names())}"
        raise ConfigError(f"unknown setting {name!r}; {hint}")


def _size(field: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        num_bytes = parse_bytes(value)  # type: ignore[arg-type]  # it checks the type itself
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None
    if num_bytes == 0:
        raise _wrong(field, value, 'a size above zero such as "4GiB", or None to measure')
    return num_bytes


def _memory(field: str, value: object) -> int | None:
    num_bytes = _size(field, value)
    if num_bytes is not None and num_bytes > (total := host_memory().total):
        message = f"{field} is {format_bytes(num_bytes)}, but this machine or its container has {format_bytes(total)}"
        warnings.warn(message, ConfigWarning, stacklevel=3)  # past __init__: who called
    return num_bytes


def _path(field: str, value: object) -> Path:
    """Return an absolute path, so that a later chdir does not change its meaning."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise _wrong(field, value, "a path")
    return Path(value).expanduser().absolute()


def _directories(field: str, value: object) -> tuple[Path, ...]:
    if value is None:
        return ()
    several = not isinstance(value, str | os.PathLike)
    if several and not isinstance(value, Iterable):
        raise _wrong(field, value, "a directory, several directories, or None")
    paths = tuple(_path(field, item) for item in (value if isinstance(value, Iterable) and several else [value]))
    for path in paths:
        _check_directory(field, path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise _wrong(field, value, "directories that differ: striping over the same one twice gains nothing")
    return paths


def _check_directory(field: str, path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{field}: {path} does not exist\n  fix:   mkdir -p {path}, or mount the drive there")
    if not path.is_dir():
        raise ConfigError(f"{field}: {path} is a file; accepted: a directory, several directories, or None")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{field}: {path} is not writable by this user\n  fix:   its permissions, or another directory"
        )


def _output_file(field: str, value: object) -> Path | None:
    if value is None:
        return None
    path = _path(field, value)
    if path.is_dir():
        raise ConfigError(f"{field}: {path} is a directory; accepted: the name of a file to write, or None")
    _check_directory(field, path.parent)
    return path


def _choice(field: str, value: object, choices: tuple[object, ...]) -> object:
    # Compare the type too, because True == 1 and stage=1.0 is a mistake.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _wrong(field, value, ", ".join(repr(choice) for choice in choices))
    return value


def _dtype(field: str, value: object) -> str | None:
    if value is None:
        return None
    name = str(value).removeprefix("torch.")  # str(torch.float32) is "torch.float32"
    if name not in get_args(DType):
        raise _wrong(field, value, ", ".join(repr(choice) for choice in get_args(DType)) + ", or None")
    return name


def _integer(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(field, value, "an integer")
    return value


def _positive_int(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(field, value, "an integer of at least 1")
    return value


def _interval(field: str, value: object) -> bool | int:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1:
        raise _wrong(field, value, "False, True, or an integer of at least 1 for every k-th block")
    return value


def _class_names(field: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = [value] if isinstance(value, str | type) or not isinstance(value, Iterable) else list(value)
    names: dict[str, None] = {}
    for item in listed:
        if not isinstance(item, str | type) or not item:
            raise _wrong(field, value, 'a module class, its name such as "LlamaDecoderLayer", or several')
        names[f"{item.__module__}.{item.__qualname__}" if isinstance(item, type) else item] = None
    return tuple(names)


def _norm(field: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise _wrong(field, value, "a finite number above zero, or None for no clipping")
    return float(value)


def read_settings(path: Path) -> Mapping[str, object]:
    """The mapping in a settings file."""
    parsers = {".json": json.loads, ".toml": tomllib.loads}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise ConfigError(f"{path}: the suffix {path.suffix!r} is not known; accepted: .json, .toml")
    try:
        settings = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # also what both parsers and a wrong encoding raise
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: holds a {type(settings).__name__}; accepted: one table of settings")
    return settings
