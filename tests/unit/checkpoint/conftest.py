from __future__ import annotations

import pytest
from support.prepared import Prepared, prepare_small


@pytest.fixture
def prepared() -> Prepared:
    return prepare_small()
