"""Where sockets go, and how messages leave them."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import zmq

from enginewire import ConfigError, EngineConfig
from enginewire.transport import sockets
from enginewire.transport.endpoints import Endpoints, choose_endpoints, is_ipv6, tcp_host
from enginewire.transport.sockets import bind_also, bind_pull, bind_router, send_message


def test_ipc_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """C-20; protocol A.3."""
    with tempfile.TemporaryDirectory() as base:
        endpoints = choose_endpoints(EngineConfig.create("echo", ipc_dir=base))
        assert endpoints.folder is not None
        assert endpoints.handshakes == (f"ipc://{endpoints.folder}/handshake",)
        links = [endpoints.of_link(name, is_local=True) for name in ("0.1", "1.1")]
        assert links[0] == (f"ipc://{endpoints.folder}/i0.1", f"ipc://{endpoints.folder}/o0.1")
        assert len({*links[0], *links[1]}) == 4
        Path(endpoints.folder, "i0.1").touch()
        endpoints.remove()
        endpoints.remove()
        assert os.listdir(base) == []


def test_each_client_has_a_folder_of_its_own() -> None:
    with tempfile.TemporaryDirectory() as base:
        config = EngineConfig.create("echo", ipc_dir=base)
        one, two = choose_endpoints(config), choose_endpoints(config)
        assert one.folder != two.folder


@pytest.mark.parametrize(("length", "scheme"), [(60, "ipc"), (73, "ipc"), (74, "tcp"), (150, "tcp")])
def test_a_folder_that_is_accepted_gives_sockets_that_bind(length: int, scheme: str) -> None:
    """The limit is in bytes of the whole path, and counts what is still to be appended."""
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base, "d" * (length - len(base) - 1))
        folder.mkdir()
        endpoints = choose_endpoints(EngineConfig.create("echo", ipc_dir=str(folder)))
        with zmq.Context() as context:
            longest = max(endpoints.handshakes + endpoints.of_link("65535.99", is_local=True), key=len)
            socket, address = bind_router(context, longest, 1000)
            socket.close()
        assert address.startswith(f"{scheme}://")
        endpoints.remove()


def test_systems_without_ipc_use_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert choose_endpoints(EngineConfig.create("echo")).folder is None
    with pytest.raises(ConfigError, match="has no ipc sockets"):
        choose_endpoints(EngineConfig.create("echo", transport="ipc"))


@pytest.mark.parametrize(
    ("host", "port", "handshake", "sockets"),
    [
        ("127.0.0.1", 29550, "tcp://127.0.0.1:29550", "tcp://127.0.0.1:*"),
        ("10.1.2.3", 0, "tcp://10.1.2.3:*", "tcp://10.1.2.3:*"),
        ("::1", 7, "tcp://[::1]:7", "tcp://[::1]:*"),
        ("[::1]", 7, "tcp://[::1]:7", "tcp://[::1]:*"),
    ],
)
def test_engines_started_elsewhere_come_by_tcp(host: str, port: int, handshake: str, sockets: str) -> None:
    """Protocol A.3: local size 0."""
    config = EngineConfig.create(
        "echo", data_parallel_size_local=0, data_parallel_address=host, data_parallel_rpc_port=port
    )
    endpoints = choose_endpoints(config)
    assert endpoints == Endpoints((handshake,), endpoints.host)
    assert endpoints.of_link("0.1", is_local=False) == (sockets, sockets)


def test_a_node_with_engines_of_both_kinds_receives_each_in_its_way() -> None:
    """Issue 5: local engines by ipc, those of other nodes by tcp, on one handshake socket."""
    config = EngineConfig.create(
        "echo", data_parallel_size=3, data_parallel_size_local=1, data_parallel_address="10.1.2.3"
    )
    endpoints = choose_endpoints(config)
    try:
        assert endpoints.handshakes == (f"ipc://{endpoints.folder}/handshake", "tcp://10.1.2.3:29550")
        assert endpoints.of_link("0.1", is_local=True)[0].startswith("ipc://")
        assert endpoints.of_link("1.1", is_local=False) == ("tcp://10.1.2.3:*", "tcp://10.1.2.3:*")
        with zmq.Context() as context:
            socket, _ = bind_router(context, endpoints.handshakes[0], 1000)
            assert bind_also(socket, "tcp://127.0.0.1:*").startswith("tcp://127.0.0.1:")
            socket.close()
    finally:
        endpoints.remove()


def test_vllms_own_engines_come_by_tcp_even_if_we_start_them() -> None:
    """Protocol A.4: they are headless, and know a host and a port."""
    endpoints = choose_endpoints(EngineConfig.create("echo", executor="vllm"))
    assert endpoints == Endpoints(("tcp://127.0.0.1:*",))


def test_nothing_is_reachable_from_other_hosts_unless_asked_for() -> None:
    """Defect 34: whoever can connect may inject requests."""
    for settings in ({}, {"transport": "tcp"}, {"data_parallel_size_local": 0}):
        endpoints = choose_endpoints(EngineConfig.create("echo", **settings))
        for address in (*endpoints.handshakes, *endpoints.of_link("0.1", is_local=False)):
            assert address.startswith(("ipc://", "tcp://127.0.0.1:"))
        endpoints.remove()


def test_ipv6_literals_are_bracketed_and_recognised() -> None:
    """Protocol A.2."""
    assert (tcp_host("::1"), tcp_host("[::1]"), tcp_host("host")) == ("[::1]", "[::1]", "host")
    assert is_ipv6("tcp://[::1]:5")
    assert not is_ipv6("tcp://127.0.0.1:5")


def test_placeholder_ports_are_resolved_by_binding() -> None:
    """C-20."""
    with zmq.Context() as context:
        for bind in (bind_router, bind_pull):
            socket, address = bind(context, "tcp://127.0.0.1:*", 1000)
            assert int(address.rpartition(":")[2]) > 0
            assert socket.getsockopt(zmq.MAXMSGSIZE) == 1000
            assert socket.getsockopt(zmq.LINGER) == 0
            assert socket.getsockopt(zmq.RCVHWM) == 0
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) > 0
            socket.close()


def test_an_address_that_cannot_be_bound_is_named_and_leaves_no_socket() -> None:
    """C-21."""
    with zmq.Context() as context, pytest.raises(OSError, match="cannot bind ipc:///no/such/folder/x"):
        bind_router(context, "ipc:///no/such/folder/x", 1000)


class FakeSocket:
    """Counts frames; fails at one of them."""

    def __init__(self, fail_at: int, error: BaseException) -> None:
        self.sent: list[tuple[bytes, bool]] = []
        self._fail_at = fail_at
        self._error = error
        self._calls = 0

    def send(self, frame: bytes, flags: int, **_: Any) -> None:
        self._calls += 1
        if self._calls == self._fail_at:
            raise self._error
        self.sent.append((bytes(frame), bool(flags & zmq.SNDMORE)))


@pytest.mark.parametrize("arrays", [[], [b"array", b"another"]])
@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_message_that_is_cut_off_is_ended(fail_at: int, arrays: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between two frames: the next message became the rest of this one."""
    monkeypatch.setattr(sockets, "_send", FakeSocket.send)
    socket = FakeSocket(fail_at, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        send_message(socket, (b"id", b"type", b"payload"), arrays)  # type: ignore[arg-type]
    assert socket.sent[-1] == (b"", False)
    assert all(more for _, more in socket.sent[:-1])
    assert len(socket.sent) == fail_at


def test_a_buffer_that_is_none_does_not_corrupt_the_stream() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://test")
        b.connect("inproc://test")
        with pytest.raises(TypeError):
            send_message(a, (b"one", b"two"), [object()])  # type: ignore[list-item]
        send_message(a, (b"next",))
        assert b.recv_multipart() == [b"one", b"two", b""]
        assert b.recv_multipart() == [b"next"]
