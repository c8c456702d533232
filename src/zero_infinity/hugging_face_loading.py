"""Makes `from_pretrained` of transformers read one tensor at a time, so that a model streams through `zi.init`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

# A switch of transformers: by default several threads read ahead without a bound, up to the whole model.
_ONE_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"


@contextmanager
def one_tensor_at_a_time() -> Iterator[None]:
    """Inside, a tensor is read when it is set on its module."""
    before = os.environ.get(_ONE_AT_A_TIME)
    os.environ[_ONE_AT_A_TIME] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ONE_AT_A_TIME]
        else:
            os.environ[_ONE_AT_A_TIME] = before
