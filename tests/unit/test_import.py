"""What importing the package costs: nothing that a frontend without a model does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import enginewire

HEAVY = {"numpy", "tokenizers", "jinja2", "openvino", "openvino_genai", "torch", "transformers", "uvloop"}

PROGRAM = """
import json, sys, threading
{statement}
print(json.dumps([sorted({{name.partition(".")[0] for name in sys.modules}}), threading.active_count()]))
"""


def modules_after(statement: str) -> tuple[set[str], int]:
    """Run a statement in a fresh interpreter; return the top-level modules it has then, and its number of threads."""
    program = PROGRAM.format(statement=statement)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    modules, threads = json.loads(run.stdout)
    return set(modules), threads


@pytest.mark.parametrize(
    "statement",
    [
        "import enginewire",
        "from enginewire import SamplingParams, EngineConfig, EngineCoreRequest, EngineCoreOutputs, Capabilities",
        "from enginewire import EngineCoreClient, EngineDeadError, Executor",
        "from enginewire.wire import codec, frames, handshake, profile",
        "from enginewire.testing import MockEngine",
    ],
)
def test_importing_loads_no_heavy_library_and_starts_nothing(statement: str) -> None:
    """client-layer, section 11: Import."""
    modules, threads = modules_after(statement)
    assert not modules & HEAVY
    assert threads == 1


def test_encoding_a_request_loads_no_numpy() -> None:
    statement = (
        "from enginewire import EngineCoreRequest, SamplingParams\n"
        "from enginewire.wire.codec import MsgpackEncoder, RequestDecoder\n"
        "frames = MsgpackEncoder().encode(EngineCoreRequest('a', [1], sampling_params=SamplingParams()))\n"
        "assert RequestDecoder().decode(frames).request_id == 'a'"
    )
    modules, _ = modules_after(statement)
    assert not modules & HEAVY


def test_importing_the_bare_package_loads_no_socket_library() -> None:
    modules, _ = modules_after("import enginewire")
    assert not modules & {"zmq", "msgspec", "asyncio", "multiprocessing"}


def test_all_lists_what_can_be_imported_and_nothing_else() -> None:
    assert sorted(enginewire.__all__) == sorted({*enginewire.__all__})
    assert set(enginewire._HOME_OF) | {"__version__"} == set(enginewire.__all__)
    assert set(enginewire.__all__) <= set(dir(enginewire))


def test_every_public_name_can_be_imported() -> None:
    for name in enginewire.__all__:
        assert getattr(enginewire, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EngineCoreKlient'"):
        enginewire.EngineCoreKlient  # noqa: B018
