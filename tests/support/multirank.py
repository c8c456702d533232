"""One training, written once: run by several ranks, and by one plain process that plays all of them.

A *script* is what a training file does with a `Training`. Prepared, `backward` is one rank's own; plain, it is that of
all ranks, one after the other, so that one process has the average of their gradients. The plain one sums either in the
order of ranks, as the engine says that it does: then every bit has to be the same. Or it takes the mean of all losses
and one backward, which is PyTorch on the joined batch: then results agree as far as float32 does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer, _muon
from torch.utils.checkpoint import checkpoint

import zero_infinity as zi
from support.compare import assert_same, copied, least_budget
from support.models import CASES, Case, mean_square, tokens, vectors
from support.rank_scripts import small_blocks
from support.ranks import run_ranks
from zero_infinity import model_layout as layout_module
from zero_infinity.api import engine_of

MAX_NORM = 0.05
LEAST = "least"  # memory: what prepare accepts on every rank, about

# ---------------------------------------------------------------------- models


class Odds(nn.Module):
    """Parameters of 1, 2, 3 and 65 elements: fewer than ranks, or one more than fit a grain."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(1))
        self.pair = nn.Parameter(torch.randn(2))
        self.down = nn.Linear(32, 3, bias=False)
        self.up = nn.Linear(3, 32)
        self.many = nn.Parameter(torch.randn(65))
        self.last = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.down(x).tanh()) * self.scale + self.pair.repeat(16)
        return self.last((x + self.many[:32] * self.many[33:]).unsqueeze(-1))


class Partial(nn.Module):
    """A frozen layer, a layer with a frozen bias, and a layer and a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 40)
        self.frozen = nn.Linear(40, 40)
        self.mixed = nn.Linear(40, 32)
        self.unused = nn.Linear(32, 32)
        self.idle = nn.Parameter(torch.randn(70))
        self.frozen.requires_grad_(False)
        self.mixed.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixed(self.frozen(self.first(x).tanh()).tanh())


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a random model."""

    width: int
    bias: bool
    norm: bool
    frozen: bool
    repeated: bool  # used twice


class Drawn(nn.Module):
    """A chain of random layers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.again = [layer.repeated for layer in layers]
        for layer in layers:
            inner = nn.Sequential(nn.Linear(32, layer.width, bias=layer.bias), nn.Tanh(), nn.Linear(layer.width, 32))
            if layer.norm:
                inner.append(nn.LayerNorm(32))
            self.layers.append(inner.requires_grad_(not layer.frozen))
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, again in zip(self.layers, self.again, strict=True):
            x = x + layer(x) * self.gain
            if again:
                x = x + layer(x)
        return x


class Words(nn.Module):
    """Few words, so that most come on every rank."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(96, 32, sparse=sparse)
        self.head = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens % 16))


MODELS: dict[str, Case] = {
    **CASES,
    "words": Case(lambda: Words(sparse=False), tokens(), mean_square),
    "sparse words": Case(lambda: Words(sparse=True), tokens(), mean_square),
    "odds": Case(Odds, vectors(), mean_square),
    "partial": Case(Partial, vectors(), mean_square),
    "reentrant": Case(lambda: Checkpointed(reentrant=True), vectors(), mean_square),
    "recomputed": Case(lambda: Checkpointed(reentrant=False), vectors(), mean_square),
}


def muon_and_adamw(model: nn.Module) -> Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return zi.combine_optimizers(torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2, eps=1e-4))


def soap(model: nn.Module) -> Optimizer:
    """Keeps lists of factors, and numbers in its states and groups."""
    import pytorch_optimizer

    return pytorch_optimizer.SOAP(model.parameters(), lr=1e-2, precondition_frequency=1)


def adamw8bit(model: nn.Module) -> Optimizer:
    """Quantises matrices of 32 x 32, in four blocks."""
    import bitsandbytes

    made: Optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2, eps=1e-4, min_8bit_size=1024)
    return made


def schedule_free(model: nn.Module) -> Optimizer:
    import schedulefree

    made: Optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=1e-2, eps=1e-4)
    return made


# An epsilon that noise in gradients which are zero (a bias in front of a norm) does not get past.
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, eps=1e-4),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "muon": muon_and_adamw,
    "soap": soap,
    "adamw8bit": adamw8bit,
    "schedule-free": schedule_free,
}


# ---------------------------------------------------------------------- one training


class Order(enum.Enum):
    """The order in which the plain run sums gradients."""

    RANKS = "ranks"  # at every backward over ranks
    BACKWARDS = "backwards"  # each rank its own backwards first, then over ranks
    JOINED = "joined"  # one backward of the mean of all losses


@dataclass(frozen=True, slots=True)
class Job:
    """One training."""

    script: Callable[[Training], None]
    model: str | tuple[Layer, ...] = "mlp"
    optimizer: str = "adamw"
    settings: Mapping[str, Any] = field(default_factory=dict)
    start: tuple[dict[str, Any], dict[str, Any]] | None = None  # state dicts to begin with
    group: str | None = None  # "subgroup" or "mesh": not all ranks train together

    def __str__(self) -> str:
        listed = " ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.model} {self.script.__name__} {self.optimizer} {listed}"


@dataclass(slots=True)
class Result:
    """Everything that is compared after a training."""

    losses: list[list[float]]  # of each backward: by rank in the plain run, this rank's alone in the prepared
    logged: list[Any]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    state_dict: dict[str, torch.Tensor]
    stats: zi.Stats | None = None


# Forward and backward of one rank's part of a batch; returns the loss.
Action = Callable[[nn.Module, Any], torch.Tensor]


class Training:
    """A model and an optimizer, as a script sees them."""

    def __init__(self, job: Job, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.job = job
        drawn = job.model
        self.case = MODELS[drawn] if isinstance(drawn, str) else Case(lambda: Drawn(drawn), vectors(), mean_square)
        self.losses: list[list[float]] = []
        self.logged: list[Any] = []
        self.model: nn.Module
        self.optimizer: Optimizer

    def build(self) -> None:
        torch.manual_seed(0)
        self.model = self.case.make()
        self.optimizer = OPTIMIZERS[self.job.optimizer](self.model)

    def load(self) -> None:
        if self.job.start is not None:
            # A plain optimizer goes on with the very tensors that it is given.
            self.model.load_state_dict(copied(self.job.start[0]))
            self.optimizer.load_state_dict(copied(self.job.start[1]))

    def data(self, number: int, rank: int) -> Any:
        """One rank's part of a batch. Random numbers that are drawn next belong to it."""
        data = self.case.batch(number * self.num_ranks + rank)
        torch.manual_seed(1000 * number + rank)
        return data

    def loss(self, number: int, rank: int) -> torch.Tensor:
        """The loss of one rank's part of a batch."""
        return self.case.loss(self.model, self.data(number, rank))

    def backward(self, number: int, *, scale: float = 1.0, sync: bool = True) -> None:
        raise NotImplementedError

    def act(self, number: int, action: Action) -> None:
        """As `backward`, for an action that calls it in its own way."""
        raise NotImplementedError

    def clip(self, max_norm: float, *, by_call: bool = False) -> None:
        raise NotImplementedError

    def gathered(self, module: nn.Module) -> Any:
        raise NotImplementedError

    def step(self) -> None:
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def forget(self) -> None:
        """The gradients were discarded in some other way."""

    def log(self, *values: Any) -> None:
        self.logged.extend(copied(value) for value in values)

    def result(self, stats: zi.Stats | None = None) -> Result:
        return Result(
            self.losses,
            self.logged,
            {name: copied(p.detach()) for name, p in self.model.named_parameters()},
            copied(self.optimizer.state_dict()),
            {name: copied(value.detach()) for name, value in self.model.state_dict().items()},
            stats,
        )


class Prepared(Training):
    """One rank of several."""

    def __init__(self, job: Job, rank: int, num_ranks: int, group: Any = None) -> None:
        super().__init__(job, num_ranks)
        self.rank = rank
        settings = dict(job.settings)
        if settings.get("memory") == LEAST:
            settings["memory"] = self._least_memory(settings)
        elif isinstance(settings.get("memory"), list):
            settings["memory"] = settings["memory"][rank]
        self.build()
        self.model, self.optimizer = zi.prepare(self.model, self.optimizer, zi.Config(**settings), group=group)
        self.load()

    def _least_memory(self, settings: Mapping[str, Any]) -> int:
        """About the smallest budget that `prepare` accepts on every rank. Each attempt stops before it allocates."""

        class Stopped(Exception):
            pass

        def stop(units: Any, free: int, together: Any, *, nvme: bool, **_: Any) -> None:
            needed.append(least_budget((units, together), nvme=nvme) - free)
            raise Stopped

        memory = 4096
        while True:
            needed: list[int] = []
            self.build()
            with mock.patch.object(layout_module, "place", stop), suppress(Stopped):
                zi.prepare(self.model, self.optimizer, zi.Config(**{**settings, "memory": memory}))
            most = torch.tensor(needed[0])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if most <= 0:
                return memory
            memory += int(most)

    def act(self, number: int, action: Action) -> None:
        self.losses.append([action(self.model, self.data(number, self.rank)).item()])

    def backward(self, number: int, *, scale: float = 1.0, sync: bool = True) -> None:
        loss = self.loss(number, self.rank)
        self.losses.append([loss.item()])
        with nullcontext() if sync else self.optimizer.no_sync():  # type: ignore[attr-defined]
            (loss * scale).backward()

    def clip(self, max_norm: float, *, by_call: bool = False) -> None:
        if by_call:
            self.log(zi.clip_grad_norm_(self.model.parameters(), max_norm))

    def gathered(self, module: nn.Module) -> Any:
        return zi.gathered(module.parameters(recurse=False))


class Plain(Training):
    """All ranks in one process."""

    def __init__(self, job: Job, num_ranks: int, order: Order = Order.RANKS) -> None:
        super().__init__(job, num_ranks)
        self.order = order
        self.sums: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(num_ranks)]
        self.stored_dtype = _dtype(job.settings.get("param_dtype"))
        self.dtype = _dtype(job.settings.get("compute_dtype"))
        self.wire_dtype = _dtype(job.settings.get("reduce_dtype"))
        self.build()
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        if self.dtype is not None:
            self._keep_masters(self.dtype)
            self._round()
        self.load()

    def _keep_masters(self, dtype: torch.dtype) -> None:
        """The optimizer's parameters are copies in float32 of those that the model computes with."""
        masters = self.model
        self.model = self.case.make().to(dtype)
        self.model.load_state_dict(masters.state_dict())
        self.masters = dict(zip(self.model.parameters(), masters.parameters(), strict=True))

    def _round(self) -> None:
        with torch.no_grad():
            for p, master in self.masters.items():
                p.copy_(master.to(self.stored_dtype))

    def data(self, number: int, rank: int) -> Any:
        data = super().data(number, rank)
        return data if self.dtype is None else data.to(self.dtype)

    def backward(self, number: int, *, scale: float = 1.0, sync: bool = True) -> None:
        if self.order is Order.JOINED:
            losses = [self.loss(number, rank) for rank in range(self.num_ranks)]
            self.losses.append([loss.item() for loss in losses])
            (torch.stack(losses).mean() * scale).backward()
            return

        def backward(model: nn.Module, data: Any) -> torch.Tensor:
            loss = self.case.loss(model, data)
            (loss * scale).backward()
            return loss

        self.act(number, backward)

    def act(self, number: int, action: Action) -> None:
        losses = []
        for rank, sums in enumerate(self.sums):
            before = {p: p.grad for p in self.model.parameters()}
            for p in self.model.parameters():
                p.grad = None
            losses.append(action(self.model, self.data(number, rank)).item())
            for p in self.model.parameters():
                if p.grad is not None:
                    new = p.grad.float()
                    if self.wire_dtype is not None:
                        new = new.to(self.wire_dtype).float()
                    sums[p] = sums[p] + new if p in sums else new
                p.grad = before[p]
        self.losses.append(losses)
        if self.order is Order.RANKS:
            self._average(add=True)
            for sums in self.sums:
                sums.clear()
        else:
            self._average(add=False)

    def _average(self, *, add: bool) -> None:
        for p in self.model.parameters():
            found = [sums[p] for sums in self.sums if p in sums]
            if not found:
                continue
            total = found[0].clone()
            for other in found[1:]:
                total += other
            total /= self.num_ranks
            target = self.masters.get(p, p)
            target.grad = target.grad + total if add and target.grad is not None else total

    def clip(self, max_norm: float, *, by_call: bool = False) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        if by_call:
            self.log(norm)

    def gathered(self, module: nn.Module) -> Any:
        return nullcontext()

    def step(self) -> None:
        super().step()
        self._round()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self.forget()

    def forget(self) -> None:
        for sums in self.sums:
            sums.clear()


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


# ---------------------------------------------------------------------- many of them


def run_jobs(jobs: list[Job], num_ranks: int) -> list[list[Result]]:
    """Run all jobs in one launch of `num_ranks` ranks. Returns the results of the ranks for each job."""
    by_rank = run_ranks(num_ranks, _run_jobs, num_ranks, jobs)
    return [[results[number] for results in by_rank] for number in range(len(jobs))]


def _run_jobs(rank: int, num_ranks: int, jobs: list[Job]) -> list[Result | None]:
    small_blocks()
    return [_run_job(rank, num_ranks, job) for job in jobs]


def _run_job(rank: int, num_ranks: int, job: Job) -> Result | None:
    group = None
    if job.group == "subgroup":  # all but the second
        members = [r for r in range(num_ranks) if r != 1]
        group = dist.new_group(members)
        if rank == 1:
            return None
        rank, num_ranks = members.index(rank), len(members)
    elif job.group == "mesh":
        mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh["dp"]
        rank, num_ranks = mesh.get_local_rank("dp"), num_ranks // 2
    training = Prepared(job, rank, num_ranks, group)
    job.script(training)
    result = training.result()
    result.stats = stats = zi.stats(training.model)
    if not stats.memory_peak <= stats.memory_budget:
        raise AssertionError(f"{job}: {stats.memory_peak:,} bytes held of {stats.memory_budget:,}")
    return result


def run_plain(job: Job, num_ranks: int, order: Order = Order.RANKS) -> Result:
    training = Plain(job, num_ranks, order)
    job.script(training)
    return training.result()


def check(
    jobs: list[Job],
    num_ranks: int,
    order: Order = Order.RANKS,
    *,
    joined: bool = True,
    exact: bool = True,
    moves: bool = True,
) -> list[list[Result]]:
    """Run the jobs, which differ in their settings alone.

    They have the same bits as the plain run that sums in the order of ranks (`exact`, else only as each other), and
    are as near to the joined batch as float32 is (`joined`).
    """
    by_job = run_jobs(jobs, num_ranks)
    plain = run_plain(jobs[0], num_ranks, order)
    first = [prepared_part(result) for result in by_job[0]]
    for job, results in zip(jobs, by_job, strict=True):
        for rank, result in enumerate(results):
            expected = plain_part(plain, rank) if exact else first[rank]
            assert_same(f"{job}, rank {rank} of {num_ranks}", expected, prepared_part(result))
        if moves:
            assert_moved(job, results)
    if joined:
        other = run_plain(jobs[0], num_ranks, Order.JOINED)
        for rank, result in enumerate(by_job[0]):
            assert_close(f"{jobs[0]}, rank {rank} of {num_ranks}", plain_part(other, rank), prepared_part(result))
    return by_job


def assert_close(what: str, expected: Any, found: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5, msg=lambda text: f"{what}: {text}")


def assert_moved(job: Job, results: list[Result]) -> None:
    """Check that states were read from NVMe, if there is any."""
    for result in results:
        if job.settings.get("nvme") and result.stats is not None:
            assert result.stats.bytes_read, f"{job}: nothing was read from the drive"


def plain_part(result: Result, rank: int) -> dict[str, Any]:
    return {
        "losses": [losses[rank] for losses in result.losses],
        "logged": result.logged,
        "weights": result.weights,
        "optimizer": result.optimizer["state"],
    }


def prepared_part(result: Result) -> dict[str, Any]:
    return {
        "losses": [loss for (loss,) in result.losses],
        "logged": result.logged,
        "weights": result.weights,
        "optimizer": result.optimizer["state"],
    }


# ---------------------------------------------------------------------- scripts


def steps(run: Training, num_steps: int = 3) -> None:
    for number in range(num_steps):
        run.backward(number)
        run.step()


def average(run: Training) -> None:
    """Averaged weights are seen after every second step."""
    optimizer: Any = run.optimizer
    for number in range(4):
        optimizer.train()
        run.backward(number)
        run.step()
        if number % 2:
            optimizer.eval()
            run.log({name: copied(p.detach()) for name, p in run.model.named_parameters()})


def accumulate(run: Training) -> None:
    """Two backwards a step, by gradient_accumulation_steps=2."""
    for number in range(3):
        for part in range(2):
            run.backward(2 * number + part, scale=0.5)
        run.step()


def accumulate_without_sync(run: Training) -> None:
    """Three backwards a step, of which the first two only accumulate."""
    for number in range(3):
        for part in range(3):
            run.backward(3 * number + part, scale=1 / 3, sync=part == 2)
        run.step()


def clip_by_config(run: Training) -> None:
    """max_grad_norm=MAX_NORM."""
    for number in range(3):
        run.backward(number)
        run.clip(MAX_NORM)
        run.step()


def clip_by_call(run: Training) -> None:
    for number in range(3):
        run.backward(number)
        run.clip(MAX_NORM, by_call=True)
        run.step()


def look_and_edit(run: Training) -> None:
    """Values and gradients are seen and changed between backward and step, values and states between steps."""
    for number in range(3):
        run.backward(number)
        for module in run.model.modules():
            with run.gathered(module):
                for name, p in module.named_parameters(recurse=False):
                    run.log(p.detach(), p.grad)
                    if p.grad is not None and "weight" in name:
                        p.grad.mul_(0.5)
        run.step()
        for module in run.model.modules():
            with run.gathered(module), torch.no_grad():
                for p in module.parameters(recurse=False):
                    p.mul_(0.99)
        for p in run.model.parameters():
            state = run.optimizer.state[p]
            run.log(state["exp_avg"])
            run.optimizer.state[p] = {**state, "exp_avg": state["exp_avg"] * 0.5}


def schedule(run: Training) -> None:
    warm = torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.1, total_iters=2)
    cool = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    both = torch.optim.lr_scheduler.SequentialLR(run.optimizer, [warm, cool], [2])
    for number in range(4):
        run.backward(number)
        run.step()
        both.step()
        run.log(both.get_last_lr())


def zero_kinds(run: Training) -> None:
    """Gradients are set to None, set to zero, or kept; the model's zero_grad does the same as the optimizer's."""
    run.backward(0)
    run.zero_grad()
    run.backward(1)
    run.step()
    run.backward(2)
    run.optimizer.step()
    run.zero_grad(set_to_none=False)
    run.optimizer.step()
    run.zero_grad()
    run.backward(3)
    run.model.zero_grad()
    run.forget()
    run.backward(4)
    run.step()


def unfreeze(run: Training) -> None:
    """Unfreeze one layer and freeze another after the second step."""
    for number in range(4):
        run.backward(number)
        run.step()
        if number == 1:
            run.model.get_submodule("frozen").requires_grad_(True)
            run.model.get_submodule("first").requires_grad_(False)


# ---------------------------------------------------------------------- by hand


def two_models(rank: int, num_ranks: int, directory: Path) -> list[Result]:
    """Train two models alternately; the second is prepared after the first step of the first."""
    small_blocks()
    jobs = [
        Job(steps, "mlp", settings={"stage": 3, "memory": "4MiB"}),
        Job(steps, "odds", "sgd", settings={"stage": 2, "memory": "1MiB", "nvme": directory}),
    ]
    runs = []
    for number in range(4):
        if len(runs) < 2:
            runs.append(Prepared(jobs[number], rank, num_ranks))
        for at, run in enumerate(runs):
            if number - at < 3:
                run.backward(number - at)
                run.step()
    return [run.result() for run in runs]


def overflow(rank: int, num_ranks: int, every: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """In the second of four steps the gradients of the last rank are infinite."""
    small_blocks()
    outcomes = []
    for settings in every:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        model, optimizer = zi.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), zi.Config(**settings))
        after = []
        for number in range(4):
            loss = mean_square(model, vectors()(number * num_ranks + rank))
            if number == 1 and rank == num_ranks - 1:
                loss = loss * torch.inf
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after.append({name: copied(p.detach()) for name, p in model.named_parameters()})
        scale = engine_of(model).loss_scale
        outcomes.append((after, scale.scale if scale else None, scale.num_skipped if scale else None))
    return outcomes


def build(
    rank: int, num_ranks: int, name: str, every: list[dict[str, Any]], optimizer: str = "adamw"
) -> list[tuple[Any, ...]]:
    """Build a model inside zi.init, and train it."""
    small_blocks()
    outcomes = []
    for settings in every:
        job = Job(steps, name, settings=settings)
        config = zi.Config(**settings)
        torch.manual_seed(0)
        with zi.init(config):
            model = MODELS[name].make()
        built = {n: copied(p.detach()) for n, p in model.named_parameters()}
        run = Prepared.__new__(Prepared)
        Training.__init__(run, job, num_ranks)
        run.rank = rank
        run.model, run.optimizer = zi.prepare(model, OPTIMIZERS[optimizer](model), config)
        steps(run)
        outcomes.append((built, run.result(), zi.stats(run.model)))
    return outcomes


def orthogonalise(rank: int, num_ranks: int, every: list[dict[str, Any]]) -> list[list[tuple[int, ...]]]:
    """Train with Muon; return the shapes that this rank has orthogonalised in two steps of two backwards each."""
    small_blocks()
    found = []
    for settings in every:
        run = Prepared(Job(steps, optimizer="muon", settings=settings), rank, num_ranks)
        shapes: list[tuple[int, ...]] = []
        plain = _muon._zeropower_via_newtonschulz

        def count(gradient: torch.Tensor, *args: Any, shapes: Any = shapes, plain: Any = plain) -> torch.Tensor:
            shapes.append(tuple(gradient.shape))
            result: torch.Tensor = plain(gradient, *args)
            return result

        with mock.patch.object(_muon, "_zeropower_via_newtonschulz", count):
            for number in range(4):
                run.backward(number)
                if number % 2:
                    run.step()
            zi.synchronize(run.model)
        found.append(shapes)
    return found
