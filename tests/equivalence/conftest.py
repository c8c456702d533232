"""Every test here: tiny models whose blocks move all the same, one thread, and nothing left behind."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from unittest import mock

import pytest
import torch
from support.compare import engine_threads, wait_for_end
from torch.optim import optimizer as optimizer_module

from zero_infinity.policy import chunk_size, homes

_FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Two workers on two cores; what needs more threads says so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _one_tensor_at_a_time() -> Iterator[None]:
    """Plain optimizers on the device use no foreach kernels, which round differently from those of the host's updates."""
    with mock.patch.object(optimizer_module, "_get_foreach_kernels_supported_devices", list):
        yield


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a few KiB are moved like large ones, and their records are cut into several chunks."""
    monkeypatch.setattr(homes, "_SMALL_BYTES", 0)
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", 4096)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: object) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines end with their models. After a failure the traceback may hold a model: then nothing is checked.

    Marked `torch_keeps_the_model`: plain torch, too, never frees the parameters of a graph in whose backward a gradient
    hook has raised.
    """
    before = engine_threads()
    yield
    kept = request.node.get_closest_marker("torch_keeps_the_model") is not None
    if not kept and not request.node.stash.get(_FAILED, True):
        wait_for_end(before)
