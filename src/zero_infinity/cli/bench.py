"""`zero-infinity bench`: what this machine can do, and what training on it costs; a subcommand each."""

from __future__ import annotations

import argparse

from zero_infinity.cli import (
    bench_ablations,
    bench_capacity,
    bench_checkpoint,
    bench_growth,
    bench_hardware,
    bench_io,
    bench_peers,
    bench_plan,
    bench_train,
    bench_update,
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure what this machine can do")
    resources = parser.add_subparsers(dest="resource", metavar="RESOURCE", required=True)
    bench_ablations.add_parser(resources)
    bench_capacity.add_parser(resources)
    bench_checkpoint.add_parser(resources)
    bench_growth.add_parser(resources)
    bench_hardware.add_parser(resources)
    bench_io.add_parser(resources)
    bench_peers.add_parser(resources)
    bench_plan.add_parser(resources)
    bench_train.add_parser(resources)
    bench_update.add_parser(resources)
