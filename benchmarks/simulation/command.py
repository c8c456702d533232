"""`python -m benchmarks simulate-faults`: many seeds of the fault simulation, and the replay of one."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator

from benchmarks.simulation.schedule import Bug, draw
from benchmarks.simulation.simulation import Outcome, set_up, simulate

_EPILOG = """\
examples:
  python -m benchmarks simulate-faults --seeds 10000 --jobs 2
  python -m benchmarks simulate-faults --replay 4711
  python -m benchmarks simulate-faults --bug dropped-message --seeds 1000

A seed is a whole training of one to three ranks in one process, with slow links and drives, threads that overtake each
other, and at most one fault. The same seed is the same schedule, turn by turn, in every process of the same code.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate-faults",
        help="whole trainings of several ranks with faults, one seed each",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first one (0)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run this one only, and say what happens")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument(
        "--bug", type=Bug, choices=list(Bug), metavar="NAME",
        help=f"put a bug in: {', '.join(bug.value for bug in Bug)}; ends at the first seed that finds it",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.replay is not None:
        set_up()
        outcome = simulate(draw(args.replay, args.bug))
        _tell(outcome)
        print(f"{outcome.num_turns} turns, {outcome.seconds:.3f} s of virtual time, errors: {outcome.errors}")
        return bool(outcome.wrong)
    start = time.monotonic()
    last = start
    counts: Counter[str] = Counter()
    num_done = num_wrong = num_turns = num_killed = 0
    for outcome in _outcomes(range(args.first, args.first + args.seeds), args.bug, args.jobs):
        num_done += 1
        num_turns += outcome.num_turns
        num_killed += outcome.is_killed
        counts[outcome.schedule.fault.value] += 1
        if outcome.wrong:
            num_wrong += 1
            _tell(outcome)
            if args.bug is not None:
                print(f"{args.bug.value}: found by seed {outcome.schedule.seed}, the {num_done}. that was run")
                return 0
        if time.monotonic() - last > 60:
            last = time.monotonic()
            print(f"{num_done} seeds, {num_wrong} wrong, {last - start:.0f} s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - start
    print(f"{num_done} seeds, {num_turns:,} turns, {num_killed} kills, {num_wrong} wrong, {seconds:.0f} s")
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))
    return bool(num_wrong) or args.bug is not None


def _outcomes(seeds: range, bug: Bug | None, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        set_up()
        for seed in seeds:
            yield simulate(draw(seed, bug))
        return
    with multiprocessing.get_context("forkserver").Pool(jobs, set_up) as pool:
        yield from pool.imap_unordered(_simulate, ((seed, bug) for seed in seeds), chunksize=8)


def _simulate(one: tuple[int, Bug | None]) -> Outcome:
    return simulate(draw(*one))


def _tell(outcome: Outcome) -> None:
    print(outcome.schedule)
    for wrong in outcome.wrong:
        print("  wrong: " + wrong.replace("\n", "\n    "))
    if outcome.wrong:
        bug = outcome.schedule.bug
        with_bug = f" --bug {bug.value}" if bug is not None else ""
        print(f"  again: python -m benchmarks simulate-faults --replay {outcome.schedule.seed}{with_bug}", flush=True)
