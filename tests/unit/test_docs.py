"""What the documents say is true: examples run, tables match the code, links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

import enginewire
from enginewire import errors
from enginewire.cli.main import COMMANDS
from enginewire.engine.busy_loop import Phase
from enginewire.engine.registry import BUILT_IN
from enginewire.engine.utilities import UTILITIES
from enginewire.wire import handshake, messages
from enginewire.wire.codec import MsgpackDecoder, MsgpackEncoder

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(enginewire.__file__).parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
OPERATIONS = (ROOT / "docs/operations.md").read_text()


@dataclass(frozen=True)
class Example:
    """A fenced block of Python: where it stands, the words behind ``python``, the program."""

    name: str
    words: str
    program: str


def blocks(path: Path, language: str) -> Iterator[tuple[int, str, str]]:
    """Yield line number, further words and text of every fenced block of a language."""
    text = path.read_text()
    for match in re.finditer(rf"^```{language}\b *([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[1], match[2]


def examples() -> Iterator[object]:
    """Yield every example; ``python model`` needs the real model, ``python fragment`` is no whole program."""
    for path in DOCUMENTS:
        for line, words, program in blocks(path, "python"):
            if "fragment" in words.split():
                continue
            name = f"{path.relative_to(ROOT)}:{line}"
            marks = [pytest.mark.model, pytest.mark.timeout(180)] if "model" in words.split() else []
            yield pytest.param(Example(name, words, program), id=name, marks=marks)


@pytest.mark.parametrize("example", list(examples()))
def test_examples_run_and_print_what_they_say(example: Example, tmp_path: Path) -> None:
    """Each is a program of its own. ``print(…)  # text`` promises a line of output."""
    script = tmp_path / "example.py"
    script.write_text(example.program)
    run = subprocess.run(
        [sys.executable, "-W", "error", str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=170
    )
    assert run.returncode == 0, run.stderr
    for promised in re.findall(r"print\(.*\)  # (.+)$", example.program, re.MULTILINE):
        assert promised in run.stdout.splitlines()


def test_there_are_examples() -> None:
    """The pattern that finds them still does."""
    assert len(list(examples())) >= 8


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_decisions_are_numbered_once_and_say_everything() -> None:
    paths = sorted((ROOT / "docs/decisions").glob("*.md"))
    numbers = [int(path.name[:4]) for path in paths]
    assert len(set(numbers)) == len(numbers), "two decisions with one number"
    for number, path in zip(numbers, paths, strict=True):
        text = path.read_text()
        assert text.startswith(f"# {number}. "), path.name
        for part in ("Context", "Choice", "gave up", "wrong"):
            assert part in text, f"{path.name}: {part}"


def test_generated_tables_are_up_to_date() -> None:
    """Modules, settings, options and variables; ``make docs`` rewrites them."""
    command = [sys.executable, str(ROOT / "docs/generate.py"), "--check"]
    check = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert check.returncode == 0, f"run `make docs`\n{check.stdout}{check.stderr}"


def test_the_readme_has_exactly_the_two_set_up_commands() -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = [body for _, words, body in blocks(ROOT / "README.md", "sh") if "set-up" in words]
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert commands == ["make run", "make test"]
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def test_every_variable_that_is_read_is_documented() -> None:
    read = set()
    for path in PACKAGE.rglob("*.py"):
        read |= set(re.findall(r'environ(?:\.get\(|\[)"([A-Z_]+)"|_number\(\s*"([A-Z_]+)"', path.read_text()))
    names = {name for pair in read for name in pair if name} - {"PYTHONPATH"}
    assert names >= {"VLLM_ENGINE_READY_TIMEOUT_S", "ENGINEWIRE_CACHE"}
    for name in names:
        assert f"`{name}" in OPERATIONS or f"${name}" in OPERATIONS, name


def test_every_error_is_explained() -> None:
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.EngineClientError):
            assert f"`{name}`" in OPERATIONS, name


def test_documented_log_lines_are_in_the_code() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    section = OPERATIONS.partition("## Log lines")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    assert len(lines) >= 10
    for line in lines:
        for part in line.split("…"):
            assert part.strip() in source, line


def test_phases_utilities_commands_and_executors_are_documented() -> None:
    lifecycle = (ROOT / "docs/lifecycle.md").read_text()
    for phase in Phase:
        assert phase.name in lifecycle
    protocol = (ROOT / "docs/protocol.md").read_text()
    for method in UTILITIES:
        assert f"`{method}`" in protocol, method
    readme = (ROOT / "README.md").read_text()
    for command in COMMANDS:
        assert f"enginewire {command}" in readme
    for executor in BUILT_IN:
        assert f"`{executor}`" in readme


def hex_examples() -> Iterator[object]:
    """Yield the byte examples of docs/protocol.md: ``hex Type`` blocks, one frame each."""
    for line, type_name, body in blocks(ROOT / "docs/protocol.md", "hex"):
        frame = bytes.fromhex("".join(row.partition("#")[0] for row in body.splitlines()))
        yield pytest.param(type_name, frame, id=f"{type_name}:{line}")


@pytest.mark.parametrize(("type_name", "frame"), list(hex_examples()))
def test_bytes_in_the_protocol_decode_and_encode_again(type_name: str, frame: bytes) -> None:
    if type_name == "strings":
        message: object = msgspec.msgpack.decode(frame, type=list[str])
    else:
        message_type = getattr(messages, type_name, None) or getattr(handshake, type_name)
        message = MsgpackDecoder(message_type).decode([frame])
    assert MsgpackEncoder().encode(message) == [frame]


def test_the_protocol_shows_every_message() -> None:
    shown = {type_name for _, type_name, _ in blocks(ROOT / "docs/protocol.md", "hex")}
    assert shown >= {"EngineCoreRequest", "strings", "UtilityCall", "EngineCoreOutputs", "HandshakeMessage"}
