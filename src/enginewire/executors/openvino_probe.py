"""``GrammarProbe``: tries a constraint out on a model of nothing, so that an invalid one never reaches the real model.

OpenVINO GenAI compiles a grammar inside ``step()`` and offers no other way to do so. An exception there interrupts
every request. So the same library gets a second pipeline to trip over: one attention layer of zeros and a tokenizer of
the 256 bytes. It is made in 0.1 s, takes 15 MB, and answers in about a millisecond; compile time grows with the
vocabulary, so even 1,000 properties take 0.3 s here (with 49,152 tokens: 9 s).
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from enginewire.errors import InvalidRequestError
from enginewire.executors.openvino_grammar import Constraint
from enginewire.executors.openvino_pipeline import import_openvino
from enginewire.executors.openvino_signals import kept_signal_stack

_EOS: Final = 256
_VOCAB_SIZE: Final = 257
_WIDTH: Final = 32

_NOISE: Final = re.compile(r"^\[[\d:]+\] \S+:\d+: |Check failed: \(.*?\) is false: |^Check '.*?' failed at \S+:\d+:\s*")
"""Where in OpenVINO's sources a message comes from."""


class GrammarProbe:
    """A throw-away pipeline that runs the same grammar compiler as the real one.

    Raises:
        RuntimeError, OSError: it cannot be made (no temporary folder, or OpenVINO changed).
    """

    def __init__(self) -> None:
        genai, openvino = import_openvino()
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = 2
        scheduler.enable_prefix_caching = False
        with tempfile.TemporaryDirectory(prefix="enginewire-probe-") as folder:
            vocabulary = Path(folder) / "bytes.gguf"
            vocabulary.write_bytes(_byte_vocabulary())
            openvino.save_model(_model_of_nothing(openvino), Path(folder) / "openvino_model.xml")
            with kept_signal_stack():
                self._pipeline = genai.ContinuousBatchingPipeline(
                    folder, genai.Tokenizer(vocabulary), scheduler, "CPU", INFERENCE_NUM_THREADS=1
                )
        self._genai = genai
        self._prompt = openvino.Tensor(np.zeros((1, 1), dtype=np.int64))

    def check(self, constraint: Constraint) -> None:
        """Compile a constraint and sample one token under it.

        Raises:
            InvalidRequestError: it does not compile; says why.
        """
        config = self._genai.GenerationConfig(
            max_new_tokens=1,
            eos_token_id=_EOS,
            stop_token_ids={_EOS},
            structured_output_config=self._genai.StructuredOutputConfig(**{constraint.field: constraint.text}),
        )
        handle = self._pipeline.add_request(0, self._prompt, config)
        try:
            while self._pipeline.has_non_finished_requests():
                self._pipeline.step()
        except RuntimeError as exc:
            handle.cancel()
            self._pipeline.step()  # takes the cancelled request out, and is ready for the next
            reason = _NOISE.sub("", str(exc)).strip()
            raise InvalidRequestError(
                f"structured_outputs: the {constraint.field.replace('_', ' ')} is not valid: {reason}",
                parameter="structured_outputs",
            ) from exc


def _model_of_nothing(openvino: Any) -> Any:
    """Build the smallest model that OpenVINO takes for a language model: attention over zeros, with a KV cache."""
    opset6, opset13, types = openvino.opset6, openvino.opset13, openvino.Type

    def constant(value: object, dtype: type = np.int64) -> Any:
        return opset13.constant(np.asarray(value, dtype=dtype))

    def parameter(name: str, shape: list[int], dtype: Any) -> Any:
        node = opset13.parameter(shape, dtype, name=name)
        node.output(0).set_names({name})
        return node

    ids = parameter("input_ids", [-1, -1], types.i64)
    mask = parameter("attention_mask", [-1, -1], types.i64)
    positions = parameter("position_ids", [-1, -1], types.i64)
    beams = parameter("beam_idx", [-1], types.i32)

    indices = opset13.multiply(opset13.add(ids, positions), constant(0))
    hidden = opset13.gather(constant(np.zeros((1, _WIDTH)), np.float32), indices, constant(0))  # [batch, tokens, width]
    heads = opset13.unsqueeze(hidden, constant(1))  # [batch, 1 head, tokens, width]
    batch = opset13.gather(opset13.shape_of(ids), constant([0]), constant(0))
    empty = opset13.broadcast(constant(0, np.float32), opset13.concat([batch, constant([1, 0, _WIDTH])], 0))

    def cached(name: str) -> tuple[Any, Any]:
        past = opset6.read_value(empty, name, types.f32, openvino.PartialShape([-1, 1, -1, _WIDTH]))
        both = opset13.concat([opset13.gather(past, beams, constant(0)), heads], 2)
        return both, opset6.assign(both, name)

    (keys, keys_kept), (values, values_kept) = cached("keys"), cached("values")
    wide_mask = opset13.convert(opset13.unsqueeze(mask, constant([1, 2])), "f32")
    attended = opset13.scaled_dot_product_attention(heads, keys, values, wide_mask)
    merged = opset13.squeeze(opset13.transpose(attended, constant([0, 2, 1, 3])), constant([2]))
    logits = opset13.matmul(merged, constant(np.zeros((_WIDTH, _VOCAB_SIZE)), np.float32), False, False)
    logits.output(0).set_names({"logits"})
    return openvino.Model([opset13.result(logits)], [keys_kept, values_kept], [ids, mask, positions, beams], "nothing")


def _byte_vocabulary() -> bytes:
    """Write the header of a GGUF file whose tokens are the 256 bytes (in GPT-2's spelling) and an end token."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = (byte for byte in range(256) if byte not in shown)
    spelling = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokens = [spelling[byte] for byte in range(256)] + ["<eos>"]

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def array(kind: int, items: Iterable[bytes]) -> bytes:
        listed = list(items)
        return struct.pack("<IQ", kind, len(listed)) + b"".join(listed)

    u32, i32, text, many = 4, 5, 8, 9
    normal, control = 1, 3
    entries = [
        ("general.architecture", text, string("llama")),
        ("tokenizer.ggml.model", text, string("gpt2")),
        ("tokenizer.ggml.pre", text, string("default")),
        ("tokenizer.ggml.tokens", many, array(text, map(string, tokens))),
        ("tokenizer.ggml.token_type", many, array(i32, (struct.pack("<i", t) for t in [normal] * _EOS + [control]))),
        ("tokenizer.ggml.merges", many, array(text, [string("a b")])),
        *((f"tokenizer.ggml.{name}_token_id", u32, struct.pack("<I", _EOS)) for name in ("bos", "eos", "padding")),
    ]
    body = b"".join(string(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body
