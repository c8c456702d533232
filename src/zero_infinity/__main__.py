"""`python -m zero_infinity` is `zero-infinity`."""

from __future__ import annotations

import sys

from zero_infinity.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
