"""The `fp8pass` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8pass import __version__, demo


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fp8pass", description="Train PyTorch models in FP8.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("demo", help="train a small language model in BF16 and in FP8, side by side")
    command.add_argument("--steps", type=int, default=200, help="optimizer steps of each model (default: %(default)s)")
    command.add_argument("--recipe", default="delayed", help="FP8 recipe (default: %(default)s)")
    command.add_argument("--device", default="cpu", help="torch device, cpu or cuda (default: %(default)s)")
    command.add_argument(
        "--out", type=Path, default=Path("fp8pass-demo"), help="folder for the plot (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error("--steps must be at least 1")
    return demo.main(args.steps, args.recipe, args.device, args.out)


if __name__ == "__main__":
    sys.exit(main())
