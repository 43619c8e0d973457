"""Run `trainium-devcluster binaries` without installed packages: `python -m trainium_devcluster.binaries`."""

from __future__ import annotations

import argparse
import sys

from trainium_devcluster.binaries.catalog import OPTIONAL_PROGRAMS
from trainium_devcluster.binaries.command import prepare
from trainium_devcluster.errors import ClusterError


def main() -> int:
    """Prepare the programs and print their folder; print a ClusterError as one sentence."""
    parser = argparse.ArgumentParser(prog="python -m trainium_devcluster.binaries", description=prepare.__doc__)
    parser.add_argument("--kubernetes")
    for option in (*OPTIONAL_PROGRAMS, "helm"):
        parser.add_argument(f"--{option}", action="store_true")
    try:
        sys.stdout.write(f"{prepare(**vars(parser.parse_args()))}\n")
    except ClusterError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
