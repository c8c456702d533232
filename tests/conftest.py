"""Settings for every test: how hypothesis searches."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: on a shared machine a slow example says nothing about the code. Modest, because everyone runs it.
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=False, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
