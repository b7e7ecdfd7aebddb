"""OpenVINOExecutor on the real model at its default precision, with a KV cache small enough to overflow."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from enginewire.config import EngineConfig
from enginewire.errors import ConfigError, InvalidRequestError, ModelError
from enginewire.executors import OpenVINOExecutor
from enginewire.models import resolve_model
from enginewire.text.tokenizer import load_tokenizer
from enginewire.wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from enginewire.wire.sampling import SamplingParams, StructuredOutputsParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

EOS = 2
NUM_BLOCKS = 24
CHUNK = 128


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[OpenVINOExecutor]:
    options = {"num_kv_blocks": NUM_BLOCKS, "max_num_batched_tokens": CHUNK}
    executor = OpenVINOExecutor(EngineConfig.create(str(model), executor_options=options))
    yield executor
    executor.shutdown()


@pytest.fixture
def executor(loaded: OpenVINOExecutor) -> OpenVINOExecutor:
    assert not loaded.has_unfinished_requests(), "the test before left something running"
    return loaded


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model)


@pytest.fixture
def question(request: pytest.FixtureRequest, tokenizer: Any) -> list[int]:
    """A prompt that no other test has: at this precision texts may depend on what the prefix cache holds."""
    topic = str(request.node.name)
    return list(tokenizer.encode(f"<|im_start|>user\nTell me of {topic}.<|im_end|>\n<|im_start|>assistant\n"))


def run(executor: OpenVINOExecutor, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    for request in requests:
        executor.add_request(request)
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    while executor.has_unfinished_requests():
        for output in executor.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def generate(executor: OpenVINOExecutor, prompt: list[int], **params: Any) -> list[int]:
    """Return the tokens of one request that runs alone."""
    params = {"temperature": 0, "max_tokens": 16} | params
    request = EngineCoreRequest("alone", prompt, sampling_params=SamplingParams(**params))
    return tokens_of(run(executor, request)["alone"])


def test_capacity_is_what_there_is(executor: OpenVINOExecutor, question: list[int]) -> None:
    generate(executor, question, max_tokens=1)
    assert executor.capacity.num_gpu_blocks == NUM_BLOCKS
    assert executor.capacity.max_model_len == NUM_BLOCKS * 32
    assert executor.capacity.vocab_size == 49152
    pipeline = executor._pipeline
    assert pipeline is not None
    assert pipeline.kv_cache_bytes == NUM_BLOCKS * 437_760


def test_greedy_is_repeatable_and_gives_one_token_per_output(executor: OpenVINOExecutor, question: list[int]) -> None:
    request = EngineCoreRequest("r", question, sampling_params=SamplingParams(temperature=0, max_tokens=16))
    first, second = run(executor, request)["r"], run(executor, request)["r"]
    assert tokens_of(first) == tokens_of(second)
    assert [len(output.new_token_ids) for output in first] == [1] * 16
    assert [output.finish_reason for output in first] == [None] * 15 + [FinishReason.LENGTH]


def test_seeds_reproduce_and_no_seed_is_different_every_time(executor: OpenVINOExecutor, question: list[int]) -> None:
    """OpenVINO's seed is 0 unless one is drawn."""
    seeded = [generate(executor, question, temperature=1, seed=seed) for seed in (5, 5, 5 + 2**32, 6)]
    assert seeded[0] == seeded[1] == seeded[2] != seeded[3]
    unseeded = [generate(executor, question, temperature=1) for _ in range(3)]
    assert len({tuple(tokens) for tokens in unseeded}) == 3


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1, "min_p": 1.0}, {"temperature": 1, "top_k": 1}, {"temperature": 1, "top_p": 1e-60}],
    ids=str,
)
def test_what_leaves_only_the_likeliest_token_is_greedy(
    executor: OpenVINOExecutor, question: list[int], params: dict[str, Any]
) -> None:
    assert generate(executor, question, **params) == generate(executor, question)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2, "top_k": 10**9, "seed": -(2**63)},
        {"temperature": 1e-9, "min_p": 0.5},
        {"repetition_penalty": 1e-60},
        {"repetition_penalty": 1e60, "presence_penalty": -2, "frequency_penalty": -2},
        {"min_tokens": 16, "stop_token_ids": [10**9]},
    ],
    ids=str,
)
def test_extreme_but_legal_values_run(executor: OpenVINOExecutor, question: list[int], params: dict[str, Any]) -> None:
    assert len(generate(executor, question, ignore_eos=True, **params)) == 16


@pytest.mark.parametrize(
    ("penalty", "rewarding", "punishing"),
    [("repetition_penalty", 0.5, 2.0), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2)],
)
def test_penalties_make_repetition_rarer(
    executor: OpenVINOExecutor, question: list[int], penalty: str, rewarding: float, punishing: float
) -> None:
    def distinct(value: float) -> int:
        return len(set(generate(executor, question, max_tokens=32, ignore_eos=True, **{penalty: value})))

    assert distinct(punishing) > distinct(rewarding)


def test_stop_tokens_stop_and_are_the_stop_reason_also_when_eos_is_ignored(
    executor: OpenVINOExecutor, question: list[int]
) -> None:
    undisturbed = generate(executor, question, ignore_eos=True)
    stop = undisturbed[7]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[stop])
    outputs = run(executor, EngineCoreRequest("r", question, sampling_params=params))["r"]
    assert tokens_of(outputs) == undisturbed[: undisturbed.index(stop) + 1]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)


def test_eos_stops_without_a_stop_reason_unless_it_is_ignored(executor: OpenVINOExecutor, tokenizer: Any) -> None:
    prompt = list(
        tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    )
    params = SamplingParams(temperature=0, max_tokens=64, eos_token_id=EOS)
    outputs = run(executor, EngineCoreRequest("r", prompt, sampling_params=params))["r"]
    assert (outputs[-1].new_token_ids, outputs[-1].finish_reason, outputs[-1].stop_reason) == (
        [EOS], FinishReason.STOP, None,
    )  # fmt: skip
    assert len(generate(executor, prompt, max_tokens=64, ignore_eos=True)) == 64


def test_min_tokens_keep_eos_and_stop_tokens_away(executor: OpenVINOExecutor, question: list[int]) -> None:
    undisturbed = generate(executor, question)
    stops = undisturbed[:3]
    tokens = generate(executor, question, eos_token_id=EOS, stop_token_ids=stops, min_tokens=12)
    assert not {EOS, *stops} & set(tokens[:12])
    assert len(tokens) >= 12


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_outputs_have_the_structure(
    executor: OpenVINOExecutor, tokenizer: Any, question: list[int], temperature: float
) -> None:
    constraints: dict[str, dict[str, Any]] = {
        "json": {"json": SCHEMA},
        "regex": {"regex": r"(19|20)\d{2}-[01]\d"},
        "choice": {"choice": ['der "See"\n', "das Meer\\é"]},
        "grammar": {"grammar": 'root ::= ("ab" | "c"){2,5} "!"'},
        "json_object": {"json_object": True},
    }
    outputs = run(
        executor,
        *(
            EngineCoreRequest(
                name,
                question,
                sampling_params=SamplingParams(
                    temperature=temperature,
                    max_tokens=64,
                    eos_token_id=EOS,
                    structured_outputs=StructuredOutputsParams(**constraint),
                ),
            )
            for name, constraint in constraints.items()
        ),
    )
    texts = {name: tokenizer.decode(tokens_of(got), skip_special_tokens=True) for name, got in outputs.items()}
    is_whole = {name: got[-1].finish_reason is FinishReason.STOP for name, got in outputs.items()}
    person = json.loads(texts["json"]) if is_whole["json"] else None
    assert person is None or (set(person) == {"name", "age"} and len(person["name"]) <= 8 and person["age"] >= 0)
    assert texts["json"].lstrip().startswith("{")
    assert re.fullmatch(r"(19|20)\d{2}-[01]\d", texts["regex"])
    assert texts["choice"] in constraints["choice"]["choice"]
    assert re.fullmatch(r"(ab|c){2,5}!", texts["grammar"])
    assert not is_whole["json_object"] or isinstance(json.loads(texts["json_object"]), dict)
    assert all(is_whole[name] for name in ("regex", "choice", "grammar"))


def test_a_grammar_ends_the_text_also_when_eos_is_ignored(
    executor: OpenVINOExecutor, tokenizer: Any, question: list[int]
) -> None:
    tokens = generate(
        executor, question, ignore_eos=True, min_tokens=9, structured_outputs=StructuredOutputsParams(regex="[0-9]{3}")
    )
    assert re.fullmatch("[0-9]{3}", tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize(
    "constraint",
    [{"json": {"type": "nonsense"}}, {"regex": "(un["}, {"grammar": "root ::= nowhere"}, {"json": "{"}],
    ids=str,
)
def test_an_invalid_constraint_is_refused_and_disturbs_nobody(
    executor: OpenVINOExecutor, question: list[int], constraint: dict[str, Any]
) -> None:
    """OpenVINO accepts it and raises in the middle of a step, for everybody."""
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name in "abcd":
        executor.add_request(EngineCoreRequest(name, question, sampling_params=greedy))
    outputs = executor.step()
    pipeline = executor._pipeline
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    with pytest.raises(InvalidRequestError) as info:
        executor.add_request(EngineCoreRequest("bad", question, sampling_params=params))
    assert info.value.parameter == "structured_outputs"
    outputs += _drain(executor)
    assert Counter(output.request_id for output in outputs) == dict.fromkeys("abcd", 8)
    assert executor._pipeline is pipeline


def _drain(executor: OpenVINOExecutor) -> list[EngineCoreOutput]:
    outputs = []
    while executor.has_unfinished_requests():
        outputs += executor.step()
    return outputs


def test_more_demand_than_kv_blocks_is_served_by_turns(executor: OpenVINOExecutor, question: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = {str(i): [i + 100, *question * 12][:170] for i in range(5)}  # 5 * 210 tokens in a cache of 768
    for name, prompt in prompts.items():
        executor.add_request(EngineCoreRequest(name, prompt, sampling_params=params))
    outputs, most_preempted, highest_usage = [], 0, 0.0
    while executor.has_unfinished_requests():
        outputs += executor.step()
        stats = executor.stats()
        most_preempted = max(most_preempted, stats.num_preempted_reqs)
        highest_usage = max(highest_usage, stats.kv_cache_usage)
    assert Counter(output.request_id for output in outputs) == dict.fromkeys(prompts, 40)
    assert most_preempted > 0
    assert 0.9 < highest_usage <= 1
    assert executor.stats().kv_cache_usage == 0


def test_a_request_may_fill_the_context_to_the_last_token(executor: OpenVINOExecutor, question: list[int]) -> None:
    length = executor.capacity.max_model_len
    prompt = (question * 100)[: length - 3]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    outputs = run(executor, EngineCoreRequest("r", prompt, sampling_params=params))["r"]
    assert len(tokens_of(outputs)) == 3
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def _steps_to_first_token(executor: OpenVINOExecutor, prompt: list[int]) -> int:
    executor.add_request(EngineCoreRequest("r", prompt, sampling_params=SamplingParams(temperature=0, max_tokens=2)))
    steps = 1
    while not executor.step():
        steps += 1
    _drain(executor)
    return steps


def test_prompts_are_computed_in_pieces_and_only_once(executor: OpenVINOExecutor, question: list[int]) -> None:
    prompt = [7, *question * 100][: 4 * CHUNK + 10]
    assert _steps_to_first_token(executor, prompt) == 5
    assert _steps_to_first_token(executor, prompt) == 1


def test_an_abort_in_the_middle_of_a_prompt_takes_effect_at_the_next_step(
    executor: OpenVINOExecutor, question: list[int]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    executor.add_request(EngineCoreRequest("long", [9, *question * 100][:600], sampling_params=params))
    executor.add_request(EngineCoreRequest("short", question, sampling_params=params))
    assert executor.step() == [], "both are still in their prompts: the long one came first"
    executor.abort_requests(["long"])
    rest = _drain(executor)
    assert Counter(output.request_id for output in rest) == {"short": 20}
    assert len(rest) == 20
    assert not executor.has_unfinished_requests()


def test_aborting_everything_frees_every_block(executor: OpenVINOExecutor, question: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    for i in range(4):
        executor.add_request(EngineCoreRequest(str(i), [i, *question * 100][:150], sampling_params=params))
    for _ in range(8):
        executor.step()
    executor.abort_requests(list("0123"))
    assert executor.step() == []
    full = EngineCoreRequest("full", (question * 100)[: executor.capacity.max_model_len - 1], sampling_params=params)
    assert len(tokens_of(run(executor, full)["full"])) == 1


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20


def test_sleeping_gives_memory_back_and_waking_up_gives_the_same_text(
    executor: OpenVINOExecutor, question: list[int]
) -> None:
    """One load covers level 2 and the prefix cache: it is empty afterwards."""
    before = generate(executor, question)
    prompt = [11, *question * 100][: 4 * CHUNK]
    assert _steps_to_first_token(executor, prompt) == 4
    executor.add_request(EngineCoreRequest("r", question, sampling_params=SamplingParams(max_tokens=8, min_tokens=8)))
    executor.step()
    assert executor.reset_prefix_cache() is False, "a running request holds some of it"
    awake = _resident_mb()
    executor.sleep(2)
    assert executor.is_sleeping
    assert awake - _resident_mb() > 100
    assert executor.step() == []
    executor.wake_up()
    assert sum(len(output.new_token_ids) for output in _drain(executor)) == 7
    assert generate(executor, question) == before
    assert _steps_to_first_token(executor, prompt) == 4


def test_an_openvino_model_folder_gives_the_same_text_as_the_gguf_file(
    executor: OpenVINOExecutor, model: Path, question: list[int], tmp_path: Path
) -> None:
    undisturbed = generate(executor, question)
    (tmp_path / "model.gguf").symlink_to(model)
    options = {"num_kv_blocks": 4, "properties": {"enable_save_ov_model": True}}  # writes it beside the GGUF file
    OpenVINOExecutor(EngineConfig.create(str(tmp_path / "model.gguf"), executor_options=options)).shutdown()
    config = {
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
        "max_position_embeddings": 8192, "vocab_size": 49152, "eos_token_id": EOS,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = OpenVINOExecutor(EngineConfig.create(str(tmp_path), executor_options={"num_kv_blocks": 4}))
    assert folder.capacity.max_model_len == 4 * 32
    assert generate(folder, question) == undisturbed
    folder.shutdown()


def _truncated(model: Path, path: Path) -> Path:
    with model.open("rb") as file:
        path.write_bytes(file.read(4 << 20))
    return path


def test_missing_cut_random_and_foreign_files_are_model_errors(model: Path, tmp_path: Path) -> None:
    random = tmp_path / "random.gguf"
    random.write_bytes(bytes(range(256)) * 64)
    for path, message in {
        tmp_path / "none.gguf": "no such file",
        _truncated(model, tmp_path / "cut.gguf"): "cut",
        random: "not a GGUF file",
        tmp_path: r"openvino_model\.xml",
    }.items():
        with pytest.raises(ModelError, match=message):
            OpenVINOExecutor(EngineConfig.create(str(path)))


def test_an_architecture_that_openvino_does_not_know_is_a_model_error(model: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.gguf"
    foreign.write_bytes(model.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(ModelError, match="OpenVINO cannot load it"):
        OpenVINOExecutor(EngineConfig.create(str(foreign)))


def test_a_context_longer_than_the_models_is_refused_before_loading(model: Path) -> None:
    with pytest.raises(ConfigError, match="8192"):
        OpenVINOExecutor(EngineConfig.create(str(model), max_model_len=8193))


def test_a_model_that_may_not_be_written_is_refused_with_the_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenVINO opens it for appending; what it says otherwise is that it cannot read the file."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ModelError, match="permission to read and write"):
        OpenVINOExecutor(EngineConfig.create(str(model)))
