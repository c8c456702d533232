"""Settings for every test: threads, seeds, and how hypothesis searches."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

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
