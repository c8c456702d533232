"""How long a test waits for something that has to happen.

A test that passes never waits this long, so the time is chosen for the busiest machine; only a hang takes all of it. No
test may expect that something happens sooner, or that it has not happened yet after some time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 240.0  # less than half of pytest's own timeout, which ends the whole worker


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once the condition holds; it is an error if that does not happen."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {SECONDS:.0f} s"
        time.sleep(0.001)
