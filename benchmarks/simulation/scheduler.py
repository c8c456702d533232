"""A scheduler under which threads take turns: one runs at a time, and a seed decides which is next.

Owns the tasks, the virtual clock and the turns. Each task is a real thread, because torch keeps modes and autograd's
state for each thread, and runs only while it has the turn. It gives the turn away where it blocks, and by chance where
it takes a lock. When no task can run, the clock jumps to the next timer. So what happens is a function of the seed
alone, whatever the machine does meanwhile.

A task belongs to a rank. A killed rank's tasks get `Killed` raised at every point where they could give their turn
away, so they unwind at once, without a turn for anybody else: nobody sees anything of what they still do.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

_STACK_BYTES = 1 << 20  # enough for autograd in a model of a few layers


class Killed(BaseException):
    """Raised in the tasks of a killed rank."""


class Task:
    """One thread."""

    def __init__(self, name: str, rank: int, work: Callable[[], object]) -> None:
        self.name = name
        self.rank = rank
        self.work = work
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.ident = 0
        self.is_ready = True
        self.is_done = False
        self.is_killed = False
        self.num_blocks = 0  # a timer of an earlier wait must not end a later one
        self.waiters: list[Task] = []  # for its end
        self.thread: object = self  # what its `threading.current_thread()` is


class Scheduler:
    """Runs tasks until the last has ended."""

    def __init__(self, seed: object, *, preemption: float, limit_seconds: float, limit_turns: int) -> None:
        self.random = random.Random(f"turns {seed}")
        self.now = 0.0
        self.num_turns = 0
        self.current: Task | None = None
        self.stuck: str | None = None
        self.on_turn: Callable[[int], None] = lambda _: None
        self._preemption = preemption
        self._limits = (limit_seconds, limit_turns)
        self._tasks: list[Task] = []
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._finished = threading.Event()
        self._by_ident: dict[int, Task] = {}

    # ------------------------------------------------------------------ from outside

    def run(self, mains: list[Callable[[], object]]) -> None:
        """Run one task for each rank, and all that they start."""
        for rank, main in enumerate(mains):
            self.start(f"rank {rank}", main, rank)
        self._pass_on(None)
        self._finished.wait()

    # ------------------------------------------------------------------ from tasks

    def task(self) -> Task:
        if self.current is None or self.current.ident != _thread.get_ident():
            raise RuntimeError("this thread is not one of the simulation's")
        return self.current

    def start(self, name: str, work: Callable[[], object], rank: int | None = None) -> Task:
        task = Task(name, self.task().rank if rank is None else rank, work)
        self._tasks.append(task)
        self._ready.append(task)
        threading.stack_size(_STACK_BYTES)
        _thread.start_new_thread(self._run_task, (task,))
        return task

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Call `action` at this time. It takes no turn and must not block."""
        heapq.heappush(self._timers, (time, next(self._number), action))

    def block(self, seconds: float | None = None) -> bool:
        """Give the turn away until `wake`; False if that did not come in time."""
        task = self.task()
        self._check_killed(task)
        task.is_ready = False
        task.num_blocks += 1
        woken = [True]
        if seconds is not None:
            block = task.num_blocks

            def end() -> None:
                if not task.is_ready and task.num_blocks == block:
                    woken[0] = False
                    self.wake(task)

            self.at(self.now + max(0.0, seconds), end)
        self._pass_on(task)
        return woken[0]

    def wake(self, task: Task) -> None:
        if not task.is_ready and not task.is_done:
            task.is_ready = True
            self._ready.append(task)

    def sleep(self, seconds: float) -> None:
        self.block(seconds)

    def pause(self) -> None:
        """Maybe let another task run."""
        task = self.task()
        self._check_killed(task)
        if self._preemption and self.random.random() < self._preemption:
            self._ready.append(task)
            self._pass_on(task)

    def wait_for_end(self, task: Task, seconds: float | None) -> None:
        if not task.is_done:
            task.waiters.append(self.task())
            self.block(seconds)

    def kill(self, rank: int) -> None:
        """The tasks of this rank unwind before anybody else gets a turn."""
        for task in self._tasks:
            if task.rank == rank and not task.is_done:
                task.is_killed = True
                self.wake(task)

    def alive(self, rank: int) -> list[str]:
        return [task.name for task in self._tasks if task.rank == rank and not task.is_done]

    # ------------------------------------------------------------------ turns

    def _run_task(self, task: Task) -> None:
        task.gate.acquire()
        task.ident = _thread.get_ident()
        try:
            self._check_killed(task)
            task.work()
        except Killed:
            pass
        except BaseException:  # noqa: BLE001 - as a thread of Python does
            self.stuck = self.stuck or f"{task.name}: {traceback.format_exc()}"
        task.work = _nothing
        task.is_done = True
        for waiter in task.waiters:
            self.wake(waiter)
        self._pass_on(task)

    def _pass_on(self, task: Task | None) -> None:
        """Give the turn to the next task. Returns when `task` has it again."""
        following = self._next()
        if following is task and task is not None and not task.is_done:
            self._check_killed(task)
            return
        if following is None:
            self._finished.set()
            return
        following.gate.release()
        if task is not None and not task.is_done:
            task.gate.acquire()
            self._check_killed(task)

    def _next(self) -> Task | None:
        self.num_turns += 1
        self.on_turn(self.num_turns)
        if self.stuck is None and (self.now > self._limits[0] or self.num_turns > self._limits[1]):
            self._give_up(f"no end after {self.now:.1f} s and {self.num_turns} turns")
        while True:
            chosen = next((task for task in self._ready if task.is_killed), None)
            if chosen is None and self._ready:
                chosen = self._ready[self.random.randrange(len(self._ready))]
            if chosen is not None:
                self._ready.remove(chosen)
                self.current = chosen
                return chosen
            if all(task.is_done for task in self._tasks):
                self.current = None
                return None
            if self._timers:
                time, _, action = heapq.heappop(self._timers)
                self.now = max(self.now, time)
                action()
            else:
                self._give_up("nobody can run")

    def _give_up(self, reason: str) -> None:
        """Say where everybody is, and unwind."""
        frames = sys._current_frames()
        where = [
            f"--- {task.name} of rank {task.rank}\n" + "".join(traceback.format_stack(frames[task.ident])[-9:-2])
            for task in self._tasks
            if not task.is_done and task.ident in frames
        ]
        self.stuck = self.stuck or f"{reason}\n" + "".join(where)
        for task in self._tasks:
            self.kill(task.rank)

    def _check_killed(self, task: Task) -> None:
        if task.is_killed:
            raise Killed


def _nothing() -> Any:
    return None
