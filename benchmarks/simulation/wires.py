"""Connections between ranks as gloo's are, and the key-value store, in one process.

Messages are not copied when they are sent, but when sender and receiver are there and the link has taken its time:
memory that is reused before `wait` returns shows in what arrives. Messages between two ranks with the same tag arrive
in order. A link can be slow, and can lose a message: then nothing more arrives over this connection, as with a network
that drops everything, until somebody's wait times out, which closes all of that thread's connections. The connections
of a killed rank are closed a moment later.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from benchmarks.simulation.scheduler import Scheduler, Task
from zero_infinity.comm.transport import Connections

# Longer than any link takes, shorter than the limit of a simulation.
TIMEOUT = timedelta(seconds=30)
# That gloo waits for a rank which does not connect.
_CONNECT_SECONDS = 50.0


@dataclass(slots=True)
class Links:
    """How messages travel; drawn by the seed."""

    slowest: float  # seconds that a message takes at most
    lost: int | None = None  # the number of the message that is lost, counted over all links
    # Bugs put in on purpose, each on the message with this number.
    arrives_empty: int | None = None
    overtakes: int | None = None  # from this number on, once: two messages of one size change places
    is_reused: bool = False  # who sends does not wait


class Work:
    """One message, on one side."""

    def __init__(self, network: Network, end: End, tensor: torch.Tensor, *, is_sent: bool) -> None:
        self._network = network
        self._end = end
        self.tensor = tensor
        self.is_sent = is_sent
        self.is_done = False
        self.error: str | None = None
        self.waiter: Task | None = None

    def wait(self, timeout: timedelta = TIMEOUT) -> bool:
        scheduler = self._network.scheduler
        if self.is_sent and self._network.links.is_reused:
            return True
        scheduler.pause()
        if not self.is_done and self.error is None:
            self.waiter = scheduler.task()
            if not scheduler.block(timeout.total_seconds()):
                self._end.close()
                raise RuntimeError(f"[simulated] Timed out waiting {timeout.total_seconds()} s")
        if self.error is not None:
            raise RuntimeError(self.error)
        return True

    def finish(self, error: str | None = None) -> None:
        if self.is_done or self.error is not None:
            return
        self.is_done, self.error = error is None, error
        if self.waiter is not None:
            self._network.scheduler.wake(self.waiter)


@dataclass(slots=True)
class Pipe:
    """One direction of one connection, for one tag."""

    sent: deque[Work]
    received: deque[Work]
    under_way: tuple[Work, Work] | None = None  # the message that arrives next


class End:
    """One rank's connections of one name."""

    def __init__(self, network: Network, name: str, rank: int) -> None:
        self._network = network
        self._name = name
        self._rank = rank
        self.closed: set[int] = set()  # peers

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._network.num_ranks

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._post(tensors[0], (self._name, self._rank, rank, tag), rank, is_sent=True)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Work:
        return self._post(tensors[0], (self._name, rank, self._rank, tag), rank, is_sent=False)

    def close(self) -> None:
        """As a wait that times out does."""
        for peer in range(self._network.num_ranks):
            if peer != self._rank:
                self._network.close(self._name, self._rank, peer)

    def _post(self, tensor: torch.Tensor, key: tuple[str, int, int, int], peer: int, *, is_sent: bool) -> Work:
        self._network.scheduler.pause()
        if peer in self.closed:
            raise RuntimeError(f"[simulated] Connection closed by peer {peer}")
        work = Work(self._network, self, tensor, is_sent=is_sent)
        self._network.post(key, work)
        return work


class Network:
    """All connections of a simulation."""

    def __init__(self, scheduler: Scheduler, num_ranks: int, links: Links, seed: object) -> None:
        self.scheduler = scheduler
        self.num_ranks = num_ranks
        self.links = links
        self.violations: list[str] = []
        self._random = random.Random(f"links {seed}")
        self._ends: dict[tuple[str, int], End] = {}
        self._pipes: defaultdict[tuple[str, int, int, int], Pipe] = defaultdict(lambda: Pipe(deque(), deque()))
        self._silent: set[tuple[str, int, int]] = set()  # lost a message: nothing arrives any more
        self._num_messages = itertools.count()
        self.dead: set[int] = set()

    def end(self, name: str, rank: int) -> End:
        key = (name, rank)
        if key not in self._ends:
            self._ends[key] = End(self, name, rank)
            self._ends[key].closed |= self.dead
        return self._ends[key]

    def post(self, key: tuple[str, int, int, int], work: Work) -> None:
        pipe = self._pipes[key]
        (pipe.sent if work.is_sent else pipe.received).append(work)
        self._start(key, pipe)

    def _start(self, key: tuple[str, int, int, int], pipe: Pipe) -> None:
        if pipe.under_way is not None or not pipe.sent or not pipe.received or key[:3] in self._silent:
            return
        number = next(self._num_messages)
        if number == self.links.lost:
            self._silent.add(key[:3])
            return
        pipe.under_way = (pipe.sent.popleft(), pipe.received.popleft())
        if self.links.overtakes is not None and number >= self.links.overtakes:
            self._mix_up(key, pipe.under_way)

        def arrive() -> None:
            if pipe.under_way is None:
                return
            (sent, received), pipe.under_way = pipe.under_way, None
            if sent.tensor.nbytes > received.tensor.nbytes:
                self.violations.append(f"{key}: {sent.tensor.nbytes} bytes for {received.tensor.nbytes}: gloo aborts")
            elif number != self.links.arrives_empty:
                received.tensor.view(-1)[: sent.tensor.numel()].copy_(sent.tensor.view(-1))
            sent.finish()
            received.finish()
            self._start(key, pipe)

        self.scheduler.at(self.scheduler.now + self._random.random() ** 4 * self.links.slowest, arrive)

    def _mix_up(self, key: tuple[str, int, int, int], message: tuple[Work, Work]) -> None:
        """A bug: exchange this message with another one of its kind that is under way between the same two ranks."""
        for other_key, pipe in self._pipes.items():
            other = pipe.under_way
            if other_key != key and other_key[1:3] == key[1:3] and other is not None:
                one, two = message[0].tensor, other[0].tensor
                if one.dtype == two.dtype and one.shape == two.shape and not torch.equal(one.view(-1), two.view(-1)):
                    message[0].tensor, other[0].tensor = two, one
                    self.links.overtakes = None
                    return

    def close(self, name: str, rank: int, peer: int) -> None:
        """Close the connection of two ranks: whatever is posted on it fails."""
        for one, other in ((rank, peer), (peer, rank)):
            self.end(name, one).closed.add(other)
        for key, pipe in self._pipes.items():
            if key[0] == name and {key[1], key[2]} == {rank, peer}:
                works = [*pipe.sent, *pipe.received, *(pipe.under_way or ())]
                pipe.sent.clear()
                pipe.received.clear()
                pipe.under_way = None
                for work in works:
                    work.finish(f"[simulated] Connection closed by peer {rank} or {peer}")

    def lose(self, rank: int) -> None:
        """A rank's process is gone: a moment later the others' systems know."""
        self.dead.add(rank)

        def close() -> None:
            for name in {name for name, _ in self._ends}:
                for peer in range(self.num_ranks):
                    if peer != rank:
                        self.close(name, rank, peer)

        self.scheduler.at(self.scheduler.now + self._random.random() * 0.01, close)


class Store:
    """The key-value store. With rank 0's process, if that has it, it is gone."""

    def __init__(self, network: Network, *, is_in_first: bool) -> None:
        self._network = network
        self._is_in_first = is_in_first
        self._values: dict[str, bytes] = {}

    def _check_alive(self) -> None:
        self._network.scheduler.pause()
        if self._is_in_first and 0 in self._network.dead:
            raise RuntimeError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        self._check_alive()
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._check_alive()
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        self._check_alive()
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._check_alive()
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total


class SimulatedTransport:
    """One rank's way to the others."""

    def __init__(self, network: Network, store: Store, rank: int) -> None:
        self._network = network
        self.store = store
        self.rank = rank
        self.num_ranks = network.num_ranks
        self.timeout = TIMEOUT

    def meet(self) -> Connections | None:
        return cast(Connections, self._network.end("the user's", self.rank))

    def connect(self, name: str) -> Connections:
        scheduler = self._network.scheduler
        scheduler.pause()
        # A rank that is killed after it has published its address is waited for.
        if self._network.dead:
            scheduler.sleep(_CONNECT_SECONDS)
            raise RuntimeError("Connect timeout")
        return cast(Connections, self._network.end(name, self.rank))

    def group_on(self, device: torch.device) -> ProcessGroup:
        raise RuntimeError(f"no simulated {device}")


def delays(seed: object, slowest: float) -> Callable[[], float]:
    """Draw delays up to `slowest`, most of them short."""
    source: Any = random.Random(f"delays {seed}")
    return lambda: float(source.random() ** 4 * slowest)
