"""Unpack a Llama-family GGUF into a Hugging Face folder in bfloat16, which vLLM can load.

Runs in a vLLM environment: ``DIR/bin/python gguf_to_hf.py MODEL.gguf OUT``.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf, out = Path(sys.argv[1]), sys.argv[2]
source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
quantised = AutoModelForCausalLM.from_pretrained(**source)
settings = quantised.config.to_dict()
settings.pop("quantization_config", None)
model = LlamaForCausalLM(LlamaConfig(**settings))
model.load_state_dict(quantised.state_dict())
model.to(torch.bfloat16).save_pretrained(out)
AutoTokenizer.from_pretrained(**source).save_pretrained(out)
