"""``enginewire pull``: fetch a model."""

from __future__ import annotations

import argparse
import sys

from enginewire.cli.options import DEFAULT_MODEL_NAME
from enginewire.cli.terminal import fetch

USAGE = "[ALIAS]"

DESCRIPTION = "Fetch a model into your cache, unless it is there and undamaged, and print its path."

EXAMPLES = f"""\
  enginewire pull
  enginewire pull {DEFAULT_MODEL_NAME}
  ENGINEWIRE_CACHE=/big/disk enginewire pull"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument(
        "alias",
        metavar="ALIAS",
        nargs="?",
        default=DEFAULT_MODEL_NAME,
        help=f"see: enginewire models (default: {DEFAULT_MODEL_NAME})",
    )


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    sys.stdout.write(f"{fetch(args.alias, check=True)}\n")
