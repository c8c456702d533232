"""`zero-infinity bench device`: links, overlap and exactness of an accelerator, as a table and as JSON to send.

Owns the options, the order of measurements and the report. `device_links` measures copies, `device_steps` trains. torch
is imported only when something is measured.

The command also runs where nobody has run the library yet. So a measurement that fails becomes a row with its error,
and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zero_infinity import __version__
from zero_infinity.byte_sizes import format_bytes, format_rate, format_seconds, parse_bytes
from zero_infinity.cli.exit_codes import EXIT_FAILED
from zero_infinity.cli.number_options import integer
from zero_infinity.cli.progress_display import status_lines
from zero_infinity.errors import ConfigError
from zero_infinity.machine import host_memory
from zero_infinity.models.presets import PRESETS, preset

if TYPE_CHECKING:
    import torch

    from zero_infinity.cli.device_steps import Budget, Job, StepResult

FORMAT_VERSION = 1
_LARGEST_PRESET = "125M"  # a step of it takes some 50 ms on an accelerator
# Device memory for a plain model and a prepared one whose states fit: 16 + 20 bytes, and activations.
_BYTES_PER_PARAMETER = 64
_HOST_UPDATE = "plain, update on the host"

_EPILOG = """\
examples:
  zero-infinity bench device --out device.json
  zero-infinity bench device /mnt/nvme --preset 25M --json

It takes some minutes. The result has no host name, user name or path in it.
"""

Report = dict[str, Any]  # as it is written: plain values only
Result = TypeVar("Result")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure an accelerator: its link to host memory, overlap of copies with computation, and training steps of a "
        "small GPT at several device memory budgets, interleaved with plain PyTorch, with losses compared bit for bit."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "directory", metavar="DIRECTORY", nargs="?", type=Path, help="also train with states on this drive, as in nvme="
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to this file")
    parser.add_argument(
        "--preset",
        metavar="SIZE",
        help=f"size of the model: {', '.join(PRESETS)} (default: {_LARGEST_PRESET}, less if memory is short)",
    )
    parser.add_argument("--batch", type=integer, default=4, metavar="N", help="sequences in a batch (default 4)")
    parser.add_argument("--turns", type=integer, default=5, metavar="N", help="timed turns of 3 steps (default 5)")
    parser.add_argument("--size", default="256MiB", metavar="SIZE", help="most bytes of a copy (default 256MiB)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    num_bytes = parse_bytes(args.size)
    _check_paths(args.directory, args.out)
    device = _find_device()
    shape_name = args.preset or _fitting_preset(device)
    preset(shape_name)  # an unknown name fails before anything is measured
    with status_lines() as say:
        report = measure(device, shape_name, args, num_bytes, say)
    text = json.dumps(report, indent=2)
    if args.out is not None:
        _write(args.out, text)
    if args.json:
        print(text)
    else:
        _print_tables(report)
    return EXIT_FAILED if report["errors"] else 0


def _check_paths(directory: Path | None, out: Path | None) -> None:
    """Fail before minutes of measurements, not after them."""
    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK | os.X_OK)):
        raise ConfigError(f"{directory} is not a directory to write to\n  fix:   a directory on the drive to measure")
    if out is not None and (out.is_dir() or not os.access(out.absolute().parent, os.W_OK | os.X_OK)):
        raise ConfigError(f"--out {out}: cannot be written\n  fix:   a file name in a directory that exists")


def _find_device() -> torch.device:
    """The current accelerator; an error with what is needed if there is none."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        raise ConfigError(
            f"bench device needs an accelerator, but torch {torch.__version__} finds none\n"
            "  fix:   run it on a machine with a GPU or another accelerator, its driver, and a torch build for it\n"
            "  check: zero-infinity doctor"
        )
    return torch.device(found.type, torch.accelerator.current_device_index())


def _fitting_preset(device: torch.device) -> str:
    """The largest model, up to a limit, that fits on the device and in host memory."""
    import torch

    room = min(torch.accelerator.get_memory_info(device)[0], host_memory().available) // _BYTES_PER_PARAMETER
    limit = min(room, PRESETS[_LARGEST_PRESET].num_parameters)
    fitting = [name for name, shape in PRESETS.items() if shape.num_parameters <= limit]
    return fitting[-1] if fitting else next(iter(PRESETS))


@dataclass(frozen=True, slots=True)
class _Attempts:
    """Runs measurements one after the other and keeps the errors of those that fail."""

    say: Callable[[str], None]
    errors: list[Report]

    def attempt(self, name: str, measurement: Callable[[], Result]) -> Result | None:
        self.say(name)
        try:
            return measurement()
        except Exception as error:  # noqa: BLE001 - on new hardware the error is the result
            lines = (str(error) or type(error).__name__).splitlines()
            self.say(f"{name}: failed: {lines[0]}")
            frames = traceback.extract_tb(error.__traceback__)
            calls = [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames]  # no folders
            self.errors.append({"measurement": name, "error": type(error).__name__, "text": lines[0], "calls": calls})
            return None


def measure(
    device: torch.device, shape_name: str, args: argparse.Namespace, most_bytes: int, say: Callable[[str], None]
) -> Report:
    """Measure everything; the result is what `--json` prints."""
    import torch

    from zero_infinity.cli import device_links as links
    from zero_infinity.cli.device_steps import Job
    from zero_infinity.tiers import direct_read

    attempts = _Attempts(say, [])
    num_bytes = links.copy_size(device, most_bytes)
    job = Job(device, preset(shape_name), args.batch, args.turns)
    devices = links.accelerators()
    return {
        "version": FORMAT_VERSION,
        "zero_infinity": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": _machine(torch.__version__),
        "runtime": {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")},
        "device": attempts.attempt(f"{device}: facts", lambda: asdict(links.facts_of(device))),
        "num_devices": len(devices),
        "peer_access": attempts.attempt("peer access", lambda: links.peer_access(devices)),
        "why_no_direct_storage": direct_read.why_not(device, args.directory or Path()),  # None: it works
        "links": attempts.attempt("link, each direction alone", lambda: asdict(links.link_rates(device, num_bytes))),
        "both_ways": attempts.attempt(
            "link, both directions at once", lambda: {"bytes_per_second": links.both_ways(device, num_bytes)}
        ),
        "overlap": attempts.attempt("a copy beside computation", lambda: _overlap(device, num_bytes)),
        "model": {"preset": shape_name, **asdict(job.shape), "num_parameters": job.shape.num_parameters}
        | {"batch": job.batch, "dtype": "float32", "optimizer": "AdamW"},
        "steps": _steps(job, args.directory, attempts),
        "errors": attempts.errors,
    }


def _overlap(device: torch.device, num_bytes: int) -> Report:
    from zero_infinity.cli import device_links as links

    found = links.overlap(device, num_bytes)
    return {**asdict(found), "hidden_fraction": found.hidden_fraction}


def _machine(torch_version: str) -> Report:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": host_memory().total,
        "python": platform.python_version(),
        "torch": torch_version,
    }


def _steps(job: Job, directory: Path | None, attempts: _Attempts) -> list[Report]:
    """Every run against plain PyTorch, as rows."""
    from zero_infinity.cli import device_steps as steps

    def prepared(budget: Budget) -> Callable[[], StepResult]:
        return lambda: steps.compare_budget(job, budget, directory)

    runs: dict[str, Callable[[], StepResult]] = {
        "plain again": lambda: steps.compare(job, lambda: steps.PlainTraining(job)),
        _HOST_UPDATE: lambda: steps.compare(job, lambda: steps.HostUpdate(job)),
    }
    nvme = directory is not None
    budgets = attempts.attempt("finding the least device memory", lambda: list(steps.budgets(job, nvme=nvme)))
    runs |= {budget.name: prepared(budget) for budget in budgets or []}
    results: dict[str, StepResult | None] = {}
    for name, compare in runs.items():
        results[name] = attempts.attempt(f"steps: {name}", compare)
    return [_row(name, result, results[_HOST_UPDATE]) for name, result in results.items()]


def _row(name: str, result: StepResult | None, host_update: StepResult | None) -> Report:
    if result is None:
        return {"name": name, "failed": True}
    return {
        "name": name,
        "failed": False,
        "seconds": result.seconds,
        "plain_seconds": result.plain_seconds,
        "ratio": result.ratio,
        "losses_identical_to_plain": result.is_identical,
        "losses_identical_to_host_update": host_update is not None and result.losses == host_update.losses,
        "max_loss_difference": result.max_loss_difference,
        "last_loss": result.losses[-1],
        "num_steps": len(result.losses),
        "budget": asdict(result.budget) if result.budget is not None else None,
        "step_bytes": asdict(result.traffic) if result.traffic is not None else None,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot be written: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)


def _print_tables(report: Report) -> None:
    console = Console()
    console.print(_link_table(report))
    console.print(_step_table(report))
    for error in report["errors"]:
        console.print(f"[bold red]failed[/]: {escape(error['measurement'])}: {escape(error['text'])}")


def _link_table(report: Report) -> Table:
    facts, links = report["device"], report["links"]
    table = Table("measured", "value", title=f"zero-infinity bench device, torch {report['machine']['torch']}")
    if facts is not None:
        memory = f"{format_bytes(facts['free_bytes'])} free of {format_bytes(facts['total_bytes'])}"
        driver = f", driver {facts['driver']}" if facts["driver"] else ""
        table.add_row(facts["device"], escape(f"{facts['name']}, {memory}{driver}"))
    if links is not None:
        for name in ("up_pinned", "down_pinned", "up_unpinned", "down_unpinned"):
            table.add_row(f"link {name.replace('_', ', ')}", format_rate(links[name]))
    if report["both_ways"] is not None:
        table.add_row("link both ways at once", format_rate(report["both_ways"]["bytes_per_second"]))
    if report["overlap"] is not None:
        table.add_row("copy beside computation", _overlap_text(report["overlap"]))
    table.add_row("peer access", report["peer_access"] or "")
    problem = report["why_no_direct_storage"]
    table.add_row("GPUDirect Storage", "works" if problem is None else escape(f"no: {problem}"))
    return table


def _overlap_text(overlap: Report) -> str:
    alone = f"{format_seconds(overlap['copy_seconds'])} and {format_seconds(overlap['compute_seconds'])} alone"
    return f"{alone}, {format_seconds(overlap['together_seconds'])} together: {overlap['hidden_fraction']:.0%} hidden"


def _step_table(report: Report) -> Table:
    model = report["model"]
    title = f"{model['preset']} GPT, batch {model['batch']} x {model['seq']}, float32, AdamW, interleaved with plain"
    table = Table("run", "device memory", "step", "plain", "ratio", "losses", "up", "down", "NVMe", title=title)
    for row in report["steps"]:
        table.add_row(*_cells(row))
    return table


def _cells(row: Report) -> list[str]:
    if row["failed"]:
        return [row["name"], "", "failed"]
    budget, moved = row["budget"], row["step_bytes"]
    losses = (
        "identical"
        if row["losses_identical_to_plain"]
        else "as updated on the host"
        if row["losses_identical_to_host_update"]
        else f"differ by {row['max_loss_difference']:.1e}"
    )
    traffic = [] if moved is None else [moved["uploaded"], moved["downloaded"], moved["read"] + moved["written"]]
    return [
        row["name"],
        format_bytes(budget["device_memory"]) if budget is not None else "",
        format_seconds(row["seconds"]),
        format_seconds(row["plain_seconds"]),
        f"{row['ratio']:.2f}",
        losses,
        *map(format_bytes, traffic),
    ]
