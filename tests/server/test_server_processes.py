"""Several server processes over the same engines (``--api-server-count``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import httpx
import psutil
import pytest
from serving import START_S, Served, serve, wait_until
from test_many_engines import SLOW, burst, check_counters, per_engine, send_mixed

from enginewire.testing import free_tcp_port

pytestmark = pytest.mark.timeout(240)

TWO = ["--data-parallel-size", "2", "--api-server-count", "2"]
STREAM = {"prompt": "abc", "max_tokens": 100_000, "stream": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two server processes over two engines."""
    with serve("echo", *TWO, "--admin", *SLOW) as served:
        yield served


def serving_process(served: Served, client: httpx.Client) -> int:
    """Return which server process answers on a client's connection; it keeps that connection."""
    request_id = f"who-{time.monotonic_ns()}"
    assert client.get("/v1/models", headers={"X-Request-Id": request_id}).status_code == 200
    wait_until(lambda: request_id in served.log, "the access log has it")
    (line,) = (line for line in served.log.splitlines() if f"request_id={request_id}" in line)
    return int(dict(word.split("=", 1) for word in line.split() if "=" in word)["server"])


@contextlib.contextmanager
def clients_of_each(served: Served, each: int = 1) -> Iterator[list[list[httpx.Client]]]:
    """Give so many clients for each of two processes, by index, each with a connection that is open and not in use.

    A client may have one request at a time: a second one would go over a connection of its own, to whichever process.
    """
    found: list[list[httpx.Client]] = [[], []]
    with contextlib.ExitStack() as stack:
        deadline = time.monotonic() + 30
        while min(map(len, found)) < each:
            assert time.monotonic() < deadline, f"the processes take {list(map(len, found))} connections"
            client = stack.enter_context(httpx.Client(base_url=served.url, timeout=30))
            found[serving_process(served, client)].append(client)
        yield [clients[:each] for clients in found]


@contextlib.contextmanager
def streaming(clients: Iterable[httpx.Client], **body: object) -> Iterator[list[Iterator[str]]]:
    """Have each client stream a long completion; give the lines that come."""
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(client.stream("POST", "/v1/completions", json=STREAM | body)) for client in clients
        ]
        assert {response.status_code for response in opened} == {200}
        yield [response.iter_lines() for response in opened]


def events(lines: Iterator[str]) -> list[str]:
    """Return all events of a stream, to its end."""
    return [line.removeprefix("data: ") for line in lines if line]


def test_outputs_return_to_whoever_asked(served: Served) -> None:
    """Issue 5, C-52. Every prompt is echoed, so that a text tells whose it is."""
    texts = [f"this is text number {number} and no other" for number in range(80)]

    async def ask(client: httpx.AsyncClient, text: str) -> str:
        body = {"prompt": text, "max_tokens": len(text), "temperature": 0}
        return str((await client.post("/v1/completions", json=body)).json()["choices"][0]["text"])

    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    assert asyncio.run(ask_all()) == texts
    lines = [line for line in served.log.splitlines() if "path=/v1/completions" in line]
    assert {word for line in lines for word in line.split() if word.startswith("server=")} == {"server=0", "server=1"}


def test_processes_know_each_others_requests_by_the_engines_reports(served: Served) -> None:
    """All of one process's are pinned to engine 0; the other sends its own to engine 1, once it has heard of that."""
    with clients_of_each(served, 4) as (first, second):
        for client in first:
            client.headers["X-data-parallel-rank"] = "0"

        def goes_to_engine_1() -> bool:
            before = per_engine(served, "vllm:request_success_total")
            assert second[0].post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
            after = per_engine(served, "vllm:request_success_total")
            return [now - then for now, then in zip(after, before, strict=True)] == [0, 1]

        with streaming(first):
            wait_until(lambda: per_engine(served, "vllm:num_requests_running") == [4, 0], "they run on engine 0")
            wait_until(lambda: all(goes_to_engine_1() for _ in range(4)), "the other process knows")
            with streaming(second):
                # A process takes the others to do as it does, so that four more need not even out exactly.
                wait_until(lambda: served.num_running() == 8, "all run")
                assert per_engine(served, "vllm:num_requests_running")[1] >= 2
    wait_until(lambda: served.num_live() == 0, "all are gone")


def test_engines_in_lock_step_are_woken_by_either_process() -> None:
    """C-50: a request sent while they rest wakes all of them; the coordinator has a process of its own."""
    engine = [
        "--engine",
        "enginewire.executors.lock_step:LockStepEchoExecutor",
        "--set",
        "data_parallel_lock_step=true",
    ]
    with serve("echo", *TWO, *engine) as served, clients_of_each(served) as clients:
        for turn in range(3):
            wait_until(lambda: served.num_live() == 0, "they rest")
            for (client,) in clients if turn % 2 else clients[::-1]:
                answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 40}).json()
                assert answer["usage"]["completion_tokens"] == 40


def test_metrics_and_state_are_the_sum_whichever_process_is_asked(served: Served) -> None:
    with clients_of_each(served) as ((first,), (second,)):
        before = generated(first)
        for tokens, client in ((10, first), (20, second)):
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": tokens}).status_code == 200
        assert [generated(client) for client in (first, second, first)] == [before + 30] * 3
        states = [client.get("/state").json() for client in (first, second)]
        assert states[0]["num_requests_served"] == states[1]["num_requests_served"]
        assert [engine["index"] for engine in states[0]["engines"]] == [0, 1]


def test_a_pause_through_one_process_is_known_to_the_other(served: Served) -> None:
    with clients_of_each(served) as ((first,), (second,)):
        assert first.post("/pause", params={"mode": "keep"}).status_code == 200
        try:
            assert first.get("/ready").status_code == 503
            wait_until(lambda: second.get("/ready").status_code == 503, "the other knows")
        finally:
            assert second.post("/resume").status_code == 200
        wait_until(lambda: first.get("/ready").status_code == 200, "it is over")


def test_a_thousand_mixed_requests_over_two_processes_and_two_engines() -> None:
    """Issue 5."""
    with serve("echo", *TWO, "--executor-option", "step_time_s=0.002") as served:
        sent = asyncio.run(send_mixed(served, 1000, at_once=64, max_tokens=40))
        assert sum(sent.reasons.values()) == 1200
        check_counters(served, sent, 2)
        assert "level=error" not in served.log


def test_a_killed_process_costs_its_requests_and_the_other_does_not_notice() -> None:
    """Issue 5: its requests are aborted on the engines; another takes its place."""
    with serve("echo", *TWO, *SLOW) as served, clients_of_each(served, 4) as (first, second):
        with streaming(first) as lost, streaming(second, max_tokens=150) as kept:
            wait_until(lambda: served.num_running() == 8, "all run")
            os.kill(served.server_pid(0), signal.SIGKILL)
            with httpx.Client(base_url=served.url) as other:
                # Until another takes its place, all connections are the second's.
                wait_until(lambda: sum(running(other)) == 4, "its requests are aborted", timeout_s=5)
            for lines in kept:
                *_, usage, done = events(lines)
                assert done == "[DONE]"
                assert json.loads(usage)["choices"][0]["finish_reason"] == "length"
            for lines in lost:
                with pytest.raises(httpx.RemoteProtocolError):
                    events(lines)
        wait_until(lambda: served.num_running() == 0, "nothing runs")
        assert "server process 0 killed by signal 9 (SIGKILL)" in served.log
        before = served.metric("vllm:generation_tokens_total")
        with clients_of_each(served) as clients:
            for (client,) in clients:
                assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
                assert client.get("/ready").status_code == 200
            assert generated(clients[0][0]) == generated(clients[1][0]) == before + 6
        assert {response.status_code for response in asyncio.run(burst(served, 20, max_tokens=5))} == {200}


def test_processes_killed_one_after_the_other_are_all_replaced() -> None:
    """The second replacement learns what the engines said of themselves from no one who was there."""
    with serve("echo", *TWO, *SLOW) as served:
        for index in (0, 1, 0):
            victim = served.server_pid(index)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda index=index, victim=victim: served.server_pid(index) != victim, "it is replaced")
            with clients_of_each(served) as clients:
                for (client,) in clients:
                    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
                    assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 131072


def test_a_process_that_keeps_dying_is_given_up_and_the_other_goes_on() -> None:
    with serve("echo", *TWO, *SLOW) as served:
        for _ in range(2):
            victim = served.server_pid(1)
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: served.server_pid(1) != victim, "it is replaced")
        os.kill(served.server_pid(1), signal.SIGKILL)
        wait_until(lambda: "the others go on without it" in served.log, "it is given up")
        assert {response.status_code for response in asyncio.run(burst(served, 20, max_tokens=5))} == {200}


def generated(client: httpx.Client) -> float:
    return sum(metric(client, "vllm:generation_tokens_total"))


def running(client: httpx.Client) -> list[float]:
    return metric(client, "vllm:num_requests_running")


def metric(client: httpx.Client, name: str) -> list[float]:
    """Return a metric for each engine, as one process tells it."""
    return [
        float(line.split()[-1]) for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name}{{")
    ]


def test_an_engine_that_dies_is_told_to_all_processes_with_its_cause() -> None:
    with serve("echo", *TWO, *SLOW) as served, clients_of_each(served) as clients:
        for (client,) in clients:
            client.headers["X-data-parallel-rank"] = "1"
        with streaming(client for (client,) in clients) as streams:
            wait_until(lambda: served.num_running() == 2, "both run")
            served.engines()[1].kill()
            for lines in streams:
                error = json.loads(events(lines)[-1])["error"]
                assert error["code"] == "engine_lost"
                assert "SIGKILL" in error["message"]
        for (client,) in clients:
            del client.headers["X-data-parallel-rank"]
            assert client.get("/health").status_code == 503
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200


def test_sigterm_drains_all_processes() -> None:
    with serve("echo", *TWO, *SLOW) as served, clients_of_each(served) as clients:
        with streaming((client for (client,) in clients), max_tokens=100) as streams:
            wait_until(lambda: served.num_running() == 2, "both run")
            children = psutil.Process(served.process.pid).children(recursive=True)
            served.signal(signal.SIGTERM)
            assert [events(lines)[-1] for lines in streams] == ["[DONE]"] * 2
        assert served.process.wait(20) == 0
        assert not any(child.is_running() for child in children)
        assert "level=error" not in served.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_launcher(number: signal.Signals) -> None:
    """C-62. Twice SIGTERM is at once, and SIGKILL leaves nobody to stop anything."""
    with serve("echo", *TWO, *SLOW) as served, httpx.Client(base_url=served.url, timeout=30) as client:
        children = psutil.Process(served.process.pid).children(recursive=True)
        assert len(children) >= 4
        with streaming([client]):
            served.signal(number)
            if number == signal.SIGTERM:
                wait_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, "it drains")
                served.signal(number)
            assert served.process.wait(10) != 0
        _, alive = psutil.wait_procs(children, timeout=10)
        assert alive == []


def test_an_engine_that_cannot_start_ends_it_all_with_the_cause() -> None:
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", "0", *TWO]
    command += ["--executor-option", "load_time_s=-1"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert failed.returncode == 2
    assert "could not start" in failed.stderr
    assert "load_time_s" in failed.stderr


def test_a_launcher_that_is_told_to_stop_while_it_starts_leaves_nothing() -> None:
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", "0", *TWO]
    command += ["--executor-option", "load_time_s=60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout:
        launcher = psutil.Process(process.pid)
        wait_until(lambda: len(launcher.children()) >= 5, "all processes run", timeout_s=START_S)
        children = launcher.children(recursive=True)
        process.terminate()
        assert process.wait(20) == 0
        assert process.stdout.read() == ""
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_starting_processes_answer_that_they_start() -> None:
    port = free_tcp_port()  # it has to be known before the server says it
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", str(port), *TWO]
    command += ["--executor-option", "load_time_s=2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def status() -> int:
        try:
            return httpx.get(f"{url}/ready", timeout=5).status_code
        except httpx.TransportError:
            return 0

    try:
        wait_until(lambda: status() == 503, "it answers that it is not ready")
        wait_until(lambda: status() == 200, "it is ready", timeout_s=START_S)
    finally:
        process.terminate()
        assert process.wait(20) == 0


def test_an_engine_death_ends_all_when_told_to() -> None:
    with serve("echo", *TWO, "--exit-on-engine-death") as served:
        served.engines()[0].kill()
        assert served.process.wait(20) == 1
        assert "SIGKILL" in served.log


def test_a_server_process_that_is_told_to_stop_ends_in_order_and_is_replaced() -> None:
    """Its status is 0, which the launcher's log shows; what it had is finished."""
    with serve("echo", *TWO, *SLOW) as served, clients_of_each(served) as ((first,), _):
        victim = served.server_pid(0)
        with streaming([first], max_tokens=50) as (lines,):
            os.kill(victim, signal.SIGTERM)
            assert events(lines)[-1] == "[DONE]"
        wait_until(lambda: "server process 0 exited with status 0" in served.log, "it ends")
        wait_until(lambda: served.server_pid(0) != victim, "it is replaced")
        assert {response.status_code for response in asyncio.run(burst(served, 20, max_tokens=5))} == {200}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_process_that_ends_before_it_serves_is_replaced(number: signal.Signals) -> None:
    """Also when the engines have told it already what they are, which they do once."""
    port = free_tcp_port()
    command = [sys.executable, "-m", "enginewire", "serve", "echo", "--port", str(port), *TWO]
    command += ["--executor-option", "load_time_s=4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            wait_until(lambda: len(server_processes(process.pid)) == 2, "both run", timeout_s=START_S)
            victim = server_processes(process.pid)[0]
            wait_until(lambda: handles(victim, number), "it would drain", timeout_s=START_S)
            victim.send_signal(number)
            assert f"http://127.0.0.1:{port}" in process.stdout.readline()
            wait_until(
                lambda: len(server_processes(process.pid)) == 2, "another has taken its place", timeout_s=START_S
            )
            url = f"http://127.0.0.1:{port}/v1/completions"
            for _ in range(10):
                assert httpx.post(url, json={"prompt": "a", "max_tokens": 2}, timeout=30).status_code == 200
        finally:
            process.terminate()
            log = process.stderr.read()
        assert process.wait(20) == 0
    how = "killed by signal 9 (SIGKILL)" if number is signal.SIGKILL else "exited with status 0"
    assert f"server process 0 {how}" in log


def server_processes(launcher: int) -> list[psutil.Process]:
    """Return a launcher's server processes, in the order of their start."""
    found = []
    for child in psutil.Process(launcher).children():
        with contextlib.suppress(psutil.Error):
            if "enginewire.server.process" in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda child: child.create_time())


def handles(process: psutil.Process, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, so that it would end in order."""
    if number is signal.SIGKILL:
        return True
    with open(f"/proc/{process.pid}/status") as lines:
        caught = next(line for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
