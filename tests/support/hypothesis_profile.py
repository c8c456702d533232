"""How hypothesis searches.

`make test` tries the same examples every time: whether it passes depends on the code alone, and an example that once
failed is written down as @example. `make test-all` draws new ones (HYPOTHESIS_PROFILE=random) to find what nobody
thought of. No deadline and no check of the time that examples take: on a busy machine they say nothing about the code.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

NAME = os.environ.get("HYPOTHESIS_PROFILE", "same")

settings.register_profile(
    "random",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("same", parent=settings.get_profile("random"), derandomize=True, database=None)
settings.register_profile("thorough", parent=settings.get_profile("random"), max_examples=2000)


def load() -> None:
    settings.load_profile(NAME)
