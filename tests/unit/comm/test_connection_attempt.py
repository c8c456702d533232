"""An attempt to connect: nobody waits for it longer than asked."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from zero_infinity.comm.connection_attempt import AttemptState, ConnectionAttempt


def test_an_attempt_that_succeeds() -> None:
    may_end, made = threading.Event(), cast(Any, object())

    def connect() -> Any:
        may_end.wait()
        return made

    attempt = ConnectionAttempt(connect)
    assert attempt.state(0.0) is AttemptState.CONNECTING
    may_end.set()
    assert attempt.result() is made
    assert attempt.state(0.0) is AttemptState.CONNECTED


def test_an_attempt_that_fails() -> None:
    def connect() -> Any:
        raise RuntimeError("Connect timeout")

    attempt = ConnectionAttempt(connect)
    with pytest.raises(RuntimeError, match="Connect timeout"):
        attempt.result()
    assert attempt.state(0.0) is AttemptState.FAILED
