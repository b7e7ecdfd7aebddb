"""What is on the wire: statuses, error bodies, headers, the framing of events."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from serving import Served, wait_until

JSON = {"Content-Type": "application/json"}


def raw_exchange(served: Served, request: bytes) -> bytes:
    """Send bytes and return everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(request)
        received = b""
        while data := connection.recv(65536):
            received += data
        return received


def dechunked(response: bytes) -> tuple[bytes, list[bytes]]:
    """Return the header and the chunks of a chunked response."""
    header, _, rest = response.partition(b"\r\n\r\n")
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return header.lower(), chunks


def test_events_are_framed_as_data_lines_and_end_with_done(echo: Served) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 5, "stream": True}).encode()
    header, chunks = dechunked(
        raw_exchange(
            echo,
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
        )
    )
    assert header.startswith(b"http/1.1 200 ")
    assert b"content-type: text/event-stream; charset=utf-8" in header
    assert b"cache-control: no-cache" in header
    assert chunks[-1] == b""  # the body's proper end
    text = b"".join(chunks)
    *events, rest = text.split(b"\n\n")
    assert rest == b""
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events)
    assert events[-1] == b"data: [DONE]"
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-1]) == "ababa"
    assert all("usage" not in json.loads(event[6:]) for event in events[:-1])


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_streams_events_are_alike_whatever_is_in_text_and_id(http: httpx.Client, path: str) -> None:
    """Most are not encoded as a whole, but put around their text; nothing in one may be taken for that place."""
    text = 'say "hi" \\ \x00 \x1f \u2028 \U0001f600\n'
    body = {"max_tokens": 60, "request_id": '"\\u0000"', "n": 2}
    body |= {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    whole = http.post(f"/v1/{path}", json=body).json()
    response = http.post(f"/v1/{path}", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, last, done = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-1]]
    assert done == "[DONE]"
    assert json.loads(last)["usage"] == whole["usage"]
    texts = ["", ""]
    for event in map(json.loads, events):
        assert (event["id"], event["usage"]) == (whole["id"], None)
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"] if path == "completions" else choice["delta"].get("content", "")
    answers = [choice.get("text") or choice["message"]["content"] for choice in whole["choices"]]
    assert texts == answers
    assert text in texts[0]


COMPLETION: dict[str, Any] = {"prompt": "ab", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 100_000}, "n"),
        ({"n": 10_000}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 129}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"repetition_detection": {"max_pattern_size": 2**40, "min_count": 2}}, "repetition_detection"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"allowed_token_ids": [97]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"request_id": "with space"}, "request_id"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_completion_is_a_400_that_names_the_parameter(
    http: httpx.Client, change: dict[str, Any], param: str, stream: bool
) -> None:
    if stream and "stream_options" in change:
        return  # fine then
    response = http.post("/v1/completions", json={**COMPLETION, "stream": stream, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ],
)
def test_bad_chat_is_a_400_that_names_the_parameter(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_tools_may_be_there_if_they_are_not_to_be_used(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, "tools": [TOOL], "tool_choice": "none"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "code"),
    [
        ("GET", "/nothing", b"", {}, 404, "not_found"),
        ("GET", "/v1/models/", b"", {}, 404, "not_found"),
        ("GET", "/v1/models/none", b"", {}, 404, "model_not_found"),
        ("GET", "/v1/completions", b"", {}, 405, None),
        ("DELETE", "/health", b"", {}, 405, None),
        ("POST", "/v1/completions", b"", JSON, 400, None),
        ("POST", "/v1/completions", b"{", JSON, 400, None),
        ("POST", "/v1/completions", b"[]", JSON, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "\\ud800"}', JSON, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": NaN}', JSON, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "a", "temperature": 1e999}', JSON, 400, None),
        ("POST", "/v1/completions", b"\xff\xfe", JSON, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "a", "priority": 99999999999999999999}', JSON, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "a", "vllm_xargs": ' + b'{"a":' * 5000, JSON, 400, None),
        ("POST", "/v1/completions", b'{"prompt": "a", "unknown": ' + b"[" * 100_000, JSON, 400, None),
        ("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/completions", b'{"model": "other", "prompt": "a"}', JSON, 404, "model_not_found"),
    ],
)
def test_other_errors_have_the_same_body(
    http: httpx.Client, method: str, path: str, content: bytes, headers: dict[str, str], status: int, code: str | None
) -> None:
    response = http.request(method, path, content=content, headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    if status == 405:
        assert response.headers["allow"] == ("POST" if path.startswith("/v1") else "GET")


def test_too_large_body_is_a_413_that_the_client_can_read(slow_echo: Served) -> None:
    """Announced or not, and also while the client still sends."""
    body = json.dumps({"prompt": "a" * 200_000}).encode()
    for content in (body, iter([body[:1000], body[1000:]])):
        response = httpx.post(f"{slow_echo.url}/v1/completions", content=content, headers=JSON)  # type: ignore[arg-type]
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"
        assert response.headers["connection"] == "close"


def test_strange_request_id_is_replaced(http: httpx.Client) -> None:
    assert http.get("/health", headers={"X-Request-Id": "good-1"}).headers["x-request-id"] == "good-1"
    for strange in ("two words", "x" * 200, ""):
        made = http.get("/health", headers={"X-Request-Id": strange}).headers["x-request-id"]
        assert len(made) == 32
    assert "x-request-id" in http.get("/nothing").headers


def test_head_is_get_without_a_body(http: httpx.Client) -> None:
    response = http.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_unknown_fields_are_ignored_and_logged_once(echo: Served, http: httpx.Client) -> None:
    for _ in range(2):
        assert http.post("/v1/completions", json={**COMPLETION, "frobnicate": 1, "user": "x"}).status_code == 200
    warnings = [line for line in echo.log.splitlines() if "frobnicate" in line]
    assert len(warnings) == 1
    assert "level=warning" in warnings[0]
    assert "request_id=" in warnings[0]
    assert "'user'" not in echo.log


def test_access_log_has_a_line_per_request_that_clients_cannot_break(echo: Served, http: httpx.Client) -> None:
    body = {**COMPLETION, "prompt": "zy"}  # no letters of a request's id
    http.post("/v1/completions", json=body, headers={"X-Request-Id": "in-the-log"})
    wait_until(lambda: "request_id=in-the-log" in echo.log, "its line is written")
    (line,) = [line for line in echo.log.splitlines() if "request_id=in-the-log" in line]
    for field in ("method=POST", "path=/v1/completions", "status=200", "prompt_tokens=2", "completion_tokens=2"):
        assert f" {field} " in f"{line} "
    http.get("/no%0aforged level=error")
    assert not any(line.startswith("forged") for line in echo.log.splitlines())
    assert "zy" not in line


def test_health_checks_do_not_fill_the_log(echo: Served, http: httpx.Client) -> None:
    for path in ("/health", "/ready", "/metrics", "/state"):
        assert http.get(path, headers={"X-Request-Id": "quiet-one"}).status_code == 200
    assert "quiet-one" not in echo.log


def test_tokenize_and_detokenize_are_inverse(http: httpx.Client) -> None:
    made = http.post("/tokenize", json={"prompt": "añ", "return_token_strs": True}).json()
    assert made == {
        "count": 3,
        "max_model_len": 131072,
        "tokens": [97, 195, 177],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "añ"}
    chat = http.post("/tokenize", json={"messages": CHAT["messages"]}).json()
    usage = http.post("/v1/chat/completions", json=CHAT).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert http.post("/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"
    assert http.post("/tokenize", json={}).json()["error"]["param"] == "prompt"


def test_page_and_version_and_description_are_served(http: httpx.Client) -> None:
    assert http.get("/").headers["content-type"].startswith("text/html")
    assert http.get("/version").json().keys() == {"version"}
    document = http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models/{model}", "/sleep"} <= document["paths"].keys()
    names = {operation["operationId"] for path in document["paths"].values() for operation in path.values()}
    assert len(names) == sum(map(len, document["paths"].values()))
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]
