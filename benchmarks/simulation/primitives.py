"""What `threading`, `queue`, `time` and thread pools are inside the simulation.

Each behaves as its model in the standard library does, with waits that give the turn to another task and a clock that
jumps. `installed` puts them where the modules of the package look names up; nothing of the package knows of it.
"""

from __future__ import annotations

import concurrent.futures
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any

from benchmarks.simulation.scheduler import Killed, Scheduler, Task


class Lock:
    """A lock; `reentrant` for its owner."""

    def __init__(self, scheduler: Scheduler, *, reentrant: bool = False) -> None:
        self._scheduler = scheduler
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._count = 0
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        task = self._scheduler.task()
        if self._reentrant and self._owner is task:
            self._count += 1
            return True
        self._scheduler.pause()
        while self._owner is not None:
            if not blocking:
                return False
            self._waiters.append(task)
            if not self._scheduler.block(timeout if timeout >= 0 else None):
                return False
        self._owner, self._count = task, 1
        return True

    def release(self) -> None:
        if self._owner is not self._scheduler.current:
            return  # a killed task unwinds out of a wait, in which it did not have the lock
        self._count -= 1
        if not self._count:
            self._owner = None
            while self._waiters:
                self._scheduler.wake(self._waiters.popleft())

    def locked(self) -> bool:
        return self._owner is not None

    def give_up(self) -> int:
        """Release it, however often it was taken; for a wait."""
        count, self._count = self._count, 1
        self.release()
        return count

    def take_again(self, count: int) -> None:
        self.acquire()
        self._count = count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler = scheduler
        self._lock = lock if lock is not None else Lock(scheduler, reentrant=True)
        self._waiters: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def wait(self, timeout: float | None = None) -> bool:
        task = self._scheduler.task()
        self._waiters.append(task)
        count = self._lock.give_up()
        woken = self._scheduler.block(timeout)
        if task in self._waiters:
            self._waiters.remove(task)
        self._lock.take_again(count)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._scheduler.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                return predicate()
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for task in self._waiters[:n]:
            self._scheduler.wake(task)
        del self._waiters[:n]

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False
        self._waiters: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for task in self._waiters:
            self._scheduler.wake(task)
        self._waiters.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else self._scheduler.now + timeout
        while not self._is_set:
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                return False
            self._waiters.append(self._scheduler.task())
            self._scheduler.block(left)
        return True


class SimpleQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiters: deque[Task] = deque()

    def put(self, item: Any) -> None:
        """Also from finalizers, so it gives no turn away."""
        self._items.append(item)
        if self._waiters:
            self._scheduler.wake(self._waiters.popleft())

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002 - as of the standard library
        while not self._items:
            task = self._scheduler.task()
            self._waiters.append(task)
            if not self._scheduler.block(timeout) and not self._items:
                if task in self._waiters:
                    self._waiters.remove(task)
                raise queue.Empty
        self._scheduler.pause()
        return self._items.popleft() if self._items else self.get(timeout=timeout)

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class Thread:
    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool = False,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._scheduler = scheduler
        self._target, self._args = target, args
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return self._task.ident if self._task is not None else None

    def start(self) -> None:
        target, args = self._target, self._args
        self._target, self._args = _nothing, ()
        if self._scheduler.current is None:
            target(*args)  # by a finalizer, after the simulation
            return
        self._task = self._scheduler.start(self.name, lambda: target(*args))
        self._task.thread = self

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None:
            self._scheduler.wait_for_end(self._task, timeout)


class Future:
    def __init__(self, scheduler: Scheduler, work: Callable[[], Any]) -> None:
        self._done = Event(scheduler)
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error
            if isinstance(error, Killed):
                raise
        self._work = _nothing
        self._done.set()

    def exception(self) -> BaseException | None:
        self._done.wait()
        return self._error

    def result(self) -> Any:
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class ThreadPoolExecutor:
    def __init__(
        self,
        scheduler: Scheduler,
        max_workers: int = 4,
        thread_name_prefix: str = "pool",
        initializer: Callable[[], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._jobs = SimpleQueue(scheduler)
        self._name = thread_name_prefix
        self._initialize = initializer or _nothing
        self._most = max_workers
        self._threads: list[Thread] = []

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        future = Future(self._scheduler, lambda: function(*args))
        self._jobs.put(future)
        if len(self._threads) < self._most:
            thread = Thread(self._scheduler, self._run, f"{self._name}-{len(self._threads)}")
            self._threads.append(thread)
            thread.start()
        return future

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        for _thread in self._threads:
            self._jobs.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _run(self) -> None:
        self._initialize()
        while (future := self._jobs.get()) is not None:
            future.run()


def _nothing() -> None:
    return None


# ---------------------------------------------------------------------- in place of the standard library's


def namespaces(scheduler: Scheduler) -> dict[Any, Any]:
    """Models of the standard library, and what replaces each."""

    def bound(kind: Any, **fixed: Any) -> Any:
        return lambda *args, **named: kind(scheduler, *args, **fixed, **named)

    sim_threading = SimpleNamespace(
        Lock=bound(Lock),
        RLock=bound(Lock, reentrant=True),
        Condition=bound(Condition),
        Event=bound(Event),
        Thread=bound(Thread),
        get_ident=threading.get_ident,
        main_thread=threading.main_thread,
        current_thread=lambda: scheduler.current.thread if scheduler.current is not None else None,
        local=threading.local,
    )
    sim_queue = SimpleNamespace(SimpleQueue=bound(SimpleQueue), Empty=queue.Empty)
    clock = SimpleNamespace(**{name: getattr(time, name) for name in dir(time) if not name.startswith("_")})
    clock.monotonic = clock.perf_counter = lambda: scheduler.now
    clock.sleep = scheduler.sleep
    return {
        threading: sim_threading,
        queue: sim_queue,
        time: clock,
        time.perf_counter: clock.perf_counter,
        time.monotonic: clock.monotonic,
        queue.SimpleQueue: sim_queue.SimpleQueue,
        concurrent.futures.ThreadPoolExecutor: bound(ThreadPoolExecutor),
    }


@cache
def _places(models: frozenset[Any], package: str) -> list[tuple[Any, str, Any]]:
    """Where the package's modules name one of these: module, name, model. Looked up once: modules stay loaded."""
    found: list[tuple[Any, str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package:
            for name, value in list(vars(module).items()):
                with suppress(TypeError):  # not hashable, so none of them
                    if value in models:
                        found.append((module, name, value))
    return found


@contextmanager
def installed(replacements: dict[Any, Any], package: str) -> Iterator[None]:
    """Inside, the modules of `package` get the replacements where they name a model."""
    places = _places(frozenset(replacements), package)
    for module, name, model in places:
        setattr(module, name, replacements[model])
    try:
        yield
    finally:
        for module, name, model in places:
            setattr(module, name, model)
