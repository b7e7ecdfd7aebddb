"""``enginewire models``: list the models that have a name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

USAGE = ""

DESCRIPTION = (
    "List the models that can be named by an alias. Paths of .gguf files and model folders work everywhere too."
)

EXAMPLES = "  enginewire models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def execute(args: argparse.Namespace) -> None:
    """Run the command."""
    from enginewire.models import list_models

    rows = [("ALIAS", "INSTALLED", "SIZE", "LICENCE", "PATH")]
    for model in list_models():
        size = f"{model.size / 1e6:.0f} MB"
        rows.append((model.alias, "yes" if model.path else "no", size, model.license, str(model.path or "-")))
    rows.append(("echo", "built in", "-", "-", "-"))
    sys.stdout.write(_table(rows))


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)
