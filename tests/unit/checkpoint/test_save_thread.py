from __future__ import annotations

import threading

import pytest

from zero_infinity.checkpoint.save_thread import BackgroundSave


def fail() -> None:
    raise ValueError("no")


def test_runs_beside_and_is_waited_for() -> None:
    save, may_end, done = BackgroundSave(None), threading.Event(), []
    assert not save.is_running
    save.start(lambda: (may_end.wait(), done.append(1)))
    assert save.is_running
    may_end.set()
    save.wait()
    assert not save.is_running
    assert done == [1]
    save.wait()  # nothing to wait for


def test_an_error_is_raised_once_and_without_frames() -> None:
    save = BackgroundSave(None)
    save.start(fail)
    with pytest.raises(ValueError, match="no"):
        save.wait()
    save.wait()
    save.close()


def test_at_shutdown_an_error_is_a_warning() -> None:
    save = BackgroundSave(None)
    save.start(fail)
    with pytest.warns(UserWarning, match="zi.save failed: no"):
        save.close()
    save.close()


def test_one_rank_has_no_channel_and_several_have_one_that_is_made_once() -> None:
    class Ranks:
        made: list[str]

        def channel(self, purpose: str) -> object:
            self.made.append(purpose)
            return object()

    assert BackgroundSave(None).connect() is None
    ranks = Ranks()
    ranks.made = []
    save = BackgroundSave(ranks)  # type: ignore[arg-type]
    assert ranks.made == []
    assert save.connect() is save.connect()
    assert ranks.made == ["checkpoints"]
