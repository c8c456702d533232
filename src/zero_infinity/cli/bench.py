"""`zero-infinity bench`: what this machine can do. Benchmarks of the library itself are in `benchmarks/`."""

from __future__ import annotations

import argparse

from zero_infinity.cli import bench_hardware, bench_io


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine: its drives, or a hardware profile")
    resources = parser.add_subparsers(dest="resource", metavar="RESOURCE", required=True)
    bench_hardware.add_parser(resources)
    bench_io.add_parser(resources)
