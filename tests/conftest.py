"""Settings for every test: threads, and how hypothesis searches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before torch is imported, here and in every process that a test starts. Several workers share the cores, and an OpenMP
# team spins while it waits: on a busy machine that takes more time than the computation. A test that needs more threads
# sets their number itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that tests start find tests/support, too.
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))

from hypothesis import HealthCheck, settings
from support import device

# With TEST_DEVICE=lag everything runs on the test device, which is part of the process from then on.
collect_ignore = ["device"] if device.IS_CPU else []

# `make test` tries the same examples every time: whether it passes depends on the code alone, and an example that once
# failed is written down as @example. `make test-all` draws new ones (HYPOTHESIS_PROFILE=random) to find what nobody
# thought of. No deadline and no check of the time that examples take: on a busy machine they say nothing about the code.
settings.register_profile(
    "random",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("same", parent=settings.get_profile("random"), derandomize=True, database=None)
settings.register_profile("thorough", parent=settings.get_profile("random"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
