from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import assert_same

import zero_infinity as zi
from zero_infinity.checkpoint import json_codec

keys = st.one_of(
    st.text(max_size=5), st.integers(-5, 5), st.just("$"), st.tuples(st.integers(0, 3), st.text(max_size=2))
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10), st.binary(max_size=10))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def through(value: Any) -> Any:
    return json_codec.decode(json.loads(json.dumps(json_codec.encode(value, "it"), allow_nan=False)), "it")


@given(values)
def test_round_trip(value: Any) -> None:
    assert repr(through(value)) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3),
        torch.tensor(3.5),
        torch.arange(5, dtype=torch.uint8),
        torch.randn(3).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64),
        torch.empty(0, 4),
        torch.tensor([math.nan, math.inf]),
    ],
)
def test_tensors(tensor: torch.Tensor) -> None:
    found = through(tensor)
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    if tensor.is_complex():
        found, tensor = torch.view_as_real(found), torch.view_as_real(tensor)
    assert_same("tensor", tensor, found)


def test_other_kinds() -> None:
    assert through(Counter({2: 1, 5: 2})) == Counter({2: 1, 5: 2})
    assert type(through(Counter())) is Counter
    assert through(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert through(np.float64(1.5)) == 1.5
    assert through(np.int64(3)) == 3
    np.testing.assert_array_equal(through(np.arange(4.0)), np.arange(4.0))
    assert through(torch.Size([1, 2])) == (1, 2)
    assert through({3, 5}) == {3, 5}


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(zi.UsageError, match=r"extra\['a'\]\[1\]\['b'\] is a builtins.object, which cannot be saved"):
        json_codec.encode({"a": [1, {"b": object()}]}, "extra")
    with pytest.raises(zi.UsageError, match="at most 64.0 MiB can be saved"):
        json_codec.encode([torch.empty(17 << 20)], "extra")
    with pytest.raises(zi.UsageError, match=r"extra\[0\] is a number of 16,610 bits; at most 8,192 can be saved"):
        json_codec.encode([10**5000], "extra")
    assert through(1 << 8191) == 1 << 8191


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(
            ["tensor", "tuple", "float", "F32", "BOOL", "AAAA", "nan", "x", "set", "counter", "dict", "array"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["$", "items", "data", "shape", "dtype", "value", "complex", "k"]), inner, max_size=5
        ),
    ),
    max_leaves=10,
)


@given(json_values)
def test_anything_else_is_read_or_refused(value: Any) -> None:
    try:
        json_codec.decode(value, "it")
    except zi.CheckpointError as error:
        assert "it is damaged" in str(error)


def test_nesting_without_end() -> None:
    value: Any = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(zi.CheckpointError, match="nested too deeply"):
        json_codec.decode(value, "it")
    with pytest.raises(zi.CheckpointError, match="nested too deeply"):
        json_codec.decode({"$": "tuple", "items": value}, "it")


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: (value,), lambda value: {"a": value}])
def test_what_is_saved_is_not_nested_too_deeply(wrap: Any) -> None:
    value = 0
    for _ in range(100):
        value = wrap(value)
    assert through(value) == value
    with pytest.raises(zi.UsageError, match=r"it\[.*\.\.\. has more than 100 levels of lists and dicts"):
        json_codec.encode(wrap(value), "it")
