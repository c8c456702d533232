"""Builds and registers the test device, and is `torch.lag`: what torch asks of a device's module."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import sys
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

SOURCES = Path(__file__).parent / "csrc"
BUILD = Path(__file__).parents[2] / "build" / "lag"
NAME = "lag_device"
BUILT = "built"  # a file that is there once the library is whole


def why_not() -> str | None:
    """The reason why the device cannot be built here; None if it can."""
    return None if shutil.which("g++") else "no C++ compiler (g++)"


@functools.cache
def load() -> ModuleType:
    """Build and register the device; returns the extension with its counters and settings."""
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(torch.__version__.encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    folder = BUILD / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    torch.utils.rename_privateuse1_backend("lag")
    extension = _import_built(folder) or _build(folder, sources)
    torch._register_device_module("lag", _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    extension.recurrent_cells = _register_recurrent_cells()  # registered as long as this object lives
    dist.Backend.register_backend("lag", functools.partial(_make_backend, extension), devices=["lag"])
    return extension


def _import_built(folder: Path) -> ModuleType | None:
    """Import what was built of the same sources, wherever they were then."""
    if not (folder / BUILT).exists():
        return None
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} has no {NAME}.so: remove the folder")
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _build(folder: Path, sources: list[Path]) -> ModuleType:
    from torch.utils import cpp_extension  # imports setuptools

    # As one file: reading torch's headers takes most of the time.
    whole = folder / "whole.cpp"
    whole.write_text("".join(f'#include "{file}"\n' for file in sources))
    extension: ModuleType = cpp_extension.load(
        NAME,
        [str(whole)],
        build_directory=str(folder),
        extra_cflags=["-O1", "-std=c++20", "-Wall", "-Wno-unused-function"],
        with_cuda=False,
    )
    (folder / BUILT).touch()
    return extension


def _make_backend(extension: ModuleType, store: Any, rank: int, size: int, timeout: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("lag", store), rank, size, timeout)
    return extension.make_backend(gloo, rank, size)


class Runtime:
    """The calls of CUDA's runtime that pin memory: a device module that has them is used like CUDA."""

    def __init__(self, extension: ModuleType) -> None:
        self._extension = extension

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:
        self._extension.host_register(address, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._extension.host_unregister(address)
        return 0


class GdsFile:
    """What `torch.cuda.gds.GdsFile` is for CUDA: reads a file into device memory at once, past streams and the host."""

    def __init__(self, extension: ModuleType, filename: str, flags: int) -> None:
        self._extension = extension
        self._descriptor = os.open(filename, flags)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def load_storage(self, storage: torch.UntypedStorage, offset: int = 0) -> None:
        self._extension.read_file(storage, self._descriptor, offset)

    def save_storage(self, storage: torch.UntypedStorage, offset: int = 0) -> None:
        self._extension.write_file(storage, self._descriptor, offset)


def _module(extension: ModuleType) -> ModuleType:
    """What torch expects of `torch.<device type>`."""
    module = ModuleType("torch.lag")

    def index_of(device: Any = None) -> int:
        if device is None:
            return torch.accelerator.current_device_index()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    def generator_of(device: Any) -> torch.Generator:
        return extension.default_generator(index_of(device))

    def get_rng_state(device: Any = "lag") -> torch.Tensor:
        return generator_of(device).get_state()

    def set_rng_state(state: torch.Tensor, device: Any = "lag") -> None:
        generator_of(device).set_state(state)

    def manual_seed(seed: int) -> None:
        generator_of(None).manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for index in range(extension.device_count()):
            generator_of(index).manual_seed(seed)

    names: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # torch's checkpoint keeps random states of such devices only
        "device": lambda device: torch.accelerator.device_index(index_of(device)),
        "_is_in_bad_fork": lambda: False,
        "device_count": extension.device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda device: torch.accelerator.set_device_index(index_of(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "empty_cache": torch.accelerator.memory.empty_cache,
        "Stream": torch.Stream,
        "Event": torch.Event,
    }
    if os.environ.get("TEST_DEVICE_PINS", "1") == "1":
        names["cudart"] = lambda: Runtime(extension)
    if os.environ.get("TEST_DEVICE_READS_FILES", "1") == "1":
        names["gds"] = SimpleNamespace(GdsFile=functools.partial(GdsFile, extension))
    for name, value in names.items():
        setattr(module, name, value)
    sys.modules["torch.lag"] = module
    return module


def _register_recurrent_cells() -> Any:
    """torch calls fused cells on every device but the CPU: here they are what the CPU computes, operation by operation."""

    def lstm(
        inputs: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        hidden_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        enter, forget, new, out = (_biased(inputs, input_bias) + _biased(hidden, hidden_bias)).chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell, inputs.new_empty(0)

    def gru(
        inputs: torch.Tensor,
        hidden: torch.Tensor,
        state: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        hidden_bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, hidden = _biased(inputs, input_bias), _biased(hidden, hidden_bias)
        (reset, update, new), (reset_by, update_by, new_by) = inputs.chunk(3, 1), hidden.chunk(3, 1)
        new = (new + (reset + reset_by).sigmoid() * new_by).tanh()
        return new + (update + update_by).sigmoid() * (state - new), inputs.new_empty(0)

    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):  # with and without autograd
        library.impl("_thnn_fused_lstm_cell", lstm, key)
        library.impl("_thnn_fused_gru_cell", gru, key)
    return library


def _biased(values: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return values if bias is None else values + bias
