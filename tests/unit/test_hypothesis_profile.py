"""Which examples property tests try, whatever a module that was imported before has loaded."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hypothesis_profile

AT_IMPORT = settings.default


def test_this_module_was_imported_with_the_profile_of_this_project() -> None:
    """In a whole run torch's own tests, which load a profile of theirs, were imported before."""
    assert settings.get_profile(hypothesis_profile.NAME) is AT_IMPORT


@pytest.mark.parametrize("other", ["default", "ci"])
def test_another_profile_does_not_outlive_the_module_that_loads_it(other: str) -> None:
    settings.load_profile(other)
    assert settings.default is not AT_IMPORT
    hypothesis_profile.load()
    assert settings.default is AT_IMPORT


@given(st.integers())
def test_examples_come_from_the_profile(number: int) -> None:
    assert settings.default.max_examples == AT_IMPORT.max_examples
