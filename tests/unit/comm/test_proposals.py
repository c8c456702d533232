"""What is exchanged next where ranks want different things: the same on every rank, and everything in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zero_infinity.comm.proposals import Chosen, Proposals
from zero_infinity.comm.topics import IDLE, PAUSE, Topic


class Table:
    """The channels of several ranks, which propose in rounds."""

    def __init__(self) -> None:
        self.said: list[int] = []

    def propose(self, _: Topic) -> list[int]:
        return self.said


def run(wanted: list[list[int]]) -> tuple[list[Chosen], int]:
    """Every rank wants these units, in this order, and then pauses. Returns what was exchanged."""
    table = Table()
    ranks = [Proposals(table) for _ in wanted]
    queues = [list(units) for units in wanted]
    chosen = []
    while True:
        table.said = [queue[0] if queue else PAUSE.number for queue in queues]
        every = [rank.choose(PAUSE) for rank in ranks]
        assert all(one == every[0] for one in every), "ranks chose different exchanges"
        if every[0] is None:
            break
        chosen.append(every[0])
        for rank, queue in enumerate(queues):
            assert (queue[:1] == [every[0].number]) == (rank in every[0].wanted_by)
            if queue[:1] == [every[0].number]:
                queue.pop(0)
    assert not any(queues)
    return chosen, ranks[0].num_differences


def test_ranks_that_want_the_same_get_it_once() -> None:
    chosen, differences = run([[1, 2, 3], [1, 2, 3]])
    assert [(one.number, one.is_common) for one in chosen] == [(1, True), (2, True), (3, True)]
    assert differences == 0


def test_a_unit_that_one_rank_skips_costs_one_exchange() -> None:
    for order in ([1, 2, 3, 4], [4, 3, 2, 1]):
        chosen, differences = run([order, [unit for unit in order if unit != 3]])
        assert [one.number for one in chosen] == order
        assert differences == 1


def test_a_rank_that_wants_nothing_takes_part() -> None:
    chosen, _ = run([[1, 2], []])
    assert [(one.number, one.wanted_by, one.is_common) for one in chosen] == [
        (1, frozenset({0}), False),
        (2, frozenset({0}), False),
    ]


def test_a_pause_ends_when_every_rank_pauses_and_not_when_one_is_idle() -> None:
    table = Table()
    proposals = Proposals(table)
    for said, expected in (([PAUSE.number, IDLE.number], False), ([PAUSE.number, PAUSE.number], True)):
        table.said = said
        assert proposals.choose(PAUSE) is None
        assert proposals.all_pause is expected
    assert proposals.num_differences == 0


@given(st.lists(st.lists(st.integers(0, 5), max_size=8), min_size=2, max_size=4))
def test_every_rank_gets_everything_that_it_wants(wanted: list[list[int]]) -> None:
    chosen, _ = run(wanted)
    for rank, units in enumerate(wanted):
        assert [one.number for one in chosen if rank in one.wanted_by] == units
