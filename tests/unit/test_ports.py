"""Ports for tests: processes side by side get different ones."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from enginewire.testing import free_tcp_port, ports

TWENTY = "from enginewire.testing import free_tcp_port; print(*(free_tcp_port() for _ in range(20))); input()"


def test_a_port_in_use_is_not_given_out_and_the_kernel_gives_none_of_them() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", free_tcp_port()))
        given = [free_tcp_port() for _ in range(ports.BLOCK)]
        assert used.getsockname()[1] not in given
    assert len(set(given)) >= ports.BLOCK // 2
    assert set(given) <= set(ports.RANGE)
    assert max(given) < 32_768


def test_no_two_processes_get_the_same() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    running = [subprocess.Popen([sys.executable, "-c", TWENTY], text=True, **pipes) for _ in range(4)]
    given = [port for process in running for port in (process.stdout or sys.stdin).readline().split()]
    for process in running:
        process.communicate("\n")
    assert len(given) == len(set(given)) == 80


def test_where_all_ports_belong_to_others_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_binds", lambda probe, port: False)
    with pytest.raises(OSError, match="none of the 399 ports"):
        free_tcp_port()
    with pytest.raises(OSError, match="all 50 blocks of ports"):
        ports._own_ports.__wrapped__()
