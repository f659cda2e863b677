"""What the command lines of the kernel benchmarks have in common."""

from __future__ import annotations

import argparse
import sys

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_parser(description: str | None, *, check: str) -> argparse.ArgumentParser:
    """Makes a parser with the options of all: device, dtype, repeats, memory rate, check.

    Args:
        description: The benchmark's docstring.
        check: What its check does.
    """
    on_cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if on_cuda else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16" if on_cuda else "float32")
    parser.add_argument("--repeats", type=int, default=20, help="times to take of each case")
    parser.add_argument(
        "--peak-tb-per-s", type=float, default=4.48, help="the memory's rate, of floors"
    )
    parser.add_argument("--check", action="store_true", help=check)
    return parser


def write(line: str) -> None:
    """Writes a line of the report at once, so that a long run can be watched."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
