from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import zero_infinity
from zero_infinity import errors

PACKAGE = Path(zero_infinity.__file__).parent
PROJECT = Path(__file__).parents[2]


def test_all_is_what_we_promise() -> None:
    assert sorted(zero_infinity.__all__) == [
        "CapacityError",
        "CheckpointError",
        "Config",
        "ConfigError",
        "ConfigWarning",
        "CorruptionError",
        "DivergenceError",
        "EmulatedAccelerator",
        "EngineClosedError",
        "LostRankError",
        "RankError",
        "Stats",
        "StorageError",
        "StuckThreadError",
        "SwapSpaceError",
        "TornStepError",
        "TransferError",
        "UsageError",
        "ZeroInfinityError",
        "__version__",
        "accumulate",
        "clip_grad_norm_",
        "combine_optimizers",
        "export",
        "gathered",
        "init",
        "load",
        "load_pretrained",
        "plan",
        "prepare",
        "save",
        "stats",
        "stream_weights",
        "synchronize",
    ]


@pytest.mark.parametrize("name", zero_infinity.__all__)
def test_every_public_name_exists_and_is_listed(name: str) -> None:
    assert getattr(zero_infinity, name) is not None
    assert name in dir(zero_infinity)


def test_every_error_is_public() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(zero_infinity.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name for node in imports for alias in node.names} | {"__version__"} == set(zero_infinity.__all__)


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="module 'zero_infinity' has no attribute 'nothing'"):
        zero_infinity.nothing  # noqa: B018
    with pytest.raises(ImportError):
        from zero_infinity import nothing  # noqa: F401


def test_version_is_the_one_in_pyproject() -> None:
    pyproject = PROJECT / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("not run from a source tree")
    assert zero_infinity.__version__ == tomllib.loads(pyproject.read_text())["project"]["version"]


@pytest.mark.parametrize(
    "code",
    [
        "import zero_infinity",
        "import zero_infinity as zi; zi.Config(); zi.ConfigError",
        "import zero_infinity.cli.main",
    ],
)
def test_torch_is_imported_only_when_needed(code: str) -> None:
    script = f"import sys; {code}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_star_import() -> None:
    namespace: dict[str, object] = {}
    exec("from zero_infinity import *", namespace)
    assert set(zero_infinity.__all__) <= set(namespace)


def test_layers() -> None:
    if not (PROJECT / "pyproject.toml").exists():
        pytest.skip("not run from a source tree")
    lint_imports = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint_imports, "--no-cache"], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
