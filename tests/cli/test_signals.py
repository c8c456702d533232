from __future__ import annotations

import signal

import pytest

from zero_infinity.cli.signals import SignalWatch, watched


def test_a_second_signal_does_not_wait_for_the_step() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with watched() as interruption:
        with interruption.deferred():
            signal.raise_signal(signal.SIGTERM)
            assert (interruption.requested, interruption.exit_code) == (True, 143)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert SignalWatch().exit_code == 0
