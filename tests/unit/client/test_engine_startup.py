"""``EngineStartup`` decides from messages alone; ``apply_ready_responses`` writes what came of it."""

from __future__ import annotations

import logging

import msgspec
import pytest

from enginewire import EngineConfig, EngineStartupError
from enginewire.client.startup import EngineStartup, Expected, apply_ready_responses
from enginewire.testing import mock_ready, mock_ready_0_32
from enginewire.wire.frames import describe_identity
from enginewire.wire.handshake import EngineHandshakeMetadata, EngineZmqAddresses, FrontendInfo, HandshakeMessage
from enginewire.wire.profile import V0_25, V0_32

ADDRESSES = EngineZmqAddresses(inputs=["ipc://in"], outputs=["ipc://out"])
ENGINE_0, ENGINE_1 = b"\x00\x00", b"\x01\x00"
READY_RESPONSE = msgspec.msgpack.encode(mock_ready())


def said(status: str, *, local: bool = True, headless: bool = False) -> bytes:
    """Encode a handshake message."""
    return msgspec.msgpack.encode({"status": status, "local": local, "headless": headless})


@pytest.fixture
def startup() -> EngineStartup:
    return EngineStartup(dict.fromkeys([0, 1], Expected(ADDRESSES, is_local=True)))


def test_engines_become_ready_in_any_order(startup: EngineStartup) -> None:
    """C-24."""
    assert startup.missing() == "engine 0 has not said HELLO; engine 1 has not said HELLO"
    reply = startup.on_handshake(ENGINE_1, said("HELLO"))
    assert reply is not None
    assert msgspec.msgpack.decode(reply, type=EngineHandshakeMetadata).addresses == ADDRESSES
    startup.on_ready_response(ENGINE_1, READY_RESPONSE)
    assert startup.missing() == "engine 0 has not said HELLO; engine 1 has said HELLO and is not ready"
    assert startup.on_handshake(ENGINE_1, said("READY")) is None
    assert startup.missing() == "engine 0 has not said HELLO"
    assert not startup.all_local_said_hello
    startup.on_handshake(ENGINE_0, said("HELLO"))
    assert startup.all_local_said_hello
    startup.on_handshake(ENGINE_0, said("READY"))
    assert not startup.is_complete
    startup.on_ready_response(ENGINE_0, READY_RESPONSE)
    assert startup.is_complete
    assert startup.missing() == ""


@pytest.mark.parametrize("identity", [b"\x02\x00", b"\x00", b"", b"\x00\x00\x00\x00\x01", b"\x00\x01"])
def test_strangers_are_reported_and_change_nothing(
    startup: EngineStartup, identity: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """C-24; defect 20. ``00 01`` is rank 256: little endian."""
    assert startup.on_handshake(identity, said("HELLO")) is None
    startup.on_ready_response(identity, READY_RESPONSE)
    who = describe_identity(identity)
    assert startup.missing() == (
        f"engine 0 has not said HELLO; engine 1 has not said HELLO; came and is not expected here: {who}"
    )
    assert caplog.text.count(f"of unexpected {who}; expected: 0, 1") == 2


def test_a_rank_too_many_is_told_so_if_it_is_one_of_ours(startup: EngineStartup) -> None:
    """Its HELLO shows what it is. vLLM's engines would not understand."""
    hello = HandshakeMessage(status="HELLO", local=True, headless=False, enginewire="1.0")
    reply = startup.on_handshake(b"\x02\x00", msgspec.msgpack.encode(hello))
    assert reply is not None
    init = msgspec.msgpack.decode(reply, type=EngineHandshakeMetadata)
    assert init.addresses.inputs == init.addresses.outputs == []
    assert isinstance(init.enginewire, FrontendInfo)
    assert "rank 2 is not expected here; expected: 0, 1" in str(init.enginewire.refusal)


def test_engines_of_ours_are_told_our_heartbeat_and_vllms_nothing_new() -> None:
    agreed = Expected(ADDRESSES, is_local=True, heartbeat_s=(0.25, 3.0))
    startup = EngineStartup(dict.fromkeys([0, 1], agreed))
    hello = HandshakeMessage(status="HELLO", local=True, headless=False, enginewire="1.0")
    ours = startup.on_handshake(ENGINE_0, msgspec.msgpack.encode(hello))
    assert ours is not None
    init = msgspec.msgpack.decode(ours, type=EngineHandshakeMetadata)
    assert init.enginewire == FrontendInfo(heartbeat_ms=(250, 3000))
    theirs = startup.on_handshake(ENGINE_1, said("HELLO"))
    assert theirs is not None
    assert set(msgspec.msgpack.decode(theirs)) == {"addresses", "parallel_config"}


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"status": "WHAT"})])
def test_an_undecodable_handshake_is_ignored(
    startup: EngineStartup, payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    assert startup.on_handshake(ENGINE_0, payload) is None
    assert "ignored a handshake message of rank 0" in caplog.text


@pytest.mark.parametrize(
    "messages", [["READY"], ["HELLO", "HELLO"], ["HELLO", "READY", "READY"], ["HELLO", "READY", "HELLO"]]
)
def test_what_is_out_of_turn_is_refused(startup: EngineStartup, messages: list[str]) -> None:
    """Protocol B.1, 4."""
    *sound, bad = messages
    for status in sound:
        startup.on_handshake(ENGINE_0, said(status))
    with pytest.raises(EngineStartupError, match=f"unexpected {bad} from engine 0") as caught:
        startup.on_handshake(ENGINE_0, said(bad))
    assert caught.value.engine_index == 0


@pytest.mark.parametrize(
    ("expected_local", "local", "headless", "agrees"),
    [
        (True, True, False, True),
        (True, False, True, False),
        (True, False, False, False),
        (False, False, True, True),
        (False, True, False, False),
        (False, False, False, False),
    ],
)
def test_where_an_engine_was_started_must_be_what_was_agreed(
    expected_local: bool, local: bool, headless: bool, agrees: bool
) -> None:
    """Protocol B.1, 2 and 3."""
    startup = EngineStartup({0: Expected(ADDRESSES, is_local=expected_local)})
    if agrees:
        assert startup.on_handshake(ENGINE_0, said("HELLO", local=local, headless=headless))
    else:
        with pytest.raises(EngineStartupError, match="started for another deployment"):
            startup.on_handshake(ENGINE_0, said("HELLO", local=local, headless=headless))


def test_the_second_of_two_ready_responses_counts(startup: EngineStartup, caplog: pytest.LogCaptureFixture) -> None:
    """Defect 20: a repeat is a re-registration."""
    for blocks in (1, 2):
        startup.on_ready_response(ENGINE_0, msgspec.msgpack.encode(mock_ready(num_gpu_blocks=blocks)))
    response = startup.ready_of(0).response
    assert response is not None
    assert response.num_gpu_blocks == 2
    assert "second ready response" in caplog.text


def test_when_somebody_else_shakes_hands_only_responses_count() -> None:
    """K: several API servers."""
    startup = EngineStartup({0: None})
    assert startup.all_local_said_hello
    startup.on_ready_response(ENGINE_0, READY_RESPONSE)
    assert startup.is_complete


def test_what_engines_are_is_combined() -> None:
    """C-25: minimum, sum, last block size, first capacity figures."""
    config = EngineConfig.create("echo", max_model_len=2000, num_gpu_blocks=7)
    responses = [
        mock_ready(max_model_len=1500, num_gpu_blocks=10, block_size=16, kv_cache_size_tokens=160),
        mock_ready(max_model_len=1800, num_gpu_blocks=20, block_size=32, kv_cache_size_tokens=640),
    ]
    for _ in range(2):  # what was written before is replaced, not added to
        apply_ready_responses(config, responses, max_model_len=2000)
    assert (config.max_model_len, config.num_gpu_blocks, config.block_size) == (1500, 30, 32)
    assert (config.kv_cache_size_tokens, config.kv_cache_max_concurrency) == (160, 1.5625)


def test_an_engine_that_states_no_length_leaves_the_setting_alone() -> None:
    config = EngineConfig.create("echo")
    apply_ready_responses(config, [mock_ready(max_model_len=0)])
    assert config.max_model_len is None


def test_nothing_but_warnings_is_logged(startup: EngineStartup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    startup.on_handshake(ENGINE_0, said("HELLO"))
    assert caplog.text == ""


def test_an_empty_ready_response_is_taken_if_the_length_is_known() -> None:
    """Protocol B.4: nothing to apply."""
    startup = EngineStartup({0: None}, max_model_len=512)
    startup.on_ready_response(ENGINE_0, b"")
    assert startup.is_complete
    assert startup.ready_of(0).response is None
    config = EngineConfig.create("echo", max_model_len=512)
    apply_ready_responses(config, [])
    assert (config.max_model_len, config.num_gpu_blocks) == (512, None)


def test_an_empty_ready_response_without_a_length_says_what_to_set() -> None:
    startup = EngineStartup({0: None})
    with pytest.raises(EngineStartupError, match="set it in the configuration"):
        startup.on_ready_response(ENGINE_0, b"")


def test_each_engine_is_told_its_own_addresses_and_local_and_headless_ones_mix() -> None:
    """Issue 5; INIT is per engine, and so are its flags."""
    expected = {
        index: Expected(EngineZmqAddresses(inputs=[f"in{index}"], outputs=[f"out{index}"]), is_local=index == 0)
        for index in (0, 1)
    }
    startup = EngineStartup(expected)
    startup.on_handshake(ENGINE_0, said("HELLO"))
    assert startup.all_local_said_hello
    reply = startup.on_handshake(ENGINE_1, said("HELLO", local=False, headless=True))
    assert reply is not None
    assert msgspec.msgpack.decode(reply, type=EngineHandshakeMetadata).addresses.inputs == ["in1"]


def test_the_layout_is_chosen_for_each_engine() -> None:
    """Protocol M.1: two versions in one deployment."""
    startup = EngineStartup(dict.fromkeys([0, 1]))
    startup.on_ready_response(ENGINE_0, READY_RESPONSE)
    startup.on_ready_response(ENGINE_1, msgspec.msgpack.encode(mock_ready_0_32()))
    assert [startup.ready_of(index).profile for index in (0, 1)] == [V0_25, V0_32]
