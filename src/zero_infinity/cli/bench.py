"""`zero-infinity bench`: what this machine can do, one subcommand a resource."""

from __future__ import annotations

import argparse

from zero_infinity.cli import bench_io


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure what this machine can do")
    bench_io.add_parser(parser.add_subparsers(dest="resource", metavar="RESOURCE", required=True))
