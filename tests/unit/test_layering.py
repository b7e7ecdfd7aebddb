"""Imports point down only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import enginewire

ROOT = Path(enginewire.__file__).parent

LAYERS = [
    {"_version", "errors"},
    {"wire"},
    {"envs"},
    {"config"},
    {"transport", "text"},
    {"models", "recorder"},
    {"engine"},
    {"executors"},
    {"host"},
    {"coordinator"},
    {"client"},
    {"testing"},
    {"frontend"},
    {"server"},
    {"cli"},
]
"""From the bottom up. A part may import its own and lower layers' parts; those of one layer do not know each other."""

PUBLIC = {**enginewire._HOME_OF, "__version__": "enginewire._version"}

HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}

WIRE_NEVER_IMPORTS = {"zmq", "asyncio", "threading", "socket", "selectors", "multiprocessing", "subprocess"}

MODULES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Yield the full name of every module that a file imports, wherever in it the statement stands."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            if node.module == "enginewire":  # a public name, or a module: `from enginewire import envs`
                yield from (PUBLIC.get(alias.name, f"enginewire.{alias.name}") for alias in node.names)
            else:
                yield node.module


def part_of(path: Path) -> str:
    """Return which part of the package a file belongs to: its folder, or its own name at the top."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_only(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return  # the public names, from everywhere
    assert part in HEIGHT, f"{part} has no layer yet: say in LAYERS which one"
    for module in imported(path):
        if not module.startswith("enginewire."):
            continue
        target = module.split(".")[1]
        assert target == part or HEIGHT[target] < HEIGHT[part], f"{part} must not import {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "wire").glob("*.py")), ids=lambda path: path.name)
def test_the_wire_knows_no_socket_thread_or_loop(path: Path) -> None:
    roots = {module.split(".")[0] for module in imported(path)}
    assert not roots & WIRE_NEVER_IMPORTS


def test_the_wire_imports_numpy_only_inside_functions() -> None:
    for path in (ROOT / "wire").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                assert all(alias.name != "numpy" for alias in node.names), path
