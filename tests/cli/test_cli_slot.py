"""`enginewire-frontend`: our server where vLLM has a place for a frontend. A stand-in takes vLLM's part."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from command_line import DEADLINE_S

from enginewire import ConfigError, EngineConfig
from enginewire.cli.frontend_slot import ServeArguments, Slot, _parser
from enginewire.engine.spec import EngineSpec
from enginewire.host.manager import CoreEngineProcManager
from enginewire.testing import wait_until
from enginewire.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses

COMMAND = [sys.executable, "-m", "enginewire.cli.frontend_slot", "frontend"]
OPTIONS = ["frontend", "--listen-fd", "3", "--input-address", "ipc://i", "--output-address", "ipc://o", "--args-json"]


@dataclass
class Served:
    """A frontend in the slot, and its stand-in for vLLM."""

    process: subprocess.Popen[str]
    engines: CoreEngineProcManager | None
    url: str
    log: Path

    def completion(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "hello", "max_tokens": 5, **body}, timeout=30)

    def is_ready(self) -> bool:
        return httpx.get(f"{self.url}/ready").status_code == 200


class Launcher:
    """What ``vllm serve`` does around a frontend: sockets, the frontend's process, the engines and their handshake."""

    def __init__(self, folder: Path, version: str) -> None:
        self._folder = folder
        self._is_new = version == "0.32.0"
        self._addresses = [f"ipc://{folder}/{name}" for name in ("input", "output")]
        self._stack = contextlib.ExitStack()

    def start_frontend(self, arguments: dict[str, Any], engine_count: int = 1) -> Served:
        """Start it on a TCP socket that is bound and does not listen."""
        with contextlib.ExitStack() as ours, (self._folder / "log").open("w") as log:
            tcp = ours.enter_context(socket.socket())
            tcp.bind(("127.0.0.1", 0))
            port = tcp.getsockname()[1]
            words = ["--listen-fd", str(tcp.fileno())]
            fds = [tcp.fileno()]
            for name, address in zip(("input", "output"), self._addresses, strict=True):
                if self._is_new:
                    listener = ours.enter_context(socket.socket(socket.AF_UNIX))
                    listener.bind(address.removeprefix("ipc://"))
                    listener.listen()
                    words += [f"--{name}-listener-fd", str(listener.fileno())]
                    fds.append(listener.fileno())
                else:
                    words += [f"--{name}-address", address]
            words += ["--engine-start-index", "0", "--engine-count", str(engine_count)]
            words += ["--data-parallel-size", "1"] if self._is_new else []
            words += ["--args-json", json.dumps({"model_tag": "echo", "profiler_config": {}, **arguments})]
            process = subprocess.Popen([*COMMAND, *words], pass_fds=fds, stderr=log, text=True)
        self._stack.callback(_end, process)
        served = Served(process, None, f"http://127.0.0.1:{port}", self._folder / "log")
        wait_until(lambda: _answers(served), DEADLINE_S, "the frontend listens")
        return served

    def start_engine(self) -> CoreEngineProcManager:
        """Start an engine and shake hands with it; the frontend gets its ready response."""
        with zmq.Context() as context, context.socket(zmq.ROUTER) as handshake:
            port = handshake.bind_to_random_port("tcp://127.0.0.1")
            spec = EngineSpec(config=EngineConfig.create("echo"), handshake_address=f"tcp://127.0.0.1:{port}")
            manager = CoreEngineProcManager([spec], forward_log=False)
            self._stack.callback(manager.shutdown, 0)
            assert handshake.poll(DEADLINE_S * 1000)
            identity, _ = handshake.recv_multipart()
            addresses = EngineZmqAddresses(inputs=self._addresses[:1], outputs=self._addresses[1:])
            init = EngineHandshakeMetadata(addresses=addresses, parallel_config={})
            handshake.send_multipart([identity, msgspec.msgpack.encode(init)])
            assert handshake.poll(DEADLINE_S * 1000)
        return manager

    def close(self) -> None:
        self._stack.close()


def _answers(served: Served) -> bool:
    assert served.process.poll() is None, served.log.read_text()
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{served.url}/health").status_code == 200
    return False


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE_S)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="slot-") as name:
        yield Path(name)


@pytest.fixture(params=["0.25.1", "0.32.0"])
def launcher(request: pytest.FixtureRequest, folder: Path) -> Iterator[Launcher]:
    """Make one that speaks as a version of vLLM."""
    made = Launcher(folder, request.param)
    yield made
    made.close()


def test_it_listens_at_once_and_serves_when_the_engine_has_come(launcher: Launcher) -> None:
    served = launcher.start_frontend({"model": "echo"})
    assert httpx.get(f"{served.url}/ready").status_code == 503
    launcher.start_engine()
    wait_until(served.is_ready, DEADLINE_S, "the engine has come")
    assert served.completion().json()["choices"][0]["text"] == "hello"
    served.process.terminate()
    assert served.process.wait(DEADLINE_S) == 0


def test_it_honours_names_keys_and_the_longest_length(launcher: Launcher) -> None:
    arguments = {"model": "echo", "served_model_name": ["a", "b"], "api_key": ["secret"], "max_model_len": 100}
    served = launcher.start_frontend(arguments)
    launcher.start_engine()
    wait_until(served.is_ready, DEADLINE_S, "the engine has come")
    assert served.completion(model="b").status_code == 401
    with httpx.Client(base_url=served.url, headers={"Authorization": "Bearer secret"}) as client:
        (a, b) = client.get("/v1/models").json()["data"]
        assert (a["id"], b["id"], a["max_model_len"]) == ("a", "b", 100)
        assert client.post("/v1/completions", json={"model": "b", "prompt": "x" * 101}).status_code == 400


def test_sigterm_ends_it_while_it_waits_for_engines(launcher: Launcher) -> None:
    """VLLM sends that when an engine cannot start."""
    served = launcher.start_frontend({"model": "echo"})
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(DEADLINE_S) == 0


def test_a_dead_engine_is_told_of_and_sigterm_still_ends_it(launcher: Launcher) -> None:
    """VLLM sends SIGTERM 0.13 s after an engine's death."""
    served = launcher.start_frontend({"model": "echo"})
    engines = launcher.start_engine()
    wait_until(served.is_ready, DEADLINE_S, "the engine has come")
    engines.processes[0].signal(signal.SIGKILL)
    wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503, DEADLINE_S, "the death is noticed")
    served.process.terminate()
    assert served.process.wait(DEADLINE_S) == 0


def test_it_ends_with_a_vllm_that_was_killed(folder: Path) -> None:
    """Nothing else would end it."""
    program = (
        "import json, socket, subprocess, sys\n"
        "tcp = socket.create_server(('127.0.0.1', 0))\n"
        f"words = [*{COMMAND!r}, '--listen-fd', str(tcp.fileno()), '--args-json', json.dumps({{'model': 'echo'}}),\n"
        f"         '--input-address', 'ipc://{folder}/i', '--output-address', 'ipc://{folder}/o']\n"
        "process = subprocess.Popen(words, pass_fds=[tcp.fileno()], stderr=subprocess.DEVNULL)\n"
        "with socket.create_connection(tcp.getsockname()) as client:\n"
        "    client.sendall(b'GET /health HTTP/1.1\\r\\nHost: here\\r\\n\\r\\n')\n"
        "    assert client.recv(1)\n"
        "print(process.pid, flush=True)\n"
        "process.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid), DEADLINE_S, "the frontend ends")


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def test_what_it_does_not_know_is_ignored_with_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    arguments = ServeArguments.read('{"model": "m", "model_tag": "m", "enforce_eager": true, "dtype": "bfloat16"}')
    assert [record.getMessage() for record in caplog.records] == [
        "ignored arguments of vllm serve: dtype, enforce_eager"
    ]
    assert arguments.server_settings().served_model_names == ("m",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "--args-json: "),
        ("{}", "missing required field `model`"),
        ('{"model": "m", "max_model_len": "many"}', "max_model_len"),
        ('{"model": "m", "ssl_keyfile": "k", "ssl_certfile": "c"}', "has no TLS"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServeArguments.read(text)


def test_the_key_of_vllm_s_server_is_asked_for_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who replaces the server should not open it to everybody."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert ServeArguments.read('{"model": "m"}').server_settings().api_keys == ("secret",)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("", range(1)),
        ("--engine-start-index 0 --engine-count 2", range(2)),
        ("--engine-start-index 3 --engine-count 1", range(3, 4)),
    ],
)
def test_the_engines_are_those_it_is_told(words: str, ranks: range) -> None:
    slot = Slot(_parser().parse_args([*OPTIONS, '{"model": "echo"}', *words.split()]))
    assert slot._config.managed_ranks == ranks
