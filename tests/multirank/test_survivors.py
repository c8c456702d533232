"""A rank is killed at any moment, or stopped: the others end soon, and name it."""

from __future__ import annotations

import signal

import pytest
from support.patience import SECONDS
from support.survivors import Kill, Killed, run

# How long the others may live on. All that torch waits for by itself is longer: who ends before has noticed.
LIMIT = SECONDS


def check(kill: Kill, killed: Killed) -> None:
    for survivor in killed.survivors:
        assert survivor.exit_code == 0, (kill, killed)
        if killed.where == "end" and survivor.error is None:
            continue  # nobody needed it any more
        assert f"rank {kill.rank} " in str(survivor.error), (kill, killed)
        assert survivor.error.startswith(("LostRankError: ", "RankError: ")), (kill, killed)  # type: ignore[union-attr]
        assert survivor.seconds < LIMIT, (kill, killed)


# One of each phase; the counts of words differ between stages.
@pytest.mark.parametrize(
    "kill",
    [
        Kill(3, rank=1, word=1, stage=3),
        Kill(3, rank=0, word=9, stage=2, tcp=True),
        Kill(3, rank=2, word=22, stage=1, tcp=True),
        Kill(2, rank=0, word=40, stage=0, tcp=True),
        Kill(3, rank=1, word=64, stage=3),
        Kill(3, rank=0, word=99, stage=3, tcp=True),
        # gloo waits for a rank that has published its address: for 50 s, in "wire/2" of zi.prepare.
        Kill(3, rank=2, word=-1, stage=3, connection="wire/2"),
        Kill(2, rank=0, word=-1, stage=2, connection="wire/0", tcp=True),
    ],
    ids=str,
)
def test_a_rank_is_killed(kill: Kill) -> None:
    killed = run(kill)
    assert killed.where is not None
    check(kill, killed)


@pytest.mark.long
@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize(("num_ranks", "rank", "stage"), [(2, 0, 0), (3, 1, 3), (3, 0, 2), (3, 2, 1)])
def test_a_rank_is_killed_before_each_word(num_ranks: int, rank: int, stage: int, tcp: bool) -> None:
    phases = set()
    for word in range(1, run(Kill(num_ranks, rank, -1, stage, tcp)).words + 1):
        kill = Kill(num_ranks, rank, word, stage, tcp)
        killed = run(kill)
        phases.add(killed.where)
        check(kill, killed)
    assert phases >= {"prepare", "training", "save", "background save", "load"}


def test_a_rank_that_is_stopped_for_a_while_goes_on() -> None:
    """It is there: the others wait for it, and train the same bits."""
    undisturbed = run(Kill(2, rank=1, word=-1, stage=2))
    stopped = run(Kill(2, rank=1, word=40, stage=2, signal=signal.SIGSTOP, pause=2.0))
    assert [survivor.error for survivor in stopped.survivors] == [None]
    assert stopped.stopped is None
    assert stopped.weights == undisturbed.weights
    assert len(stopped.weights) == 1


def test_a_rank_that_is_stopped_for_longer_than_the_timeout_is_lost() -> None:
    kill = Kill(3, rank=1, word=50, stage=2, signal=signal.SIGSTOP, pause=10.0, timeout=3.0)
    killed = run(kill)
    check(kill, killed)
    assert "LostRankError" in str(killed.stopped), "when it goes on, nobody is there"
