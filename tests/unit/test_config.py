from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_infinity import config as config_module
from zero_infinity.config import MEASURED_FRACTION, Config, ConfigWarning
from zero_infinity.errors import ConfigError
from zero_infinity.machine import HostMemory

GIB = 1024**3


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> HostMemory:
    """8 GiB in total, 5 of them available, whatever the tests run on."""
    memory = HostMemory(physical=16 * GIB, limit=8 * GIB, available=5 * GIB)
    monkeypatch.setattr(config_module, "host_memory", lambda: memory)
    return memory


def make(field: str, value: object) -> Config:
    return Config.from_dict({field: value})


def test_defaults() -> None:
    assert Config().to_dict() == {
        "memory": None,
        "device_memory": None,
        "nvme": [],
        "stage": 3,
        "param_dtype": None,
        "compute_dtype": None,
        "reduce_dtype": None,
        "optim_dtype": None,
        "master": "auto",
        "rounding_seed": 0,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": None,
        "update": "auto",
        "checkpoint_activations": False,
        "checkpoint_modules": [],
        "offload_activations": False,
        "tile_above": None,
        "partition": "spread",
        "verify": False,
        "trace": None,
    }


def test_values_are_normalised(tmp_path: Path) -> None:
    config = Config(memory="2GiB", device_memory=4096, nvme=str(tmp_path), max_grad_norm=1, trace=tmp_path / "t.json")
    assert (config.memory, config.device_memory) == (2 * GIB, 4096)
    assert (config.nvme, config.trace) == ((tmp_path,), tmp_path / "t.json")
    assert config.max_grad_norm == 1.0
    assert isinstance(config.max_grad_norm, float)


def test_it_is_frozen_hashable_and_compares_by_value() -> None:
    config = Config(memory="2GiB")
    with pytest.raises(FrozenInstanceError):
        config.memory = 3  # type: ignore[misc]
    assert config == Config(memory=2 * GIB)
    assert hash(config) == hash(Config(memory=2 * GIB))
    assert repr(config).startswith("Config(memory=2147483648, ")
    with pytest.raises(TypeError):
        Config("2GiB")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("memory", "0", "above zero"),
        ("memory", 0, "above zero"),
        ("memory", "12 parsecs", '"512MiB"'),
        ("memory", -1, '"512MiB"'),
        ("memory", True, '"512MiB"'),
        ("memory", 1.5, '"512MiB"'),
        ("device_memory", "", '"512MiB"'),
        ("nvme", "", "a path"),
        ("nvme", 7, "a directory, several directories, or None"),
        ("nvme", [7], "a path"),
        ("stage", 4, "0, 1, 2, 3"),
        ("stage", True, "0, 1, 2, 3"),
        ("stage", "3", "0, 1, 2, 3"),
        ("param_dtype", "float64", "'float32', 'bfloat16', 'float16', or None"),
        ("compute_dtype", 16, "'float32', 'bfloat16', 'float16', or None"),
        ("reduce_dtype", "bf16", "'float32', 'bfloat16', 'float16', or None"),
        ("optim_dtype", "", "'float32', 'bfloat16', 'float16', or None"),
        ("master", "bfloat16", "'auto', 'float32', 'none'"),
        ("rounding_seed", "1", "an integer"),
        ("gradient_accumulation_steps", 0, "an integer of at least 1"),
        ("gradient_accumulation_steps", True, "an integer of at least 1"),
        ("gradient_accumulation_steps", 1.0, "an integer of at least 1"),
        ("max_grad_norm", 0, "a finite number above zero"),
        ("max_grad_norm", float("nan"), "a finite number above zero"),
        ("max_grad_norm", float("inf"), "a finite number above zero"),
        ("max_grad_norm", "1", "a finite number above zero"),
        ("update", "in_backward", "'auto', 'after_backward'"),
        ("verify", 1, "False, True"),
        ("trace", 3, "a path"),
    ],
)
def test_error_names_field_value_and_what_is_accepted(field: str, value: object, accepted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(field, value)
    message = str(caught.value)
    assert message.startswith(field)
    assert (repr(value) in message) or (field == "nvme" and "7" in message)
    assert accepted in message


def test_memory_larger_than_the_machine_warns_with_both_numbers_at_the_caller() -> None:
    with pytest.warns(ConfigWarning, match=r"memory is 9\.0 GiB, .* has 8\.0 GiB") as caught:
        config = Config(memory="9GiB")
    assert config.memory == 9 * GIB
    assert caught[0].filename == __file__


def test_memory_of_just_the_machine_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config(memory="8GiB", device_memory="80GiB")


def test_memory_budget_is_what_was_set_or_a_share_of_what_is_available(machine: HostMemory) -> None:
    assert Config(memory="2GiB").memory_budget(num_ranks=4) == 2 * GIB  # memory is per rank already
    assert Config().memory_budget() == int(5 * GIB * MEASURED_FRACTION)
    assert Config().memory_budget(num_ranks=2) == int(5 * GIB * MEASURED_FRACTION) // 2


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtypes_are_names_and_torch_dtypes(name: str) -> None:
    class TorchDtype:  # config is to work without torch; test_torch_dtype takes the real one
        def __str__(self) -> str:
            return f"torch.{name}"

    assert Config(param_dtype=name).param_dtype == name
    assert Config(optim_dtype=TorchDtype()).optim_dtype == name


def test_torch_dtype() -> None:
    torch = pytest.importorskip("torch")
    assert Config(compute_dtype=torch.bfloat16).compute_dtype == "bfloat16"


def test_nvme_several(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    assert Config(nvme=[first, str(second)]).nvme == (first, second)
    with pytest.raises(ConfigError, match="directories that differ"):
        Config(nvme=[first, first / ".." / "a"])


def test_nvme_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match=rf"nvme: {path} is a file; accepted: a directory"):
        Config(nvme=path)


def test_nvme_that_is_missing_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"nvme: {tmp_path}/no does not exist\n  fix:   mkdir -p {tmp_path}/no"):
        Config(nvme=tmp_path / "no")
    assert list(tmp_path.iterdir()) == []


def test_nvme_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="not writable"):
        Config(nvme=tmp_path)


def test_relative_paths_do_not_move_with_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(nvme=".", trace="trace.json")
    assert (config.nvme, config.trace) == ((tmp_path,), tmp_path / "trace.json")


def test_trace_needs_a_directory_that_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace: .* is a directory"):
        Config(trace=tmp_path)
    with pytest.raises(ConfigError, match="mkdir -p"):
        Config(trace=tmp_path / "no" / "trace.json")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("memroy", "did you mean 'memory'?"),
        ("max_norm", "did you mean 'max_grad_norm'?"),
        ("zzz", "there are: memory,"),
    ],
)
def test_unknown_setting_suggests_the_nearest(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({name: 1}))
    (tmp_path / "c.toml").write_text(f"{name} = 1\n")
    makers: list[Callable[[], Config]] = [
        lambda: Config(**{name: 1}),  # type: ignore[arg-type]
        lambda: Config.from_dict({name: 1}),
        lambda: Config().replace(**{name: 1}),
        lambda: Config.from_file(tmp_path / "c.json"),
        lambda: Config.from_file(tmp_path / "c.toml"),
    ]
    for maker in makers:
        with pytest.raises(ConfigError) as caught:
            maker()
        assert f"unknown setting {name!r}; {hint}" in str(caught.value)


def test_replace_checks_like_a_new_one() -> None:
    config = Config(memory="1GiB", stage=2)
    changed = config.replace(memory="2GiB")
    assert (changed.memory, changed.stage, config.memory) == (2 * GIB, 2, GIB)
    with pytest.raises(ConfigError, match="stage=9"):
        config.replace(stage=9)


DTYPES = st.sampled_from([None, "float32", "bfloat16", "float16"])
NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=20)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "memory": st.none() | st.integers(1, 8 * GIB),
        "device_memory": st.none() | st.integers(1, 2**50),
        "stage": st.integers(0, 3),
        "param_dtype": DTYPES,
        "compute_dtype": DTYPES,
        "reduce_dtype": DTYPES,
        "optim_dtype": DTYPES,
        "master": st.sampled_from(["auto", "float32", "none"]),
        "rounding_seed": st.integers(-(2**40), 2**40),
        "gradient_accumulation_steps": st.integers(1, 10**6),
        "max_grad_norm": st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        "update": st.sampled_from(["auto", "after_backward"]),
        "verify": st.booleans(),
        "trace": st.none() | NAMES.filter(lambda name: name not in (".", "..")).map(lambda name: f"/{name}-"),
    },
)


@given(CONFIGS)
def test_round_trip_through_dict_json_and_toml(settings: dict[str, object]) -> None:
    memory = HostMemory(physical=16 * GIB, limit=8 * GIB, available=5 * GIB)
    with pytest.MonkeyPatch.context() as patch:  # hypothesis runs many examples in one fixture's scope
        patch.setattr(config_module, "host_memory", lambda: memory)
        config = Config.from_dict(settings)
        assert Config.from_dict(config.to_dict()) == config
        assert Config.from_dict(json.loads(config.to_json())) == config
        assert Config.from_dict(tomllib.loads(config.to_toml())) == config


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_files(suffix: str, tmp_path: Path) -> None:
    config = Config(memory="2GiB", nvme=tmp_path, trace=tmp_path / 'qu"ote\x7f.json', update="after_backward")
    path = tmp_path / f"settings.{suffix}"
    path.write_text(getattr(config, f"to_{suffix}")())
    assert Config.from_file(path) == config
    assert Config.from_file(str(path)) == config


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "memory: 1", "accepted: .json, .toml"),
        ("c.json", "{", "c.json: "),
        ("c.json", "[1]", "holds a list; accepted: one table of settings"),
        ("c.toml", "memory = ", "c.toml: "),
        ("c.toml", "stage = 7", "c.toml: stage=7 is not valid"),
        ("c.json", None, "cannot be read: No such file"),
    ],
)
def test_a_bad_file_is_named(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        Config.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert message in str(caught.value)


def test_every_field_is_documented() -> None:
    assert [field.name for field in fields(Config) if field.name not in (Config.__doc__ or "")] == []


def test_config_does_not_import_torch() -> None:
    code = "import sys, zero_infinity.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
