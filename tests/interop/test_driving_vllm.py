"""The official SDK, our server, and a headless vLLM engine that was started elsewhere."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from deployment import SETTLE_S, Deployment
from environments import Environment
from processes import ENGINE_FLAGS, Runner, expect_ready, poll_until
from texts import Texts, greedy_texts, sdk

from enginewire import LLM, SamplingParams
from enginewire.errors import UtilityCallError
from enginewire.testing import free_tcp_port
from enginewire.wire.messages import LoRARequest

pytestmark = pytest.mark.core

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


class DrivenVLLM(Deployment):
    """Our server and one vLLM engine, each of which can be started again on the same port."""

    def __init__(self, vllm: Environment, runner: Runner, stack: contextlib.ExitStack) -> None:
        self.model = vllm.model.name
        self.vllm, self._runner, self._stack = vllm, runner, stack
        self.port = free_tcp_port()
        self.start_server()  # it comes first here, and the order does not matter
        self.start_engine()

    def start_server(self, *args: str) -> None:
        """Start our server, for an engine elsewhere."""
        where = ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(self.port)]
        serving = self._runner.serve(self.vllm.model, "--data-parallel-size-local", "0", *where, *args)
        self.server, self.url = self._stack.enter_context(serving)

    def start_engine(self) -> None:
        """Start the engine."""
        engine = self._runner.headless_vllm(self.vllm, self.port, "--max-logprobs", "100")
        self.engine = self._stack.enter_context(engine)

    def expect_ready(self) -> None:
        """Wait until the server has the engine."""
        expect_ready(f"{self.url}/ready", self.server, self.engine)

    def kill_engine(self) -> None:
        """SIGKILL the engine's process; its launcher ends by itself, with status 0."""
        (process,) = self.engine.children("EngineCore")
        process.kill()


@pytest.fixture(scope="module")
def launched(vllm: Environment, runner: Runner) -> Iterator[DrivenVLLM]:
    """Our server and one engine, which need a minute to start."""
    with contextlib.ExitStack() as stack:
        yield DrivenVLLM(vllm, runner, stack)


@pytest.fixture(scope="module")
def vllm_texts(launched: DrivenVLLM, vllm: Environment, runner: Runner) -> Texts:
    """What vLLM's own server answers greedily, on the same engine settings; asked for while ours starts."""
    with runner.vllm_server(vllm, *ENGINE_FLAGS) as (server, url):
        expect_ready(f"{url}/health", server, launched.engine)
        return greedy_texts(url, str(vllm.model))


@pytest.fixture(scope="module")
def served(launched: DrivenVLLM, vllm_texts: Texts) -> DrivenVLLM:
    """The same, ready."""
    launched.expect_ready()
    return launched


@pytest.fixture
def client(served: Deployment) -> Iterator[openai.OpenAI]:
    """The official client."""
    with sdk(served.url) as client:
        yield client


def test_greedy_texts_are_those_of_vllms_own_server(served: Deployment, vllm_texts: Texts) -> None:
    """One at a time with the prefix cache reset, on the same engine settings."""
    assert greedy_texts(served.url, served.model) == vllm_texts


def test_chat(served: Deployment, client: openai.OpenAI) -> None:
    """The plain case."""
    answer = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=32, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 32


def test_a_stream_is_the_same_text_in_pieces(served: Deployment, client: openai.OpenAI) -> None:
    """Streaming."""
    whole = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=32, temperature=0)
    events = list(
        client.chat.completions.create(
            model=served.model,
            messages=CHAT,
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [event.choices[0].delta.content or "" for event in events if event.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 1
    assert events[-1].usage == whole.usage


def test_two_samples_of_one_prompt(served: Deployment, client: openai.OpenAI) -> None:
    """n=2: seeds count up, so that the same call gives the same two."""
    texts = [
        [
            choice.text
            for choice in client.completions.create(
                model=served.model, prompt="My name is", n=2, max_tokens=16, temperature=1.0, seed=7
            ).choices
        ]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_logprobs_of_prompt_and_text(served: Deployment, client: openai.OpenAI) -> None:
    """logprobs=5 with prompt logprobs: five alternatives a position, the greedy token is the first of them."""
    completion = client.completions.create(
        model=served.model,
        prompt="The capital of France is",
        max_tokens=6,
        temperature=0,
        logprobs=5,
        extra_body={"prompt_logprobs": 5, "return_token_ids": True},
    )
    choice = completion.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    for token, logprob, best in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert len(best) == 5
        assert max(best, key=lambda text: best[text]) == token
        assert best[token] == logprob
    prompt_logprobs = choice.prompt_logprobs  # type: ignore[attr-defined]
    assert completion.usage is not None
    assert len(prompt_logprobs) == completion.usage.prompt_tokens
    assert prompt_logprobs[0] is None
    assert all(len(position) >= 5 for position in prompt_logprobs[1:])


def test_json_schema(served: Deployment, client: openai.OpenAI) -> None:
    """Structured outputs, twice: with and without a stream."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    ask = {"model": served.model, "messages": [{"role": "user", "content": "Describe Anna."}], "max_tokens": 200}
    answer = client.chat.completions.create(**ask, temperature=0, response_format=form)
    person = json.loads(answer.choices[0].message.content or "")
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-f]{4}-[0-9]{3}"}, r"[a-f]{4}-[0-9]{3}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_object": True}, r"(?s)\{.*\}?"),
    ],
    ids=["regex", "choice", "grammar", "json_object"],
)
def test_structured_outputs(
    served: Deployment, client: openai.OpenAI, constraint: dict[str, object], pattern: str
) -> None:
    """What vLLM offers beside schemas."""
    completion = client.completions.create(
        model=served.model,
        prompt="Say something: ",
        max_tokens=30,
        temperature=0,
        extra_body={"structured_outputs": constraint},
    )
    assert re.fullmatch(pattern, completion.choices[0].text)


def test_what_would_end_the_engine_is_refused(served: Deployment, client: openai.OpenAI) -> None:
    """vLLM's frontends check grammars with the engine's own library; the engine trusts them, and dies of a bad one."""
    with pytest.raises(openai.BadRequestError, match="grammar"):
        client.completions.create(
            model=served.model, prompt="x", extra_body={"structured_outputs": {"grammar": 'root ::= ("a"'}}
        )
    with pytest.raises(openai.BadRequestError, match="schema"):
        client.completions.create(model=served.model, prompt="x", extra_body={"structured_outputs": {"json": "[1]"}})
    broken = client.completions.create(  # only the library can tell: it allows nothing but the end of the text
        model=served.model, prompt="x", extra_body={"structured_outputs": {"regex": "(["}}
    )
    assert (broken.choices[0].text, broken.choices[0].finish_reason) == ("", "stop")
    assert client.completions.create(model=served.model, prompt="x", max_tokens=4).choices[0].finish_reason == "length"


def test_stop_string_ends_the_request_on_the_engine_too(served: Deployment, client: openai.OpenAI) -> None:
    """The engine does not know stop strings: the frontend ends the text and aborts the request."""
    completion = client.completions.create(
        model=served.model, prompt="1, 2, 3, 4, 5,", max_tokens=500, temperature=0, stop=["9"]
    )
    assert completion.choices[0].finish_reason == "stop"
    assert completion.choices[0].text == " 6, 7, 8, "
    served.expect_running(0)


def test_logit_bias_and_bad_words(served: Deployment, client: openai.OpenAI) -> None:
    """What our own CPU engine may not have and vLLM has."""
    prompt = "The capital of France is"
    ask = {"model": served.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    plain = client.completions.create(**ask, extra_body={"return_token_ids": True}).choices[0]
    assert "Paris" in plain.text
    first = plain.token_ids[0]  # type: ignore[attr-defined]
    assert not client.completions.create(**ask, logit_bias={str(first): -100}).choices[0].text.startswith(" Paris")
    assert "Paris" not in client.completions.create(**ask, extra_body={"bad_words": ["Paris"]}).choices[0].text
    pushed = client.completions.create(**ask, logit_bias={"5": 100}, extra_body={"return_token_ids": True}).choices[0]
    assert pushed.token_ids == [5, 5, 5, 5]  # type: ignore[attr-defined]


def test_what_the_client_leaves_in_mid_stream_leaves_the_engine(served: Deployment) -> None:
    """Abort: the engine's running count returns to 0 long before the text would have ended."""
    with served.streaming(max_tokens=1000):
        served.expect_running(1)
        begin = time.monotonic()
    served.expect_running(0)
    assert time.monotonic() - begin < 5


def test_priorities_pass_through(served: Deployment, client: openai.OpenAI) -> None:
    """The engine's policy is fcfs here; the field must not disturb it."""
    completion = client.completions.create(model=served.model, prompt="x", max_tokens=3, extra_body={"priority": -1})
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 3


def test_sleep_at_level_0_and_waking(served: Deployment, client: openai.OpenAI) -> None:
    """A request that comes meanwhile is not lost."""
    served.post("/sleep?level=0")
    assert served.get("/is_sleeping").json() == {"is_sleeping": True}
    assert httpx.get(f"{served.url}/ready").status_code == 503
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.post("/wake_up")
    assert served.get("/is_sleeping").json() == {"is_sleeping": False}
    served.get("/ready")
    assert client.completions.create(model=served.model, prompt="x", max_tokens=3).choices[0].finish_reason


@pytest.fixture
def going_on(served: Deployment) -> Iterator[None]:
    """Resumes the engine after a test that paused it, however that ended: others come after it."""
    yield
    served.post("/resume")


@pytest.mark.usefixtures("going_on")
@pytest.mark.parametrize(
    ("mode", "max_tokens"),
    [("abort", 1000), ("wait", 150), ("keep", 150)],  # on a busy machine vLLM reads a call a hundred tokens late
)
def test_pause_modes(served: Deployment, mode: str, max_tokens: int) -> None:
    """abort ends the running request, wait lets it finish, keep freezes it until the engine goes on."""
    with served.streaming(max_tokens) as lines:
        served.post(f"/pause?mode={mode}")
        assert served.get("/is_paused").json() == {"is_paused": True}
        if mode == "keep":
            served.post("/resume")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == ("abort" if mode == "abort" else "length")
    if mode != "keep":
        served.post("/resume")
    assert served.get("/is_paused").json() == {"is_paused": False}


def test_reset_prefix_cache(served: Deployment, client: openai.OpenAI) -> None:
    """Cached tokens are counted, and gone after a reset."""
    prompt = "word " * 200
    ask = {"model": served.model, "prompt": prompt, "max_tokens": 1}
    served.post("/reset_prefix_cache")

    def cached() -> int:
        usage = client.completions.create(**ask).usage
        assert usage is not None
        details = usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    assert cached() == 0
    assert cached() > 100
    assert served.post("/reset_prefix_cache").json() == {"success": True}
    assert cached() == 0


def test_collective_rpc_by_name(served: Deployment) -> None:
    """The method's name travels; a method that no worker has is a clear failure."""
    answer = served.post("/collective_rpc", {"method": "get_supported_tasks"}).json()
    assert answer == {"results": [["generate"]]}


def test_the_server_shows_what_the_engine_reported(served: Deployment) -> None:
    """max_model_len, blocks and version come from the ready response."""
    state = served.get("/state").json()
    assert state["max_model_len"] == 1024
    (engine,) = state["engines"]
    assert engine["index"] == 0
    assert engine["health"] == "ready"


def test_prompts_that_are_too_long_are_refused_before_they_are_sent(served: Deployment, client: openai.OpenAI) -> None:
    """A reference engine does not check them (defect 8)."""
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model=served.model, prompt=[5] * 1024, max_tokens=4)


# What follows kills, in this order.


def test_sigkill_of_the_engine_fails_what_runs_within_two_seconds(served: DrivenVLLM) -> None:
    """Its launcher says nothing and exits with status 0; the kernel closes the connections, and that is seen."""
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(served.streaming(max_tokens=1000)) for _ in range(3)]
        served.expect_running(3)
        begin = time.monotonic()
        served.kill_engine()
        ends = [[line for line in lines if line][-1] for lines in streams]
        took = time.monotonic() - begin
        poll_until(lambda: httpx.get(f"{served.url}/ready").status_code == 503, 2, "/ready 503")
    for end in ends:
        error = json.loads(end.removeprefix("data: "))["error"]
        assert error["code"] == "engine_lost"
        assert "engine 0" in error["message"]
    assert took < 2
    assert httpx.get(f"{served.url}/health").status_code == 200  # its return is awaited
    refused = httpx.post(f"{served.url}/v1/completions", json={"model": served.model, "prompt": "x"})
    assert refused.status_code == 503


@pytest.fixture(scope="module")
def engine_restarted(served: DrivenVLLM) -> None:
    """A new engine, where one was killed."""
    served.start_engine()
    served.expect_ready()


@pytest.mark.usefixtures("engine_restarted")
def test_a_restarted_engine_brings_service_back(served: DrivenVLLM, vllm_texts: Texts) -> None:
    """By a new HELLO; our server is not restarted, and its texts are the same as before."""
    assert served.server.process.poll() is None
    assert greedy_texts(served.url, served.model) == vllm_texts
    assert served.num_running() == 0


@pytest.mark.usefixtures("engine_restarted")
def test_the_offline_class_takes_the_engine_over(served: DrivenVLLM) -> None:
    """``LLM`` with the same settings, after our server has ended in order; and what only it has calls for."""
    served.server.process.terminate()
    assert served.server.process.wait(SETTLE_S) == 0
    settings = {"data_parallel_size_local": 0, "data_parallel_rpc_port": served.port}
    with LLM(served.vllm.model, engine="vllm", **settings) as llm:
        greedy = SamplingParams(max_tokens=8, temperature=0)
        capital, sum_ = llm.generate(["The capital of France is", "Two plus two is"], greedy, priority=1)
        assert "Paris" in capital.outputs[0].text
        assert len(sum_.outputs[0].token_ids) == 8
        with pytest.raises(UtilityCallError, match="LoRA is not enabled"):
            llm.add_lora(LoRARequest(lora_name="x", lora_int_id=1, lora_path="/nowhere"))
        with pytest.raises(UtilityCallError, match="no_such_method"):
            llm.collective_rpc("no_such_method")
        assert llm.is_sleeping() is False
        assert llm.generate("The capital of France is", greedy)[0].outputs[0].text == capital.outputs[0].text


@pytest.fixture(scope="module")
def server_restarted(served: DrivenVLLM) -> float:
    """A new server, where one was killed with requests running; when it was launched."""
    if served.server.process.poll() is None:  # unless the test before has run and ended it
        served.server.stop()
    served.start_server()
    expect_ready(f"{served.url}/ready", served.server, timeout_s=60)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(served.streaming(max_tokens=1000))
        served.expect_running(4)
        served.server.kill()
    launched = time.monotonic()
    served.start_server("--set", "engine_return_timeout_s=0")
    return launched


def test_a_restarted_server_finds_its_engine_and_ends_what_the_dead_one_left(
    served: DrivenVLLM, server_restarted: float
) -> None:
    """The engine sends no HELLO: it reconnects to the same ports, and is asked."""
    expect_ready(f"{served.url}/ready", served.server, timeout_s=30)
    assert time.monotonic() - server_restarted < 30
    served.expect_running(0, 5)  # four times a thousand tokens take longer
    with sdk(served.url) as client:
        answer = client.chat.completions.create(model=served.model, messages=CHAT, max_tokens=16, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")


@pytest.mark.usefixtures("server_restarted")
def test_an_engine_whose_return_is_not_awaited_is_dead(served: DrivenVLLM) -> None:
    """/health is 503 too."""
    with served.streaming(max_tokens=1000) as lines:
        served.expect_running(1)
        served.kill_engine()
        end = [line for line in lines if line][-1]
    assert "engine 0" in json.loads(end.removeprefix("data: "))["error"]["message"]
    for path in ("/ready", "/health"):
        poll_until(lambda path=path: httpx.get(f"{served.url}{path}").status_code == 503, 2, f"{path} 503")
