"""The policy: LRU while nothing is known, Belady's choice once the order is, and sane behaviour when it changes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import num_lines

from zero_infinity.policy.cache_policy import NOTHING, CachePolicy, Decision, NoRoomError


class Tier:
    """Carries decisions out, and checks each of them."""

    def __init__(self, budget: int, lookahead: int = 0, sizes: Sequence[int] = (1,) * 16) -> None:
        self.pins: set[int] = set()
        self.policy = CachePolicy(budget, lookahead, self.pins.__contains__)
        self.sizes = sizes
        for block, size in enumerate(sizes):
            self.policy.add(block, size)
        self.content: set[int] = set()
        self.num_fetches = 0

    def access(self, block: int) -> Decision:
        decision = self.policy.access(block)
        for victim in decision.evict:
            assert victim in self.content, "evicts what is not there"
            assert victim not in self.pins, "evicts what is in use"
            assert victim != block, "evicts what is used now"
            self.content.remove(victim)
        for new in decision.fetch:
            assert new not in self.content, "fetches what is there"
            self.content.add(new)
            self.num_fetches += 1
        assert not set(decision.evict) & set(decision.fetch), "takes a block out and in for nothing"
        assert block in self.content
        self.check()
        return decision

    def forget(self, block: int) -> None:
        self.policy.forget(block)
        self.content.discard(block)
        self.check()

    def expire(self, block: int) -> None:
        self.policy.expire(block)
        self.content.discard(block)
        self.check()

    def look_ahead(self) -> Decision:
        decision = self.policy.look_ahead()
        assert not set(decision.evict) - self.content
        assert not set(decision.fetch) & self.content - set(decision.evict)
        self.content = (self.content - set(decision.evict)) | set(decision.fetch)
        self.num_fetches += len(decision.fetch)
        self.check()
        return decision

    def check(self) -> None:
        assert self.policy.cached_bytes == sum(self.sizes[b] for b in self.content) <= self.policy.budget
        assert all((block in self.policy) == (block in self.content) for block in range(len(self.sizes)))

    def cycle(self, order: Sequence[int]) -> list[Decision]:
        decisions = [self.access(block) for block in order]
        self.policy.end_cycle()
        return decisions

    def fetches_in(self, order: Sequence[int]) -> int:
        before = self.num_fetches
        self.cycle(order)
        return self.num_fetches - before


def fewest_fetches(order: Sequence[int], budget: int, content: frozenset[int]) -> int:
    """By trying everything: all contents that are reachable, with the fewest fetches that lead there."""
    reachable = {content: 0}
    for block in order:
        following: dict[frozenset[int], int] = {}
        for state, cost in reachable.items():
            if block in state:
                choices = [(state, cost)]
            elif len(state) < budget:
                choices = [(state | {block}, cost + 1)]
            else:
                choices = [(state - {victim} | {block}, cost + 1) for victim in state]
            for choice, price in choices:
                following[choice] = min(price, following.get(choice, price))
        reachable = following
    return min(reachable.values())


# The first cycle


def test_without_an_order_the_least_recently_used_leaves() -> None:
    tier = Tier(3)
    for block in (0, 1, 2, 0):
        tier.access(block)
    assert tier.access(3) == Decision(evict=(1,), fetch=(3,))
    assert tier.access(4) == Decision(evict=(2,), fetch=(4,))
    assert tier.access(0) == NOTHING
    assert tier.policy.order == ()


def test_without_an_order_nothing_is_fetched_ahead() -> None:
    tier = Tier(8, lookahead=8)
    assert all(decision.fetch == (block,) for block, decision in enumerate(map(tier.access, range(5))))


def test_recency_outlasts_the_end_of_an_order() -> None:
    tier = Tier(3)
    tier.cycle([2, 1, 0])
    tier.policy.end_cycle(same_order=False)
    assert tier.policy.order == ()
    assert tier.access(5).evict == (2,)
    assert tier.access(6).evict == (1,)


# Belady


@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    budget=st.integers(1, 4),
    cycles=st.integers(1, 3),
)
def test_without_lookahead_no_policy_fetches_less(order: list[int], budget: int, cycles: int) -> None:
    tier = Tier(budget)
    tier.cycle(order)
    content = frozenset(tier.content)
    fetches = sum(tier.fetches_in(order) for _ in range(cycles))
    assert fetches == fewest_fetches(order * cycles, budget, content)


def test_all_short_orders_are_optimal() -> None:
    for length, budget in itertools.product(range(1, 6), (2, 3)):
        for order in itertools.product(range(4), repeat=length):
            tier = Tier(budget)
            tier.cycle(order)
            content = frozenset(tier.content)
            fetches = tier.fetches_in(order) + tier.fetches_in(order)
            assert fetches == fewest_fetches(order * 2, budget, content), (order, budget)


def test_a_cyclic_scan_keeps_what_it_can() -> None:
    tier = Tier(6, sizes=[1] * 10)
    for _ in range(4):
        tier.cycle(range(10))
    # One place is for passing through; LRU would fetch all ten.
    assert tier.fetches_in(range(10)) + tier.fetches_in(range(10)) <= 10


def test_forward_and_backward_meet_in_the_middle() -> None:
    order = [*range(10), *reversed(range(10))]
    tier = Tier(6, sizes=[1] * 10)
    tier.cycle(order)
    tier.cycle(order)
    assert tier.fetches_in(order) == 2 * (10 - 6)


@pytest.mark.parametrize("lookahead", [0, 5, 100])
def test_what_fits_is_never_evicted_nor_fetched_again(lookahead: int) -> None:
    order = [*range(8), *reversed(range(8))]
    tier = Tier(8, lookahead, sizes=[1] * 8)
    assert tier.fetches_in(order) == 8
    for _ in range(3):
        assert tier.cycle(order) == [NOTHING] * 16


# Looking ahead


def test_the_next_blocks_are_fetched_in_their_order() -> None:
    tier = Tier(4, lookahead=2, sizes=[1] * 8)
    tier.cycle(range(8))
    decision = tier.access(0)
    assert decision.fetch == (0, 1, 2)
    assert tier.access(1).fetch == (3,)


def test_the_window_is_counted_in_bytes() -> None:
    sizes = [1, 2, 3, 1, 1, 1, 1, 1]
    tier = Tier(11, lookahead=5, sizes=sizes)
    tier.cycle(range(8))
    tier.forget(1)
    tier.forget(2)
    tier.forget(3)
    assert tier.access(0).fetch == (1, 2)
    assert tier.access(1).fetch == (3,)


@given(
    order=st.lists(st.integers(0, 7), min_size=1, max_size=24),
    budget=st.integers(4, 16),
    lookahead=st.integers(0, 16),
    sizes=st.lists(st.integers(1, 4), min_size=8, max_size=8),
)
def test_looking_ahead_never_costs_something_that_is_needed_sooner(
    order: list[int], budget: int, lookahead: int, sizes: list[int]
) -> None:
    tier = Tier(budget, lookahead, sizes)
    tier.cycle(order)
    for _ in range(2):
        for place, block in enumerate(order):
            ahead = order[place + 1 :] + order
            decision = tier.access(block)
            fetched_ahead = [b for b in decision.fetch if b != block]
            for victim in decision.evict:
                use = ahead.index(victim) if victim in ahead else len(ahead)
                if fetched_ahead and block not in decision.fetch:
                    assert all(ahead.index(b) < use for b in fetched_ahead)
            assert [ahead.index(b) for b in fetched_ahead] == sorted(ahead.index(b) for b in fetched_ahead)
        tier.policy.end_cycle()


@given(
    order=st.lists(st.integers(0, 7), min_size=1, max_size=24),
    budget=st.integers(4, 16),
    lookahead=st.integers(0, 16),
    sizes=st.lists(st.integers(1, 4), min_size=8, max_size=8),
)
def test_the_window_is_full_after_every_access(order: list[int], budget: int, lookahead: int, sizes: list[int]) -> None:
    """What slides along must be what a look at the whole order would give: no hole before the first obstacle."""
    tier = Tier(budget, lookahead, sizes)
    tier.cycle(order)
    for _ in range(2):
        for place, block in enumerate(order):
            tier.access(block)
            ahead = (order[place + 1 :] + order)[: len(order)]
            room, seen = lookahead, set()
            for position, other in enumerate(ahead):
                if other in seen:
                    continue
                seen.add(other)
                room -= sizes[other]
                if room < 0:
                    break
                if other not in tier.content:
                    later = [b for b in tier.content if b != block and b not in ahead[: position + 1]]
                    free = budget - sum(sizes[b] for b in tier.content)
                    assert free + sum(sizes[b] for b in later) < sizes[other], "room for the next, but not fetched"
                    break
        tier.policy.end_cycle()


def test_what_is_forgotten_in_the_window_is_fetched_again_before_what_follows() -> None:
    tier = Tier(6, lookahead=4, sizes=[1] * 12)
    tier.cycle(range(12))
    tier.access(0)
    assert {1, 2, 3, 4} <= tier.content
    tier.forget(2)
    assert tier.access(1).fetch == (2, 5)


def test_what_will_expire_before_its_next_use_is_not_fetched_ahead_until_then() -> None:
    tier = Tier(4, lookahead=4, sizes=[1] * 8)
    forward, backward = list(range(8)), list(range(7, 0, -1))  # 0 is not used in backward

    def train() -> list[int]:
        """One step, with an update of each block after its last use; returns fetches between accesses."""
        ahead: list[int] = []
        for block in forward:
            tier.access(block)
        for block in backward:
            tier.access(block)
            assert 0 not in tier.content, "its content is about to expire"
            tier.expire(block)
            ahead += tier.look_ahead().fetch
        tier.expire(0)
        ahead += tier.look_ahead().fetch
        tier.policy.end_cycle()
        return ahead

    train()
    train()
    before = tier.num_fetches
    assert [train() for _ in range(3)] == [[3, 2, 1, 3, 2, 1, 0]] * 3  # for backward, then for the next forward
    # All 8 once for forward, and the 3 that backward does not find: no fetch was in vain.
    assert tier.num_fetches - before == 3 * (8 + 3)
    assert {0, 1, 2, 3} <= tier.content, "the next step finds its first blocks"


def test_an_end_that_does_not_come_is_forgotten() -> None:
    tier = Tier(2, lookahead=2, sizes=[1] * 4)

    def train(*, expires: bool) -> None:
        for block in range(4):
            tier.access(block)
        if expires:
            tier.expire(0)
            tier.look_ahead()
        tier.policy.end_cycle()

    for _ in range(3):
        train(expires=True)
    assert 0 in tier.content
    train(expires=False)
    assert 0 not in tier.content, "it was expected to expire"
    assert 0 in tier.access(0).fetch
    for block in range(1, 4):
        tier.access(block)
    assert 0 in tier.content


# Limits


def test_what_is_in_use_is_never_evicted() -> None:
    tier = Tier(3)
    for block in range(3):
        tier.access(block)
    tier.pins.update((0, 1))
    assert tier.access(3).evict == (2,)
    tier.pins.add(3)
    with pytest.raises(NoRoomError) as caught:
        tier.access(4)
    assert (caught.value.needed, caught.value.budget, caught.value.in_use) == (1, 3, (0, 1, 3))
    tier.check()
    tier.pins.remove(1)
    assert tier.access(4).evict == (1,)


def test_more_than_the_budget_is_refused() -> None:
    tier = Tier(3, sizes=[1, 4])
    tier.access(0)
    with pytest.raises(NoRoomError, match="4 bytes needed, budget 3"):
        tier.access(1)
    tier.check()


def test_nothing_small_leaves_for_nothing() -> None:
    """The small one is farthest and goes first; but the large one has to go anyway and is enough."""
    tier = Tier(5, sizes=[1, 4, 4])
    tier.cycle([0, 1])
    tier.policy.end_cycle(same_order=False)
    assert tier.access(2) == Decision(evict=(1,), fetch=(2,))


def test_an_unknown_block_used_twice_is_counted_once() -> None:
    """It has no place in the order, so its rank does not change; and it must not be evicted twice for one's room."""
    tier = Tier(4, sizes=[1, 1, 1, 1, 1, 3])
    tier.cycle([0, 1, 2, 3])
    tier.access(0)
    tier.access(4)
    tier.access(4)
    tier.access(4)
    tier.access(5)
    assert 5 in tier.content


def test_a_forgotten_block_that_comes_back_is_counted_once() -> None:
    """It comes back for the same use as before, so what was noted about it then looks valid again."""
    tier = Tier(3, lookahead=3, sizes=[1, 1, 1, 3])
    tier.cycle([0, 1, 2])
    tier.access(0)
    tier.forget(2)
    assert tier.access(0).fetch == (2,)
    assert set(tier.access(3).evict) == {0, 1, 2}


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("access"), st.integers(0, 9)),
        st.tuples(st.just("forget"), st.integers(0, 9)),
        st.tuples(st.just("expire"), st.integers(0, 9)),
        st.tuples(st.just("look ahead"), st.integers(0, 9)),
        st.tuples(st.just("pin"), st.integers(0, 9)),
        st.tuples(st.just("unpin"), st.integers(0, 9)),
        st.tuples(st.just("cycle"), st.integers(0, 9)),
        st.tuples(st.just("follow"), st.integers(1, 12)),
    ),
    max_size=80,
)


def play(events: list[tuple[str, int]], budget: int, lookahead: int, sizes: list[int]) -> list[Decision]:
    tier = Tier(budget, lookahead, sizes)
    decisions: list[Decision] = []
    for kind, number in events:
        wanted = [number] if kind == "access" else []
        if kind == "follow":  # as the order says, so that it is also relied upon
            order = tier.policy.order
            wanted = [order[i % len(order)] for i in range(number)] if order else []
        for block in wanted:
            needed = sum(sizes[b] for b in (tier.pins & tier.content) | {block})
            if needed <= budget:
                decisions.append(tier.access(block))
            else:
                with pytest.raises(NoRoomError):
                    tier.access(block)
                tier.check()
        if kind == "forget":
            tier.forget(number)
        elif kind == "expire":
            tier.expire(number)
        elif kind == "look ahead":
            decisions.append(tier.look_ahead())
        elif kind == "pin" and sum(sizes[b] for b in tier.pins | {number}) <= budget // 2:
            tier.pins.add(number)
        elif kind == "unpin":
            tier.pins.discard(number)
        elif kind == "cycle":
            tier.policy.end_cycle(same_order=number != 0)
    return decisions


@given(
    events=EVENTS,
    budget=st.integers(4, 20),
    lookahead=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 4), min_size=10, max_size=10),
)
def test_any_history_stays_within_its_limits_and_is_repeatable(
    events: list[tuple[str, int]], budget: int, lookahead: int, sizes: list[int]
) -> None:
    assert play(events, budget, lookahead, sizes) == play(events, budget, lookahead, sizes)


# When the order changes


def deviating(change: Callable[[list[int]], list[int]]) -> Tier:
    """Ten blocks, six places; known order; then one cycle that differs, followed by the usual one."""
    order = [*range(10), *reversed(range(10))]
    tier = Tier(6, 3, sizes=[1] * 12)
    for _ in range(2):
        tier.cycle(order)
    changed = change(list(order))
    tier.cycle(changed)
    assert tier.policy.order == tuple(changed)
    tier.cycle(order)
    assert tier.policy.order == tuple(order)
    return tier


@pytest.mark.parametrize(
    ("change", "deviations"),
    [
        pytest.param(lambda o: o[:3] + o[6:], 6, id="skipped"),
        pytest.param(lambda o: [*o[:4], o[3], *o[4:]], 2, id="repeated"),
        pytest.param(lambda o: [*o[:4], 11, *o[4:]], 2, id="unknown"),
        pytest.param(lambda o: [*o[:4], o[5], o[4], *o[6:]], 4, id="swapped"),
        pytest.param(lambda o: o[10:], 14, id="second half"),
        pytest.param(lambda o: o[:10], 10, id="first half"),
        pytest.param(lambda o: o + o, 0, id="twice"),
    ],
)
def test_a_deviation_is_followed_and_learnt(change: Callable[[list[int]], list[int]], deviations: int) -> None:
    assert deviating(change).policy.num_deviations <= deviations


def test_what_was_skipped_is_not_fetched_ahead() -> None:
    tier = Tier(4, 2, sizes=[1] * 12)
    tier.cycle(range(12))
    tier.access(0)
    tier.access(5)
    assert {6, 7} <= tier.content
    tier.access(6)
    assert {7, 8} <= tier.content
    assert not {2, 3, 4} & tier.content
    assert tier.policy.num_deviations == 1


def test_a_repetition_does_not_lose_the_place() -> None:
    tier = Tier(4, 2, sizes=[1] * 12)
    tier.cycle(range(12))
    for block in range(5):
        tier.access(block)
    assert tier.access(4) == NOTHING
    assert tier.access(5).fetch == (7,)


def test_two_unexpected_accesses_in_a_row_find_a_place_far_ahead() -> None:
    order = [*range(6), *range(6), *range(6), 7, 8, 9, 10, 11]
    tier = Tier(4, 2, sizes=[1] * 12)
    tier.cycle(order)
    tier.access(7)  # more than half a cycle ahead: it could as well be late
    assert tier.policy.num_deviations == 1
    tier.access(8)
    for block in (9, 10, 11):
        assert block in tier.content
        tier.access(block)
    assert tier.policy.num_deviations == 2


def test_an_unfinished_cycle_begins_anew() -> None:
    tier = Tier(4, 2, sizes=[1] * 8)
    tier.cycle(range(8))
    for block in range(8):
        tier.access(block)
    tier.policy.end_cycle()
    tier.policy.end_cycle()  # nothing happened: the order stays
    assert tier.policy.order == tuple(range(8))
    assert tier.access(0).fetch[-1:] in ((), (2,))
    assert {1, 2} <= tier.content


# Cost


def lines_per_access(policy: CachePolicy[int], order: Sequence[int]) -> float:
    """What a cycle in this order costs."""

    def cycle() -> None:
        for block in order:
            policy.access(block)
        policy.end_cycle()

    return num_lines(cycle) / len(order)


@pytest.mark.parametrize("share", [0.1, 0.5, 2.0])
def test_a_cycle_of_a_large_model_is_cheap(share: float) -> None:
    """An access costs about the same, however large the model is."""
    costs = []
    for num_blocks in (200, 3_000):
        order = [*range(num_blocks), *reversed(range(num_blocks))]
        sizes = [1 + block % 5 for block in range(num_blocks)]
        budget = int(sum(sizes) * share)
        policy = CachePolicy(budget, budget // 3, lambda block: False)
        for block, size in enumerate(sizes):
            policy.add(block, size)
        costs.append([lines_per_access(policy, order) for _ in range(4)])
        # What fits must not pile up either.
        assert len(policy._farthest) <= 2 * num_blocks + 100
    few, many = (max(cost[1:]) for cost in costs)
    assert many < min(1.2 * few, 200)


def test_a_cycle_in_another_order_is_bearable() -> None:
    costs = []
    for num_blocks in (200, 3_000):
        policy = CachePolicy(num_blocks // 4, num_blocks // 12, lambda block: False)
        for block in range(num_blocks):
            policy.add(block, 1)
        costs.append([lines_per_access(policy, order) for order in (range(num_blocks), range(num_blocks - 1, -1, -1))])
    few, many = (max(cost) for cost in costs)
    assert many < min(1.2 * few, 200)


# ---------------------------------------------------------------------- training and inference


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=12),
    st.lists(st.integers(0, 7), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(2, 8),
)
def test_inference_between_steps_leaves_the_order_of_training_alone(
    steps: list[int], forward: list[int], num_forwards: int, budget: int
) -> None:
    tier = Tier(budget, lookahead=2)
    for _ in range(2):
        tier.cycle(steps)
    learnt = tier.policy.order
    tier.policy.follow(inference=True)
    for _ in range(num_forwards):
        tier.cycle(forward)
    assert tier.policy.order == tuple(forward)
    tier.policy.follow(inference=False)
    assert tier.policy.order == learnt
    before = tier.policy.num_deviations
    tier.cycle(steps)
    assert tier.policy.num_deviations == before, "training has lost its place"


def test_what_fits_stays_between_forwards() -> None:
    """What does not fit is fetched, and what is fetched ahead has no room to stay."""
    tier = Tier(8, lookahead=1)
    tier.policy.follow(inference=True)
    order = list(range(16))
    counts = [tier.fetches_in(order) for _ in range(24)]
    assert counts[0] == 16
    assert sum(counts[2:]) <= 22 * (16 - 8 + 1.5)


def test_a_changed_order_forgets_that_of_inference_too() -> None:
    tier = Tier(4)
    tier.policy.follow(inference=True)
    tier.cycle([1, 2, 3])
    tier.policy.follow(inference=False)
    tier.policy.end_cycle(same_order=False)
    tier.policy.follow(inference=True)
    assert tier.policy.order == ()


# A measurement: pytest -s -k traffic


def transformer_order(num_layers: int, num_chunks: int) -> tuple[list[int], list[int]]:
    """Block sizes and the accesses of one step: forward; backward, each layer followed by its records' update."""
    sizes = [2] * num_layers + [12 // num_chunks] * (num_layers * num_chunks)
    order = list(range(num_layers))
    for layer in reversed(range(num_layers)):
        order += [layer, layer]
        order += [num_layers + layer * num_chunks + chunk for chunk in range(num_chunks)]
    return sizes, order


def test_traffic_against_the_share_of_lookahead() -> None:
    """Printed, not judged: what fetching ahead costs in bytes, where the cache has an eighth of the states."""
    for num_layers, num_chunks in ((32, 6), (48, 12), (96, 3)):
        sizes, order = transformer_order(num_layers, num_chunks)
        total = sum(sizes)
        for share in (0, 1 / 8, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1):
            policy = CachePolicy(total // 8, int(total // 8 * share), lambda block: False)
            for block, size in enumerate(sizes):
                policy.add(block, size)
            for _ in range(4):
                fetched = sum(sizes[b] for block in order for b in policy.access(block).fetch)
                policy.end_cycle()
            print(f"{num_layers} layers x {num_chunks} chunks, lookahead {share:.3f}: {fetched / total:.3f} of states")


def test_random_orders_match_the_optimum_too() -> None:
    source = random.Random(3)
    for _ in range(20):
        order = [source.randrange(7) for _ in range(12)]
        tier = Tier(3)
        tier.cycle(order)
        content = frozenset(tier.content)
        assert tier.fetches_in(order) == fewest_fetches(order, 3, content)
