"""Training when something goes wrong: who hears of it, how soon, and what is left."""

from __future__ import annotations

import errno
import gc
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import image, mounted
from support import children
from support.compare import Run, adamw, assert_identical, minimal_memory, run_plain, run_prepared, same_bits, training
from support.fake_device import FakeRequest
from support.faulty import FaultyDevice, break_device
from support.models import CASES, mean_square, mlp, vectors
from support.patience import SECONDS
from support.resources import all_given_back
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

import zero_infinity as zi
from zero_infinity import api
from zero_infinity.engine_parts import EngineParts
from zero_infinity.policy import chunk_size, homes
from zero_infinity.storage.io_types import Direction
from zero_infinity.storage.striped_files import FileDevice


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a few KiB are moved like large ones, and their records are cut into several chunks."""
    monkeypatch.setattr(homes, "_SMALL_BYTES", 0)
    monkeypatch.setattr(chunk_size, "MIN_CHUNK_BYTES", 4096)


def deep() -> nn.Module:
    return mlp(depth=10)


def prepared(directory: Path, device: type[FileDevice] = FileDevice, **changes: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = deep()
    config = zi.Config(memory=minimal_memory(mlp, adamw), nvme=directory, **changes)
    return api.prepare_with(EngineParts(make_device=device), model, adamw(model), config)


def step(
    model: nn.Module, optimizer: Optimizer, number: int = 0, between: Callable[[str], None] = lambda _: None
) -> None:
    """One iteration; `between` is called before each of its phases."""
    between("forward")
    loss = mean_square(model, vectors()(number))
    between("backward")
    loss.backward()
    between("step")
    optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------------- the drive


@pytest.mark.half
@pytest.mark.parametrize("update", ["auto", "after_backward"])
@pytest.mark.parametrize("direction", [Direction.READ, Direction.WRITE], ids=lambda direction: direction.value)
@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
def test_an_error_of_the_drive_is_raised_where_the_model_is_used(
    phase: str, direction: Direction, update: str, tmp_path: Path
) -> None:
    device = break_device()
    with all_given_back():
        _fail_in(phase, direction, device, tmp_path, update)


def _fail_in(phase: str, direction: Direction, device: type[FaultyDevice], directory: Path, update: str) -> None:
    model, optimizer = prepared(directory, device, update=update)
    for number in range(3):
        step(model, optimizer, number)

    def arm(reached: str) -> None:
        if reached == phase:
            device.fails = staticmethod(lambda request: request.direction is direction)  # type: ignore[assignment]

    # A write fails after the call that caused it has returned: the next ones hear of it.
    with pytest.raises(zi.TransferError) as caught:
        step(model, optimizer, 3, arm)
        for number in range(4, 7):
            step(model, optimizer, number)
    error = caught.value
    failed = device.made[0].failed[0]
    assert error.errno == errno.EIO
    assert error.filename.startswith(str(directory))
    assert re.search(rf"{direction.value} of .*{re.escape(str(directory))}.* at {failed.offset} failed", str(error)), (
        error
    )
    assert "EIO" in str(error)
    with pytest.raises((zi.StorageError, zi.EngineClosedError, zi.TornStepError)):
        step(model, optimizer)  # and it stays an error
    del caught, error
    # Autograd keeps what is left of a failed graph, and with it the model, until the next backward on this thread.
    torch.ones(1, requires_grad=True).sum().backward()


def test_the_process_of_a_failed_training_ends_cleanly(tmp_path: Path) -> None:
    script = """
from support.faulty import FaultyDevice
from zero_infinity import api
from zero_infinity.engine_parts import EngineParts
FaultyDevice.fails = staticmethod(lambda request: request.index == 400)
FaultyDevice.made = []
model = make()
config = zi.Config(memory="160KiB", nvme=sys.argv[1])
parts = EngineParts(make_device=FaultyDevice)
model, optimizer = api.prepare_with(parts, model, torch.optim.AdamW(model.parameters()), config)
train(model, optimizer, 1000)
"""
    code, _, errors = children.run(script, str(tmp_path))
    assert code == 1, errors
    assert re.search(r"^zero_infinity\.errors\.TransferError: .*EIO", errors, re.MULTILINE), errors
    assert errors.count("Traceback") == errors.count("direct cause") + 1, errors
    assert "Exception ignored" not in errors
    assert "terminate called" not in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("verify", [True, False])
def test_a_flipped_bit_is_found_when_verify_is_set(verify: bool, tmp_path: Path) -> None:
    flips: list[FakeRequest] = []

    class Flipping(FaultyDevice):
        fails = staticmethod(lambda _: False)  # type: ignore[assignment]
        made: list[FaultyDevice] = []  # noqa: RUF012

        def read(self, memory: memoryview, offset: int) -> int:
            num_bytes = super().read(memory, offset)
            if len(self.requests) > 150 and not flips:
                flips.append(self.requests[-1])
                memory[17] ^= 1
            return num_bytes

    with all_given_back():
        model, optimizer = prepared(tmp_path, Flipping, verify=verify)

        def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            for number in range(8):
                step(model, optimizer, number)

        if verify:
            with pytest.raises(zi.CorruptionError, match=rf"block '.*' .* came back changed from {tmp_path}.*checksum"):
                train(model, optimizer)
        else:
            train(model, optimizer)  # nobody looks: this is what the setting is for
        assert len(flips) == 1
        del model, optimizer


def test_verify_is_quiet_on_a_sound_drive(tmp_path: Path) -> None:
    script = training(vectors(), mean_square)
    config = zi.Config(memory=minimal_memory(mlp, adamw), nvme=tmp_path, verify=True)
    assert_identical(run_plain(deep, script, adamw), run_prepared(deep, script, adamw, config))


# ---------------------------------------------------------------------- prepare


def assert_untouched(model: nn.Module, values: list[torch.Tensor]) -> None:
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(same_bits(a, b) for a, b in zip(values, model.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:.*(direct I/O|fallocate):RuntimeWarning")
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext2"])
def test_a_full_disk_is_an_error_of_prepare(kind: str, tmp_path: Path) -> None:
    model = mlp(width=256, depth=4)
    values = [p.detach().clone() for p in model.parameters()]
    disk = (
        mounted(tmp_path / kind, "-t", "tmpfs", "-o", "size=2m", "tmpfs")
        if kind == "tmpfs"
        else image(tmp_path, kind, 2 << 20)
    )
    with disk as directory, all_given_back():
        with pytest.raises(
            zi.SwapSpaceError, match=r"(?s)nvme='.*': .* of swap space is needed, .* is free.*fix"
        ) as caught:
            zi.prepare(model, adamw(model), zi.Config(memory="4MiB", nvme=directory))
        assert caught.value.errno == errno.ENOSPC
        assert str(directory) in str(caught.value)
        del caught
        assert_untouched(model, values)
        assert not [path for path in directory.iterdir() if path.name != "lost+found"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    model = mlp()
    values = [p.detach().clone() for p in model.parameters()]
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as directory, all_given_back():
        config = zi.Config(memory="4MiB", nvme=directory)
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        with pytest.raises(zi.SwapSpaceError, match="read-only"):
            zi.prepare(model, adamw(model), config)
        with pytest.raises(zi.ConfigError, match=f"nvme: {directory} is not writable"):
            zi.Config(memory="4MiB", nvme=directory)
        gc.collect()
    assert_untouched(model, values)


def test_too_small_a_budget_names_module_bytes_budget_and_a_fix_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the sizes that users have
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 1024), nn.Linear(1024, 8))
    values = [p.detach().clone() for p in model.parameters()]
    with all_given_back():
        with pytest.raises(zi.CapacityError) as caught:
            zi.prepare(model, adamw(model), zi.Config(memory="6MiB", nvme=tmp_path, tile_above="1GiB"))
        message = str(caught.value)
        del caught
        assert_untouched(model, values)
    assert re.match(r"'2' needs 8\.0 MiB of host memory .* but memory is 6\.0 MiB\n  fix:   memory=\"\d+MiB\"", message)
    suggested = re.search(r'memory="(\w+)"', message)
    assert suggested is not None
    model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory=suggested[1], nvme=tmp_path))
    for number in range(2):
        mean_square(model, vectors(64)(number)).backward()
        optimizer.step()


def test_too_small_a_budget_without_nvme(tmp_path: Path) -> None:
    model = mlp(width=256)
    values = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(zi.CapacityError, match=r"(?s)states take .* memory is 1\.0 MiB.*fix:   nvme=.*memory=\""):
        zi.prepare(model, adamw(model), zi.Config(memory="1MiB"))
    assert_untouched(model, values)


# ---------------------------------------------------------------------- processes


def is_told(child: subprocess.Popen[str], line: str) -> bool:
    """Wait until the child says this; False if it ends, or says something else, before it does."""
    assert child.stdout is not None
    return child.stdout.readline().strip() == line


def wait_for(child: subprocess.Popen[str], line: str) -> None:
    if not is_told(child, line):
        _, _, errors = children.finish(child)
        raise AssertionError(f"the process ended before it said {line!r}: {errors}")


def test_a_killed_training_leaves_nothing_in_the_directory(tmp_path: Path) -> None:
    child = children.start(
        """
model, optimizer = prepare(sys.argv[1])
train(model, optimizer, 3)
print("training", flush=True)
train(model, optimizer, 1_000_000)
""",
        str(tmp_path),
    )
    wait_for(child, "training")
    time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    code, _, _ = children.finish(child)
    assert code == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("update", ["auto", "after_backward"])
def test_interrupts_at_any_time_leave_a_model_that_goes_on_or_says_why_not(update: str, tmp_path: Path) -> None:
    """Real SIGINTs, wherever they strike. Either training goes on, or the step is torn and every further call says so."""
    child = children.start(
        """
model, optimizer = prepare(sys.argv[1], update=sys.argv[2])
train(model, optimizer, 3)
print("training", flush=True)
num_interrupts = 0
for _ in range(8):
    try:
        try:
            print("go", flush=True)  # one interrupt comes after each
            train(model, optimizer, 1_000_000)
        except KeyboardInterrupt:
            num_interrupts += 1
            optimizer.zero_grad()
    except zi.TornStepError:
        print("torn", flush=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            train(model, optimizer)
        except zi.TornStepError:
            sys.exit(0)
        sys.exit("a torn step was forgotten")
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("interrupted", num_interrupts, flush=True)
train(model, optimizer, 3)
if not all(torch.isfinite(p.detach()).all() for p in model.parameters()):
    sys.exit("a weight is not finite")
""",
        str(tmp_path),
        update,
    )
    wait_for(child, "training")
    torn = False
    for number in range(8):
        torn = not is_told(child, "go")
        if torn:
            break
        time.sleep(0.01 + 0.037 * number)
        child.send_signal(signal.SIGINT)
    code, output, errors = children.finish(child)
    assert code == 0, output + errors
    assert not errors
    assert torn or "torn" in output or "interrupted 8" in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("update", ["auto", pytest.param("after_backward", marks=pytest.mark.long)])
def test_interrupts_at_random_moments_are_neither_lost_nor_harmful(update: str, tmp_path: Path) -> None:
    """Each one is raised once; what follows trains, or says that the step is torn."""
    script = """
import random
model, optimizer = prepare(sys.argv[1], update=sys.argv[2])
train(model, optimizer, 3)
start = time.monotonic()
train(model, optimizer, 5)
per_step = (time.monotonic() - start) / 5
random.seed(0)
go, sent = threading.Event(), threading.Event()

def interrupt():
    while True:
        go.wait()
        go.clear()
        time.sleep(0.005 + random.random() * 1.5 * per_step)
        os.kill(os.getpid(), signal.SIGINT)
        sent.set()

threading.Thread(target=interrupt, daemon=True).start()
for number in range(40):
    try:
        sent.clear()
        try:
            go.set()
            train(model, optimizer, 1_000_000)
        except KeyboardInterrupt:
            pass
        sent.wait()
        optimizer.zero_grad()
        train(model, optimizer)
    except zi.TornStepError:
        model, optimizer = prepare(sys.argv[1], update=sys.argv[2])
        train(model, optimizer, 3)
"""
    code, output, errors = children.run(script, str(tmp_path), update)
    assert (code, errors) == (0, ""), output + errors


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupt_inside_the_model_can_be_followed_by_training(where: str, tmp_path: Path) -> None:
    """At a place where the model has half of its layers behind it; then the batch is left out."""

    def script(run: Run) -> None:
        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        for number in range(6):
            torch.manual_seed(1000 + number)
            if number not in (1, 3):
                run.step(mean_square(run.model, vectors()(number)))
                continue
            handle = (
                run.model[12].register_forward_hook(interrupt)
                if where == "forward"
                else run.model[13].register_full_backward_hook(interrupt)
            )
            with pytest.raises(KeyboardInterrupt):
                mean_square(run.model, vectors()(number)).backward()
            handle.remove()
            run.optimizer.zero_grad()

    config = zi.Config(memory=minimal_memory(mlp, adamw), nvme=tmp_path, update="after_backward")
    assert_identical(run_plain(deep, script, adamw), run_prepared(deep, script, adamw, config))


def test_an_interrupt_after_updates_have_run_is_a_torn_step(tmp_path: Path) -> None:
    model, optimizer = prepared(tmp_path)
    for number in range(3):
        step(model, optimizer, number)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[13].register_full_backward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        mean_square(model, vectors()(3)).backward()
    handle.remove()
    for attempt in (optimizer.step, optimizer.zero_grad, lambda: step(model, optimizer)):
        with pytest.raises(zi.TornStepError, match=r"(?s)update.*fix:.*after_backward"):
            attempt()


EXITS = """
plain = make()
train(plain, torch.optim.AdamW(plain.parameters()))  # what is imported at the first use need not be imported by each child
import torch._dynamo
WAYS = sys.argv[3:]
number = None
for number in range(len(WAYS) * int(sys.argv[2])):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        break
    deadline = time.monotonic() + 100
    status = None
    while status is None and time.monotonic() < deadline:
        done, ended = os.waitpid(pid, os.WNOHANG)
        status = ended if done else None
        time.sleep(0.005)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    print(WAYS[number % len(WAYS)], "hangs" if status is None else os.waitstatus_to_exitcode(status), flush=True)
else:
    os._exit(0)

way = WAYS[number % len(WAYS)]
config = zi.Config(memory="160KiB", nvme=sys.argv[1])
changes = {}
if way == "accelerator":
    changes = {"device": zi.EmulatedAccelerator(64 << 10)}
elif way == "bfloat16":
    config = config.replace(param_dtype="bfloat16", memory="256KiB")
if way == "built":
    with zi.init(config):
        model = make()
else:
    model = make()
    model, optimizer = zi.prepare(model, torch.optim.AdamW(model.parameters()), config, **changes)
    if way != "prepared":
        train(model, optimizer, 2 + number % 3)
    if way == "mid-step":
        model(torch.ones(4, 64)).sum().backward()
    elif way == "forward only":
        kept = model(torch.ones(4, 64))
    elif way == "error":
        sys.excepthook = lambda *_: None
        raise KeyError("the user's")
    elif way == "sys.exit":
        sys.exit(3)
    elif way == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""


@pytest.mark.parametrize("repeats", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_end_of_the_interpreter_needs_no_cleaning_up(repeats: int, tmp_path: Path) -> None:
    """Wherever training is when the script ends: no hang, no traceback, no abort, nothing in the directory."""
    ways = ("trained", "mid-step", "forward only", "prepared", "built")
    ways += ("error", "sys.exit", "thread", "accelerator", "bfloat16")
    code, output, errors = children.run(EXITS, str(tmp_path), str(repeats), *ways)
    assert code == 0, errors
    codes: dict[str, list[str]] = {}
    for line in output.splitlines():
        way, ended = line.rsplit(" ", 1)
        codes.setdefault(way, []).append(ended)
    expected = {"error": "1", "sys.exit": "3"}
    assert codes == {way: [expected.get(way, "0")] * repeats for way in ways}
    assert not errors
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------- threads and forks


class Meeting(nn.Module):
    """Stops inside its forward until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.linear.register_forward_hook(self.stop)

    def stop(self, *_: Any) -> None:
        if not self.inside.is_set():
            self.inside.set()
            assert self.go_on.wait(SECONDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_a_second_thread_in_the_model_gets_an_error(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Meeting()
    model, _ = zi.prepare(model, adamw(model), zi.Config(memory="1MiB", nvme=tmp_path))
    with zi.gathered(model):
        weight, bias = model.linear.weight.detach().clone(), model.linear.bias.detach().clone()
    results: list[torch.Tensor] = []
    x = vectors()(0)
    first = threading.Thread(target=lambda: results.append(model(x).detach()))
    first.start()
    try:
        assert model.inside.wait(SECONDS)
        with pytest.raises(zi.UsageError, match=r"second thread.*\n  fix:"):
            model(x)
    finally:
        model.go_on.set()
        first.join(SECONDS)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert same_bits(results[0], expected)
    assert same_bits(model(x).detach(), expected)  # one after the other is fine


class Examples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(32, generator=torch.Generator().manual_seed(index))


@pytest.mark.parametrize("persistent", [False, True])
def test_forked_data_loader_workers(persistent: bool, tmp_path: Path) -> None:
    """Workers are forked while the engine's threads run, and end while it goes on."""

    def script(run: Run) -> None:
        loader = DataLoader(
            Examples(),
            batch_size=4,
            num_workers=2,
            persistent_workers=persistent,
            multiprocessing_context="fork",
            timeout=SECONDS,
        )
        for _ in range(2):
            for number, batch in enumerate(loader):
                torch.manual_seed(1000 + number)
                run.step(mean_square(run.model, batch))

    config = zi.Config(memory=minimal_memory(mlp, adamw), nvme=tmp_path)
    with all_given_back():
        prepared_outcome = run_prepared(deep, script, adamw, config)
    assert_identical(run_plain(deep, script, adamw), prepared_outcome)


# Forks while a thread of the parent holds every lock that the engine has: the child's copies are held for ever.
FORKED = """
import gc
from zero_infinity.api import close, engine_of
LOCKS = type(threading.Lock()), type(threading.RLock())

def locks_of(part, seen):
    if id(part) in seen:
        return
    seen[id(part)] = part
    lock = part._lock if isinstance(part, threading.Condition) else part
    if isinstance(lock, LOCKS):
        yield lock
    elif type(part).__module__.startswith("zero_infinity."):
        slots = (getattr(part, name, None) for name in getattr(type(part), "__slots__", ()))
        for inner in [*vars(part).values()] if hasattr(part, "__dict__") else [*slots]:
            yield from locks_of(inner, seen)

model, optimizer = prepare(sys.argv[1])
train(model, optimizer, 3)
zi.synchronize(model)
locks = {id(lock): lock for lock in locks_of(engine_of(model), {})}
print("locks", len(locks), flush=True)
held, over = threading.Event(), threading.Event()

def hold():
    for lock in locks.values():
        lock.acquire()
    held.set()
    over.wait()
    for lock in locks.values():
        lock.release()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
USES = {
    "forward": lambda: model(torch.ones(1, 64)),
    "read": lambda: model[0][0].weight.sum(),
    "state_dict": model.state_dict,
    "step": optimizer.step,
    "zero_grad": optimizer.zero_grad,
    "states": optimizer.state_dict,
    "stats": lambda: zi.stats(model),
    "synchronize": lambda: zi.synchronize(model),
    "close": lambda: close(model),
}
for name, use in USES.items():
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)  # a hang ends by this
        try:
            use()
        except zi.UsageError as error:
            os.write(1, f"{name}: {error}".encode().replace(b"\\n", b" ") + b"\\n")
        del model, optimizer, use
        USES.clear()
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print("ended", os.waitstatus_to_exitcode(status), flush=True)
over.set()
holder.join()
train(model, optimizer, 2)
print("trained on")
"""


def test_a_forked_child_that_uses_the_model_is_told_so_and_harms_nobody(tmp_path: Path) -> None:
    """The engine's threads do not exist in the child: a call there must not hang, whoever held a lock at the fork."""
    code, output, errors = children.run(FORKED, str(tmp_path))
    assert code == 0, errors
    first, *lines, last = output.splitlines()
    assert int(first.removeprefix("locks ")) >= 5, first
    assert [line for line in lines if line.startswith("ended")] == ["ended 0"] * 9, output
    told = [line.split(":")[0] for line in lines if "forked child" in line]
    assert told == ["forward", "read", "state_dict", "step", "zero_grad", "states", "stats", "synchronize"], output
    assert last == "trained on"
    assert not errors


def test_two_trainings_share_a_directory(tmp_path: Path) -> None:
    """No name is taken, so none is taken twice."""
    script = training(vectors(), mean_square, num_steps=2)
    expected = CASES["mlp"]
    torch.manual_seed(0)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = expected.make()
        model, optimizer = zi.prepare(model, adamw(model), zi.Config(memory=minimal_memory(mlp, adamw), nvme=tmp_path))
        runs.append(Run(model, optimizer, prepared=True))
    for run in runs:
        script(run)
    assert all(same_bits(a, b) for a, b in zip(runs[0].logged, runs[1].logged, strict=True))
    assert not list(tmp_path.iterdir())
