"""One training job on a virtual clock: the engine's own cache policy over links of a given speed.

All ranks do the same thing at the same time, so only one is simulated; a link that the ranks of a node share carries
the bytes of all of them. The cost of a simulation therefore does not grow with the cluster, only with the number of
operators and chunks.

A step runs the model's operators in order. Each use of a parameter is an access to the policy of device memory
(gathered parameters), and what that fetches is an access to the policy of host memory (`simulated_host`). Both are the
class that the engine runs. Their decisions become transfers, first come, first served on each link: storage to host
(nc), host to device (cg), all-gather (gg); gradients and checkpoints the other way.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import count

from zero_infinity.byte_sizes import format_bytes
from zero_infinity.errors import CapacityError
from zero_infinity.planner.hardware import TierKind
from zero_infinity.planner.outcome import LinkTraffic, SimulatedStep
from zero_infinity.planner.plan_inputs import PlanInputs
from zero_infinity.planner.rank_links import RankLinks
from zero_infinity.planner.roofline import compute_seconds
from zero_infinity.planner.simulated_host import SimulatedHost
from zero_infinity.planner.step_program import OperatorRun, StepPhase, step
from zero_infinity.planner.training_job import HomeRule
from zero_infinity.planner.unit_chunks import ChunkBlocks, chunk_sizes
from zero_infinity.policy.alignment import round_up
from zero_infinity.policy.cache_policy import CachePolicy, NoRoomError
from zero_infinity.policy.lookahead import copy_lookahead
from zero_infinity.trace import WAIT, Category, Trace

# The first step records the order of uses. Then the device fetches ahead, which changes the order of accesses to the
# host; moving updates into backward changes it once more. Two more steps fill memory in the final order. After that
# steps are alike, except for a block now and then that is kept in one step and not in the next.
WARM_UP_STEPS = 5
# Records are cut as in the engine, but into at most this many chunks in all: a rank of a trillion parameters would have
# a million, and finer chunks do not change the result.
_MAX_CHUNKS = 1_500
_MAX_PASSES = 4  # backward passes of a step that are simulated; more are extrapolated from these


class Simulator:
    """Simulates one job; `run` returns one steady step."""

    def __init__(self, inputs: PlanInputs, trace: Trace | None = None) -> None:
        self._inputs = inputs
        self._trace = trace
        self._now = 0.0
        self._backward_end = 0.0
        self._gradients_at = 0.0  # when the last gradient has arrived
        self._early = False  # True once updates run in backward
        self._number = 0  # of the backward pass in its step
        self._lags = False  # True once the others wait for the next use of their unit
        self._lagging: set[str] = set()  # units whose update waits
        division = inputs.division
        self._sharding = inputs.workload.sharding
        self._is_shared = self._sharding.shards_parameters  # parameters are gathered from all ranks
        self._program = step(inputs.model, inputs.job.interval)
        self._names = list(inputs.units)
        self._keys = {name: key for key, name in enumerate(self._names)}
        self._fresh_key = count(len(self._keys))
        self._channels = RankLinks(inputs)
        self._host = SimulatedHost(inputs.host, inputs.scale, inputs.num_devices, self._channels.storage)
        self._chunk_bytes = max(division.chunk_bytes, sum(unit.record for unit in inputs.units.values()) // _MAX_CHUNKS)
        self._resident = inputs.resident_units
        self._chunks = {name: self._make_blocks(name) for name in inputs.units}
        self._outstanding: deque[tuple[float, int]] = deque()  # gradients until they are used: when, bytes
        self._computing: set[int] = set()
        self._device = self._make_device()
        self._device_ready: dict[int, float] = {}
        self._last_gathered: int | None = None
        self._outdated: set[int] = set()
        self._checkpoints = self._make_checkpoints()
        self._debt = 0.0  # CPU seconds of the engine that have not delayed the computation yet
        self._engine_seconds = 0.0
        self._paid_cpu_seconds = 0.0
        self._stored: dict[int, float] = {}  # checkpoint -> when it is at home
        self._loaded: dict[int, float] = {}  # checkpoint fetched ahead -> when it is back
        self._waits: defaultdict[str, float] = defaultdict(float)
        self._peaks: Counter[str] = Counter()

    def _make_blocks(self, name: str) -> list[ChunkBlocks]:
        """Cut the unit's record into chunks, and add the blocks that stream to the host's cache."""
        inputs, unit = self._inputs, self._inputs.units[name]
        moves = name not in self._resident
        if moves and inputs.parameters_stream:
            self._host.add(self._keys[name], name, unit.parameters, inputs.homes.parameters)
        home = inputs.homes.optimizer
        others = inputs.num_ranks - 1 if self._sharding.keeps_whole_gradients else 0
        chunks: list[ChunkBlocks] = []
        for number, size in enumerate(chunk_sizes(inputs.states[name], self._chunk_bytes, num_others=others)):
            chunk = ChunkBlocks(next(self._fresh_key) if size.record_bytes else None, next(self._fresh_key), size)
            chunks.append(chunk)
            if not (moves and inputs.optimizer_streams):
                continue
            if chunk.record is not None:
                self._host.add(chunk.record, f"{name}[{number}] record", size.record_bytes, home)
            self._host.add(chunk.gradient, f"{name}[{number}] gradient", size.gradient_bytes, home, has_content=False)
        return chunks

    def _make_device(self) -> CachePolicy | None:
        """The cache of gathered or copied parameters; None if modules compute with the stored ones."""
        inputs = self._inputs
        if inputs.device_cache is None:
            return None
        on_device = inputs.hardware.device is not None and inputs.job.placement is HomeRule.ENGINE
        lookahead = copy_lookahead(inputs.device_cache, on_device=on_device) if inputs.job.overlap else 0
        device = CachePolicy(inputs.device_cache, lookahead, self._computing.__contains__, wraps=not self._is_shared)
        for name in inputs.units:
            device.add(self._keys[name], round_up(inputs.whole_bytes(name)))
        return device

    def _make_checkpoints(self) -> dict[int, int]:
        """Keys of the checkpoints that live on storage and go through the cache, as other blocks do.

        Empty if the cache (of a slice) is too small for two of them.
        """
        inputs = self._inputs
        numbers = [use.stores for use in self._program if use.stores is not None]
        fits = 2 * inputs.workload.one_checkpoint_bytes <= inputs.division.cache
        if inputs.homes.checkpoints.kind is not TierKind.STORAGE or not fits:
            return {}
        keys = {number: next(self._fresh_key) for number in numbers}
        for number, key in keys.items():
            name = f"checkpoint {number}"
            self._host.add(key, name, inputs.workload.one_checkpoint_bytes, inputs.homes.checkpoints, has_content=False)
        return keys

    def run(self) -> SimulatedStep:
        """Simulate until steps are alike, and report one more."""
        may_be_early = self._inputs.workload.updates_early
        # As in the engine (but for stage 0 on several ranks): what is copied ahead of its use is not updated so late.
        may_lag = not may_be_early and self._device is None and not self._sharding.is_distributed
        for number in range(WARM_UP_STEPS):
            # The engine updates at the end of a step until it has seen two steps that are alike.
            self._early = may_be_early and number >= 2
            self._lags = may_lag and number >= 1
            self._step(same_order=not (number == 1 and (may_be_early or may_lag)))
        if self._trace is not None:
            # Two steps are traced, so that a transfer that runs into the next step is seen from its start.
            for link in self._channels.links:
                link.record(self._trace)
            self._step()
        started = self._now
        for link in self._channels.links:
            link.restart()
        before = self._host.read_bytes, self._host.written_bytes
        self._waits.clear()
        self._engine_seconds = 0.0
        forward_seconds = self._step()
        inputs = self._inputs
        tokens, scale = inputs.job.batch * inputs.model.seq * inputs.job.accumulation, inputs.scale
        return SimulatedStep(
            seconds=scale * (self._now - started),
            forward_seconds=scale * forward_seconds,
            backward_seconds=scale * (self._backward_end - started - forward_seconds),
            compute_seconds=scale * self._channels.compute.busy_seconds,
            engine_seconds=scale * self._engine_seconds,
            waits={name: scale * seconds for name, seconds in self._waits.items()},
            traffic=tuple(
                LinkTraffic(link.name, int(scale * link.num_bytes), scale * link.busy_seconds)
                for link in self._channels.links
            ),
            read_bytes=int(scale * (self._host.read_bytes - before[0])),
            written_bytes=int(scale * (self._host.written_bytes - before[1])),
            peak_bytes=dict(self._peaks),
            flops=scale * sum(use.flops_per_token for use in self._program) * tokens,
            tokens=tokens * inputs.num_ranks,
            num_ranks=inputs.num_ranks,
        )

    def _step(self, *, same_order: bool = True) -> float:
        """One step; returns the seconds of forward. `same_order`: the next step accesses blocks in this order."""
        forward_seconds = 0.0
        for number in range(self._inputs.job.accumulation):
            self._number = number
            started = forward_end = self._now
            for use in self._program:
                self._use(use)
                if use.phase is StepPhase.FORWARD:
                    forward_end = self._now
            forward_seconds += forward_end - started
        if not self._early:
            # The update needs every gradient in its home.
            self._wait(self._gradients_at, "gradients")
        self._backward_end = self._now
        if self._lags:
            self._lagging.update(name for name, chunks in self._chunks.items() if chunks)
        elif not self._early:
            self._update_in_step([name for name, chunks in self._chunks.items() if chunks])
            self._wait(self._channels.update_worker.free_at, "optimizer step")
        self._host.policy.end_cycle(same_order=same_order)
        if self._device is not None:
            self._end_device_cycle(self._device, same_order=same_order)
        self._pay()
        return forward_seconds

    def _end_device_cycle(self, device: CachePolicy, *, same_order: bool) -> None:
        """All gathered copies expire together after the step; the next ones are gathered only then."""
        for key in sorted(self._outdated):
            device.forget(key)
        self._outdated.clear()
        self._last_gathered = None
        device.end_cycle(same_order=same_order or self._is_shared)
        if self._is_shared:
            for fetched in device.look_ahead().fetch:
                self._device_ready[fetched] = self._fetch_to_device(self._names[fetched])

    def _use(self, use: OperatorRun) -> None:
        inputs, name = self._inputs, use.operator.name
        if use.loads is not None:
            self._load_checkpoint(use.loads, name)
        if use.operator.unit in self._lagging and use.needs_weight:
            self._lagging.discard(use.operator.unit)
            self._update(use.operator.unit, self._now, retained=True)
        if use.needs_weight:
            self._wait(self._bring(use.operator.unit), name)
        self._pay()
        seconds = compute_seconds(use, inputs.workload)
        self._now = self._channels.compute.occupy(name, Category.COMPUTE, self._now, seconds)
        if use.stores is not None:
            self._store_checkpoint(use.stores, name)
        if use.completes is not None:
            self._take_gradient(use.completes)
        self._note_held()

    def _wait(self, until: float, name: str) -> None:
        if until <= self._now:
            return
        self._waits[name] += until - self._now
        self._debt -= min(self._debt, until - self._now)
        if self._channels.compute.trace is not None:
            self._channels.compute.trace.span(name, Category.WAIT, WAIT, self._now, until - self._now)
        self._now = until

    def _handle_block(self) -> None:
        """CPU time that the engine spends on one block."""
        self._debt += self._inputs.hardware.block_cpu_seconds

    def _pay(self) -> None:
        """If the CPU computes, its other work delays the computation, unless it was done during a wait."""
        spent = self._channels.cpu_seconds
        if self._inputs.hardware.device is None:
            debt = self._debt + spent - self._paid_cpu_seconds
            self._now += debt
            self._engine_seconds += debt
        self._debt, self._paid_cpu_seconds = 0.0, spent

    def _note_held(self) -> None:
        held = {self._inputs.hardware.host.name: self._host.held_bytes}
        if self._device is not None and self._inputs.hardware.device is not None:
            held[self._inputs.hardware.device.name] = self._device.cached_bytes
        for tier, num_bytes in held.items():
            self._peaks[tier] = max(self._peaks[tier], num_bytes)
            if self._channels.compute.trace is not None:
                self._channels.compute.trace.held(tier, self._now, num_bytes)

    # ------------------------------------------------------------------ parameters

    def _bring(self, name: str) -> float:
        """Use a unit and fetch ahead; returns when its parameters can be computed with."""
        key = self._keys[name]
        self._handle_block()
        if self._device is None:
            self._host.in_use.add(key)
            ready = self._host.access(key, self._now)
            self._host.in_use.discard(key)
            return ready
        if self._is_shared and key == self._last_gathered:
            return self._device_ready[key]  # not an access in the engine either: ranks may differ in how often
        self._last_gathered = key
        self._computing.clear()
        self._computing.add(key)
        try:
            decision = self._device.access(key)
        except NoRoomError as error:
            raise CapacityError(
                f"{name!r} needs {format_bytes(error.needed)} of device memory, but {format_bytes(error.budget)} is "
                "left for gathered parameters\n  fix:   a smaller batch, or more devices"
            ) from None
        for fetched in decision.fetch:
            self._device_ready[fetched] = self._fetch_to_device(self._names[fetched])
        return self._device_ready[key]

    def _fetch_to_device(self, name: str) -> float:
        """nc, cg, gg: each hop starts when the one before is done."""
        inputs = self._inputs
        ready = self._host.access(self._keys[name], self._now)
        self._handle_block()
        shard, home = inputs.shard_bytes(name), inputs.homes.parameters
        if inputs.hardware.device is not None and home.kind is not TierKind.DEVICE and not home.bypasses_host:
            ready = self._channels.upload(name, Category.FETCH, ready, shard, inputs.whole_bytes(name))
        return self._channels.collective(name, ready, shard)

    def _store_checkpoint(self, number: int, name: str) -> None:
        stored = self._channels.store_checkpoint(name, self._now, cached=number in self._checkpoints)
        if number in self._checkpoints:
            self._handle_block()
            stored = max(stored, self._host.access(self._checkpoints[number], self._now))
            self._host.change(self._checkpoints[number], stored)
        self._stored[number] = stored
        if not self._inputs.job.overlap:
            self._wait(self._stored[number], name)

    def _load_checkpoint(self, number: int, name: str) -> None:
        """Wait for this checkpoint, and start to fetch the next one."""
        if number not in self._loaded:
            self._fetch_checkpoint(number, name)
        self._wait(self._loaded.pop(number), name)
        # Checkpoints on storage are fetched ahead by the cache policy.
        if self._inputs.job.overlap and number - 1 in self._stored and not self._checkpoints:
            self._fetch_checkpoint(number - 1, name)

    def _fetch_checkpoint(self, number: int, name: str) -> None:
        ready = max(self._now, self._stored.pop(number))
        if number in self._checkpoints:
            self._handle_block()
            ready = max(ready, self._host.access(self._checkpoints[number], self._now))
            self._host.expire(self._checkpoints[number])
        self._loaded[number] = self._channels.load_checkpoint(name, ready, cached=number in self._checkpoints)

    def _take_gradient(self, name: str) -> None:
        inputs, unit = self._inputs, self._inputs.units[name]
        is_early = self._early and self._number == inputs.job.accumulation - 1
        is_summed = self._sharding.shards_gradients or (self._sharding.is_distributed and is_early)
        if is_early and self._number and not self._sharding.shards_gradients:
            self._use_gradient_blocks(name)  # what this rank has retained is added to the last gradient
        ready = self._sum(name, self._now) if is_summed else self._now
        shard = inputs.gradient_bytes(name)
        leaves = inputs.homes.optimizer.kind is not TierKind.DEVICE and inputs.hardware.device is not None
        if leaves:
            ready = self._channels.download(name, Category.GRADIENT, ready, shard, shard * inputs.num_ranks)
        self._gradients_at = max(self._gradients_at, ready)
        # The engine copies a gradient from the device before backward goes on.
        if not inputs.job.overlap or (leaves and inputs.job.placement is HomeRule.ENGINE):
            self._wait(ready, name)
        if is_early:
            self._make_room(unit.arriving, name)
            retained = self._number > 0 and self._sharding.shards_gradients
            self._outstanding.append((self._update(name, ready, retained=retained), unit.arriving))
            return
        for chunk in self._kept_chunks(name):
            self._handle_block()
            self._host.access(chunk.gradient, self._now)
            self._host.change(chunk.gradient, ready)

    def _kept_chunks(self, name: str) -> list[ChunkBlocks]:
        """Where gradients wait: all of the unit where they are not summed yet, else this rank's part."""
        return [chunk for chunk in self._chunks[name] if chunk.size.is_updated or self._sharding.keeps_whole_gradients]

    def _use_gradient_blocks(self, name: str) -> None:
        for chunk in self._kept_chunks(name):
            self._handle_block()
            self._wait(self._host.access(chunk.gradient, self._now), name)

    def _sum(self, name: str, ready: float) -> float:
        """Sum a gradient over ranks: each gets its shard, and at stage 0 then all of it."""
        inputs, states = self._inputs, self._inputs.states[name]
        if not self._sharding.reduces_everywhere:
            return self._channels.collective(name, ready, inputs.gradient_bytes(name))
        shard = states.gradient_elements // inputs.num_ranks
        ready = self._channels.collective(name, ready, shard * states.widths.parameter)
        return self._channels.collective(name, ready, shard * states.widths.gradient)

    def _update_in_step(self, names: list[str]) -> None:
        """Update units whose gradients have waited, and at stages 1 and 2 send the results to all ranks."""
        is_summed = self._sharding.shards_gradients or not self._sharding.is_distributed
        ready = dict.fromkeys(names, self._now)
        for name in names if not is_summed else ():
            self._use_gradient_blocks(name)
            ready[name] = self._sum(name, self._now)
            for chunk in self._chunks[name]:
                self._host.expire(chunk.gradient)
        for name in names:
            done = self._update(name, ready[name], retained=is_summed)
            if self._sharding.gathers_updates:
                done = self._channels.collective(name, done, self._inputs.gradient_bytes(name))
                self._host.change(self._keys[name], done)

    def _make_room(self, num_bytes: int, name: str) -> None:
        """Wait until the memory set aside for gradients has room for one more."""
        while self._outstanding and self._outstanding[0][0] <= self._now:
            self._outstanding.popleft()
        while (
            self._outstanding
            and sum(size for _, size in self._outstanding) + num_bytes > self._inputs.division.set_aside
        ):
            self._wait(self._outstanding.popleft()[0], name)

    def _update(self, name: str, gradient_ready: float, *, retained: bool) -> float:
        """Update a unit chunk by chunk, in parallel with the computation; returns when it is done."""
        inputs, key = self._inputs, self._keys[name]
        on_device = inputs.homes.optimizer.kind is TierKind.DEVICE
        self._host.in_use.add(key)
        values_ready = self._host.access(key, self._now)
        done = gradient_ready
        for chunk in [chunk for chunk in self._chunks[name] if chunk.size.is_updated]:
            self._handle_block()
            ready = max(values_ready, gradient_ready)
            if retained and not on_device:
                ready = max(ready, self._host.access(chunk.gradient, self._now))
            self._host.in_use.add(chunk.gradient)
            if chunk.record is not None:
                ready = max(ready, self._host.access(chunk.record, self._now))
            done = self._update_chunk(name, chunk, ready)
            if chunk.record is not None:
                self._host.change(chunk.record, done)
            self._host.in_use.discard(chunk.gradient)
            self._host.expire(chunk.gradient)
        self._host.in_use.discard(key)
        self._host.change(key, done)
        if self._is_shared:
            self._outdated.add(key)
        elif self._device is not None:
            self._device.expire(key)
            for fetched in self._device.look_ahead().fetch:
                self._device_ready[fetched] = self._fetch_to_device(self._names[fetched])
        return done

    def _update_chunk(self, name: str, chunk: ChunkBlocks, ready: float) -> float:
        inputs = self._inputs
        states, num_elements = inputs.states[name].widths, chunk.size.num_elements
        moved = num_elements * states.update
        device = inputs.hardware.device
        if inputs.homes.optimizer.kind is TierKind.DEVICE and device is not None:
            self._now = self._channels.compute.occupy(name, Category.UPDATE, max(ready, self._now), moved / device.read)
            return self._now
        seconds = moved * inputs.num_devices / inputs.hardware.update_rate + inputs.product_seconds(name, num_elements)
        done = self._channels.update_worker.occupy(name, Category.UPDATE, ready, seconds, chunk.size.record_bytes)
        if device is None:
            # The cores that compute also update: now, or later unless they wait anyway.
            if ready <= self._now:
                self._now = max(self._now, done)
            else:
                self._debt += seconds
        elif inputs.homes.parameters.kind is TierKind.DEVICE:
            new = num_elements * states.parameter
            done = self._channels.upload(name, Category.UPDATE, done, new, new * inputs.num_ranks)
        return done


def simulate(inputs: PlanInputs, trace: Trace | None = None) -> SimulatedStep:
    """One steady step of the job. Of many backward passes those in the middle are alike: a few are simulated."""
    number = inputs.job.accumulation
    if number <= _MAX_PASSES or trace is not None:
        return Simulator(inputs, trace).run()
    fewer, more = (Simulator(inputs.with_accumulation(n)).run() for n in (_MAX_PASSES - 1, _MAX_PASSES))
    return more.extended(fewer, number - _MAX_PASSES)
