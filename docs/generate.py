"""Write the tables in docs/ that the code knows best: modules, settings, executor options, environment variables.

    python docs/generate.py           rewrite them
    python docs/generate.py --check   fail if one is out of date

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. Its words come from docstrings.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import enginewire
from enginewire import EngineConfig, envs

DOCS = Path(__file__).parent
PACKAGE = Path(enginewire.__file__).parent

LEARNED = "num_gpu_blocks"
"""The docstring's entry of fields that no user sets: the first of them."""


def modules() -> Iterator[str]:
    """One line per module: its name and the first sentence of its docstring."""
    yield from ("| module | what it is |", "|---|---|")
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path.name)):
        name = path.relative_to(PACKAGE).as_posix()
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        shown = f"**{name.removesuffix('__init__.py')}**" if name.endswith("/__init__.py") else f"`{name}`"
        yield f"| {shown} | {_markdown(_first_sentence(docstring))} |"


def settings() -> Iterator[str]:
    """One line per setting of ``EngineConfig``, except those that it learns from the engine."""
    yield from ("| setting | default | meaning |", "|---|---|---|")
    described = attributes(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name == LEARNED:
            return
        if field.default is not dataclasses.MISSING:
            default = f"`{field.default!r}`"
        elif field.default_factory is dict:
            default = "`{}`"
        else:
            default = "see there"
        yield f"| `{field.name}` | {default} | {_markdown(described[field.name])} |"


def options(reference: str) -> Callable[[], Iterator[str]]:
    """One line per option of an executor, from the struct that its options are converted to."""

    def table() -> Iterator[str]:
        module, _, name = reference.partition(":")
        struct = getattr(importlib.import_module(module), name)
        described = attributes(struct)
        yield from ("| option | default | meaning |", "|---|---|---|")
        for field in msgspec.structs.fields(struct):
            default = "{}" if field.default is msgspec.NODEFAULT else repr(field.default)
            yield f"| `{field.name}` | `{default}` | {_markdown(described[field.name])} |"

    return table


def environment() -> Iterator[str]:
    """One line per environment variable."""
    yield from ("| variable | meaning |", "|---|---|")
    for _, function in inspect.getmembers(envs, inspect.isfunction):
        docstring = inspect.getdoc(function) or ""
        if function.__module__ == envs.__name__ and docstring.startswith("``"):
            variable, _, meaning = _join(docstring).partition(": ")
            yield f"| {_markdown(variable)} | {_markdown(meaning)} |"


def attributes(owner: type) -> dict[str, str]:
    """Return what a class's docstring says about each attribute (``a, b: about both``)."""
    _, _, section = (inspect.getdoc(owner) or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", section.split("\n\n")[0]):
        names, _, text = _join(entry).partition(": ")
        for name in names.split(", "):
            found[name] = text
    return found


def _first_sentence(docstring: str) -> str:
    paragraph = _join(docstring.split("\n\n")[0])
    return re.split(r"(?<=[^.]\.)\s", paragraph)[0]


def _join(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str) -> str:
    text = re.sub(r":(?:class|mod|meth|func|data):`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`").replace("|", "\\|")


TABLES: dict[tuple[str, str], Callable[[], Iterator[str]]] = {
    ("architecture.md", "modules"): modules,
    ("operations.md", "settings"): settings,
    ("operations.md", "environment"): environment,
    ("operations.md", "echo options"): options("enginewire.executors.echo:EchoOptions"),
    ("operations.md", "vllm options"): options("enginewire.host.vllm:VLLMOptions"),
    ("operations.md", "openvino options"): options("enginewire.executors.openvino_options:OpenVINOOptions"),
}


def rewritten(text: str, name: str, lines: Iterator[str]) -> str:
    """Return a document with the table ``name`` made anew."""
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    head, found_begin, rest = text.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"no table {name!r} to rewrite")
    return head + begin + "".join(f"{line}\n" for line in lines) + end + tail


def main() -> int:
    """Rewrite, or check; 1: something is out of date."""
    is_check = "--check" in sys.argv[1:]
    stale = []
    for (filename, name), make in TABLES.items():
        path = DOCS / filename
        old = path.read_text()
        new = rewritten(old, name, make())
        if new != old:
            stale.append(f"docs/{filename}: {name}")
            if not is_check:
                path.write_text(new)
    for what in stale:
        sys.stdout.write(f"{'out of date' if is_check else 'rewritten'}: {what}\n")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
