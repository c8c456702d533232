from __future__ import annotations

import pytest

from zero_infinity.errors import ConfigError
from zero_infinity.papers import catalogue


def test_unknown_exhibit_suggests() -> None:
    with pytest.raises(ConfigError, match=r"no exhibit 'zero-tabel1'; did you mean 'zero-table1'\?"):
        catalogue.make("zero-tabel1")


def test_every_name_once_papers_in_their_order() -> None:
    assert len(set(catalogue.NAMES)) == len(catalogue.NAMES) == 23
    assert catalogue.NAMES[0] == "zero-figure1"
    assert catalogue.NAMES[-1] == "bandwidth-sufficient"


def test_an_exhibit_has_the_name_that_it_is_asked_by() -> None:
    for name in catalogue.NAMES:
        if not name.startswith(("infinity-figure5", "infinity-figure6c", "infinity-figure6d", "infinity-figure6e")):
            assert catalogue.make(name).name == name
