"""Encodes Python values as JSON and decodes them exactly: states of schedulers, generators, loaders.

Numbers, strings, lists, tuples, dicts with any such keys, sets, bytes, tensors and arrays. Decoding never runs code.
Other types are refused when they are saved, with their place and type.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.checkpoint.safetensors_header import DTYPES, NAMES, num_bytes_of
from zero_infinity.errors import CheckpointError, UsageError

# Values are held in memory as text: meant for counters and random states, not for weights.
MAX_TENSOR_BYTES = 64 << 20
_MAX_LEVELS = 100  # of nesting: few enough to be decoded on any stack
_MAX_BITS = 8192  # of an integer; Python refuses to convert more than 4300 digits
_KIND = "$"  # the key whose value is the Python type
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def encode(value: Any, where: str) -> Any:
    """JSON for `value`; errors call it `where`."""
    return _encode(value, where, _MAX_LEVELS)


def _encode(value: Any, where: str, levels: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > _MAX_BITS:
            raise UsageError(f"{where} is a number of {value.bit_length():,} bits; at most {_MAX_BITS:,} can be saved")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_KIND: "float", "value": str(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, "tensor")
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _encode_tensor(torch.from_numpy(np.ascontiguousarray(value)), where, "array")
    if not levels and isinstance(value, list | Mapping | tuple | set | frozenset):
        raise UsageError(
            f"{where[:200]}... has more than {_MAX_LEVELS} levels of lists and dicts, which cannot be saved\n"
            "  fix:   fewer levels; a list must not contain itself"
        )
    if isinstance(value, list):
        return [_encode(item, f"{where}[{number}]", levels - 1) for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, levels - 1)
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set"
        items = [_encode(item, f"{where}[{number}]", levels - 1) for number, item in enumerate(value)]
        return {_KIND: kind, "items": items}
    if isinstance(value, bytes | bytearray):
        return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
    raise UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved\n"
        "  fix:   numbers, strings, lists, dicts and tensors, or an object with state_dict() and load_state_dict()"
    )


def _encode_mapping(value: Mapping[Any, Any], where: str, levels: int) -> Any:
    if all(isinstance(key, str) for key in value) and _KIND not in value and not isinstance(value, Counter):
        return {str(key): _encode(item, f"{where}[{key!r}]", levels) for key, item in value.items()}
    pairs = [[_encode(key, where, levels), _encode(item, f"{where}[{key!r}]", levels)] for key, item in value.items()]
    return {_KIND: "counter" if isinstance(value, Counter) else "dict", "items": pairs}


def _encode_tensor(tensor: torch.Tensor, where: str, kind: str) -> Any:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.nbytes > MAX_TENSOR_BYTES:
        raise UsageError(
            f"{where} is a tensor of {format_bytes(tensor.nbytes)}; at most {format_bytes(MAX_TENSOR_BYTES)} can be "
            "saved in extra\n  fix:   make it a buffer of the model, which is streamed, or save it yourself"
        )
    is_complex = tensor.dtype in _COMPLEX
    plain = torch.view_as_real(tensor) if is_complex else tensor
    if plain.dtype not in NAMES:
        raise UsageError(f"{where} is a tensor of {tensor.dtype}, which cannot be saved")
    data = base64.b64encode(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
    return {
        _KIND: kind,
        "dtype": NAMES[plain.dtype],
        "shape": list(plain.shape),
        "data": data,
        **({"complex": True} if is_complex else {}),
    }


def decode(value: Any, where: str) -> Any:
    """The inverse of `encode`. Raises `CheckpointError` for anything that `encode` does not produce."""
    try:
        return _decode(value, where)
    except RecursionError:
        raise CheckpointError(f"{where} is damaged: it is nested too deeply") from None


def _decode(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decode(item, where) for key, item in value.items()}
    try:
        return _decode_kind(value[_KIND], value, where)
    except (CheckpointError, RecursionError):
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where} is damaged: a saved {str(value[_KIND])[:40]} is invalid ({error!r})") from None


def _decode_kind(kind: object, value: dict[str, Any], where: str) -> Any:
    match kind:
        case "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[value["value"]]
        case "tuple":
            return tuple(_decode(item, where) for item in value["items"])
        case "set":
            return {_decode(item, where) for item in value["items"]}
        case "dict":
            return {_decode(key, where): _decode(item, where) for key, item in value["items"]}
        case "counter":
            return Counter({_decode(key, where): _decode(item, where) for key, item in value["items"]})
        case "bytes":
            return base64.b64decode(value["data"], validate=True)
        case "tensor":
            return _decode_tensor(value)
        case "array":
            return _decode_tensor(value).numpy()
    raise CheckpointError(f"{where} is damaged: {str(kind)[:40]!r} is not a known type")


def _decode_tensor(value: dict[str, Any]) -> torch.Tensor:
    dtype, shape = value["dtype"], [int(size) for size in value["shape"]]
    data = bytearray(base64.b64decode(value["data"], validate=True))
    if min(shape, default=0) < 0 or len(data) != num_bytes_of(dtype, shape):
        raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
    flat = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
    tensor = flat.view(shape)
    return torch.view_as_complex(tensor) if value.get("complex") else tensor
