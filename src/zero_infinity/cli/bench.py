"""`zero-infinity bench`: measurements of this machine. Benchmarks of the library itself are in `benchmarks/`."""

from __future__ import annotations

import argparse

from zero_infinity.cli import bench_hardware, bench_io

_EPILOG = """\
examples:
  zero-infinity bench io /mnt/nvme
  zero-infinity bench hardware /mnt/nvme -o this-machine.toml
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure this machine: drive bandwidth, hardware profile",
        description="Measure this machine: the bandwidth of its drives, or a hardware profile for plan and simulate.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    resources = parser.add_subparsers(dest="resource", metavar="RESOURCE", required=True)
    bench_hardware.add_parser(resources)
    bench_io.add_parser(resources)
