"""The ranks that train one model: their channels, and the notes they leave in the key-value store.

Each rank leaves notes there, which other ranks read when it stops answering. No rank waits for a note for long: the
store does not know whether the one who would leave it is still there.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from zero_infinity.comm.channel import Channel, Traffic
from zero_infinity.comm.connection_attempt import AttemptState, ConnectionAttempt
from zero_infinity.comm.device_group import DeviceGroup
from zero_infinity.comm.phases import Phases
from zero_infinity.comm.topics import FIRST_PHASE, NAMES, OTHER_CALL, Topic
from zero_infinity.comm.transport import TorchTransport, Transport, num_local_ranks
from zero_infinity.errors import DivergenceError, LostRankError, UsageError, again
from zero_infinity.trace import Trace

# A lost rank may close its connections before it writes its note: wait this long for the note.
_NOTE_SECONDS = 0.5
# How long rank 0 stays alive after it has lost a rank: the others still read from its store whom.
_STORE_SECONDS = 2.0
_CPU = torch.device("cpu")
_CONNECTING = -20  # topic number of the exchanges before connections are made and while they are
# How often a rank that is not connected yet looks whether the others are there.
_LOOK_SECONDS = 0.5


def find_group(
    group: ProcessGroup | DeviceMesh | None, make_traffic: Callable[[], Traffic] = Traffic
) -> RankGroup | None:
    """Return the ranks of `group`, or of the default group; None for a single rank."""
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            return None
        group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"the device mesh has {group.ndim} dimensions, {group.mesh_dim_names}\n"
                '  fix:   pass the dimension to shard over: group=mesh["dp"]'
            )
        group = group.get_group()
    if not isinstance(group, ProcessGroup):
        raise UsageError(
            "this process is not a member of the given process group\n"
            "  fix:   call zi.prepare on the ranks of the group only"
        )
    return RankGroup(TorchTransport(group), make_traffic(), group) if group.size() > 1 else None


class RankGroup:
    """One engine's view of its ranks."""

    def __init__(self, transport: Transport, traffic: Traffic, group: ProcessGroup | None = None) -> None:
        self.group = group  # of torch
        self.rank = transport.rank
        self.num_ranks = transport.num_ranks
        self.timeout = transport.timeout
        self.num_local_ranks = num_local_ranks(self.num_ranks)
        self.traffic = traffic
        self._transport = transport
        self._store = transport.store
        self._trace: Trace | None = None
        self.names: dict[int, str] = {}  # of topics, by number
        self.divergences: dict[object, DivergenceError] = {}
        self.loss: LostRankError | None = None
        self._losing = threading.Lock()
        self._num_steps = 0
        # Numbers of the calls in which ranks agree.
        self.call_numbers = itertools.count()
        self._noted = False
        self._meeting: Channel | None = None  # of the thread that prepares, trains and saves
        self._channels: list[Channel] = []
        self._on_devices: dict[torch.device, DeviceGroup] = {}

    # ------------------------------------------------------------------ channels

    @property
    def phases(self) -> Phases:
        """For the thread that prepares, trains and saves. All ranks use it for the first time together."""
        return Phases(self._met())

    def channel(self, purpose: str, device: torch.device = _CPU) -> Channel:
        """Create a channel for one thread and tensors on `device`. All ranks create the same ones in the same order."""
        # Connecting to a rank that is gone takes until a timeout, so it begins when all are there.
        over = self._met()
        over.agree(Topic("connections", _CONNECTING, f"connections for {purpose}"))
        return self._connect(purpose, over, self._group_on(device) if device.type != "cpu" else None)

    def _group_on(self, device: torch.device) -> DeviceGroup:
        """Return the one group for tensors on `device`: a communicator takes memory there."""
        if device not in self._on_devices:
            group = self._transport.group_on(device)
            self._on_devices[device] = DeviceGroup(functools.partial(dist.all_to_all, group=group))
        return self._on_devices[device]

    def _met(self) -> Channel:
        if self._meeting is None:
            before, over = self._transport.meet(), None
            if before is not None:
                over = Channel(before, self.traffic, self)
                over.agree(Topic("connections", _CONNECTING, "zi.prepare or zi.init"))
            self._meeting = self._connect("phases", over)
        return self._meeting

    def _connect(self, purpose: str, over: Channel | None, data: DeviceGroup | None = None) -> Channel:
        self.check()
        attempt = ConnectionAttempt(partial(self._transport.connect, f"wire/{len(self._channels)}"))
        if over is not None:
            self._follow(attempt, over, Topic("connections", _CONNECTING, f"connections for {purpose}"))
        try:
            control = attempt.result()
        except RuntimeError as lost:
            raise LostRankError(
                f"rank {self.rank} could not connect to every other rank for {purpose}\n  why:   {_first_line(lost)}"
            ) from lost
        channel = Channel(control, self.traffic, self, data, self._trace)
        self._channels.append(channel)
        return channel

    def _follow(self, attempt: ConnectionAttempt, over: Channel, topic: Topic) -> None:
        """Return when every rank is connected, or this one's attempt has failed. Notices a rank that is gone."""
        while True:
            states = [said for (said,) in over.agree(topic, [attempt.state(_LOOK_SECONDS)])]
            if AttemptState.FAILED in states:
                # By this the rank that is gone gets its name: what it sent before may have been found above.
                over.agree(topic)
                failed = states.index(AttemptState.FAILED)
                if failed != self.rank:
                    raise LostRankError(f"rank {failed} could not connect to every other rank for {topic.name!r}")
                return
            if AttemptState.CONNECTING not in states:
                return

    def trace_into(self, trace: Trace) -> None:
        """Record the exchanges of channels created from now on."""
        self._trace = trace

    def steps_taken(self, num_steps: int) -> None:
        """Set the step count that this rank's note reports."""
        self._num_steps = num_steps

    def close(self) -> None:
        """Release the connections."""
        for channel in self._channels:
            channel.close()

    # ------------------------------------------------------------------ lost ranks

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.loss is not None:
            raise again(self.loss)

    def lose(self, rank: int, error: LostRankError, note: str) -> None:
        """A rank is lost: leave the note for the others, and end every exchange of this rank.

        The others, which may wait for this rank, then end as well.
        """
        with self._losing:
            if self.loss is not None:
                return
            with suppress(RuntimeError):  # the store's process is gone: they see that
                self._store.set(f"lost/{self.rank}", str(rank))
            self.note(note)
            self.loss = error
        for channel in self._channels:
            channel.cut()
        if self.rank == 0:
            time.sleep(_STORE_SECONDS)

    def lost_first(self, rank: int) -> int:
        """Return the rank that was lost first, of which the silence of `rank` is a consequence."""
        seen = [self.rank]
        try:
            while rank not in seen:
                seen.append(rank)
                if self._store.check([f"lost/{rank}"]):
                    rank = int(self._store.get(f"lost/{rank}"))
        except RuntimeError:  # the store's process is gone
            return seen[-1]
        return seen[-1]

    # ------------------------------------------------------------------ notes

    def note(self, text: str) -> None:
        """Leave a note about how this rank ended, for ranks that wait for it. Only the first note is kept."""
        if self._noted:
            return
        self._noted = True
        try:
            self._store.set(f"note/{self.rank}", text)
        except RuntimeError:
            return  # the store's process is gone; the channels report that

    def leave(self) -> None:
        """Note that this rank's engine ends, for ranks that may still wait for it."""
        error: BaseException | None = getattr(sys, "last_value", None)  # the exception that ends the interpreter
        reason = f" with {type(error).__name__}: {_first_line(error)}" if error is not None else ""
        self.note(f"ended after {self._num_steps} steps{reason}")

    def describe(self, rank: int) -> list[str]:
        """Return what is known about a rank that no longer answers, and about others that have ended."""
        deadline = time.monotonic() + _NOTE_SECONDS
        try:
            while not self._store.check([f"note/{rank}"]) and time.monotonic() < deadline:
                time.sleep(0.01)
            others = [r for r in range(self.num_ranks) if r != self.rank and self._store.check([f"note/{r}"])]
            return [f"rank {r} {self._store.get(f'note/{r}').decode()}" for r in others]
        except RuntimeError:
            return ["the ranks' key-value store is gone, with rank 0 or with the launcher that hosts it"]

    def name_of(self, number: int) -> str:
        """Return the name of the topic with this number."""
        unknown = OTHER_CALL if number >= FIRST_PHASE else f"#{number}"
        return self.names.get(number) or NAMES.get(number, unknown)

    def is_first_to(self, act: str) -> bool:
        """True if no rank has asked this before."""
        return bool(self._store.add(f"first/{act}", 1) == 1)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
