from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zero_infinity import ConfigError
from zero_infinity.byte_sizes import parse_count
from zero_infinity.models.byte_gpt import ByteGPT
from zero_infinity.models.presets import PRESETS, Shape, preset


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_that_it_counts_and_about_those_of_its_name(name: str) -> None:
    shape = PRESETS[name]
    with torch.device("meta"):  # shapes without memory
        model = ByteGPT(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.num_parameters
    assert shape.num_parameters == pytest.approx(parse_count(name), rel=0.07)


def test_the_count_of_a_tied_head() -> None:
    shape = Shape(layers=2, hidden=48, heads=3, seq=20, tied=True)
    assert sum(p.numel() for p in ByteGPT(shape).parameters()) == shape.num_parameters


def test_names_in_either_case() -> None:
    assert preset("1.3b") is PRESETS["1.3B"]


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no preset '1.4B'; did you mean 1.3B\? there are: 1M, 5M"):
        preset("1.4B")
    with pytest.raises(ConfigError, match=r"no preset '3M'; did you mean 5M\?"):
        preset("3M")
    with pytest.raises(ConfigError, match=r"no preset '300m'; did you mean 350M\?"):
        preset("300m")
    with pytest.raises(ConfigError, match="no preset 'huge'; there are: 1M"):
        preset("huge")


def test_heads_must_divide_hidden() -> None:
    with pytest.raises(ConfigError, match="hidden is 100 and heads is 3") as caught:
        Shape(layers=1, hidden=100, heads=3, seq=8)
    assert "heads=2, or hidden=102" in str(caught.value)


@pytest.mark.parametrize("field", ["layers", "hidden", "heads", "seq"])
def test_nothing_is_zero(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0"):
        Shape(**{"layers": 1, "hidden": 8, "heads": 1, "seq": 8, field: 0})


def test_needs_no_torch() -> None:
    code = "import sys; import zero_infinity.models.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
