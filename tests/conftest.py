"""Settings for every test: threads, seeds, and how hypothesis searches."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

# Before torch is imported, here and in every process that a test starts. Several workers share the cores, and an OpenMP
# team spins while it waits: on a busy machine that takes more time than the computation. A test that needs more threads
# sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start find tests/support, too.
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
# A shell starts what runs in the background with SIGINT ignored, and every process that a test starts inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from support import hypothesis_profile


def pytest_collectstart() -> None:
    """Before each module is imported: its tests take the profile that is loaded then.

    A module that imports torch's own tests leaves the profile that torch loads: ten examples, drawn at random.
    """
    hypothesis_profile.load()


@pytest.fixture(scope="session", autouse=True)
def _modules_are_never_garbage() -> None:
    """Many tests collect all garbage, some in a loop: they need not look at what lives for ever."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _cheap_seeds() -> None:
    if "torch" in sys.modules:
        from support.cpu_seeds import seed_the_cpu_only

        seed_the_cpu_only()


@pytest.fixture(autouse=True)
def _the_same_seeds() -> None:
    """What a test draws does not depend on what ran before in its process."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


# A few slow tests that come last keep one worker busy while the others have nothing left.
_SLOW_FIRST = ("memory", "benchmarks", "integrations", "scenarios", "multirank", "faults", "cli", "equivalence")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `half`, every second field of its table of parameters is long, as on a chessboard.

    So each value of each parameter is in `make test`, with half of the values of the others.
    """
    seen: dict[tuple[str, str], list[Any]] = {}
    for item in items:
        if not isinstance(item, pytest.Function) or item.get_closest_marker("half") is None:
            continue
        if sum(_number(item, name, seen) for name in _axes(item)) % 2:
            item.add_marker(pytest.mark.long)
    items.sort(key=_place)


def _axes(item: pytest.Function) -> list[str]:
    """The parameters of a test; the first one of those that change together."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    together = [name.replace(" ", "").split(",") if isinstance(name, str) else name for name in names]
    others = {name for group in together for name in group[1:]}
    return [name for name in item.callspec.params if name not in others]


def _number(item: pytest.Function, name: str, seen: dict[tuple[str, str], list[Any]]) -> int:
    """Which value of the parameter this is, in the order in which they appear."""
    values = seen.setdefault((item.nodeid.partition("[")[0], name), [])
    value = item.callspec.params[name]
    for number, known in enumerate(values):
        if known is value:
            return number
    values.append(value)
    return len(values) - 1


def _place(item: pytest.Item) -> int:
    kinds = [kind for kind in _SLOW_FIRST if kind in item.nodeid.split("/")]
    return _SLOW_FIRST.index(kinds[0]) if kinds else len(_SLOW_FIRST)
