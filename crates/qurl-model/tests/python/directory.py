"""Model directories as transformers sees them.

directory.py read DIR [score]         load DIR and print what was loaded
directory.py make DIR FAMILY DTYPE    write a random model in several shards and print it

Prints one JSON object: the configuration, and per tensor its shape and a checksum of its f32 bits
(sum of (index + 1) * bits modulo 2^64), which changes with every bit and with every exchange of two.
"""

import json
import sys

import numpy as np
import torch
import transformers


def checksum(tensor):
    bits = tensor.detach().float().contiguous().numpy().view(np.uint32).reshape(-1).astype(np.uint64)
    with np.errstate(over="ignore"):
        return str(int((bits * np.arange(1, bits.size + 1, dtype=np.uint64)).sum(dtype=np.uint64)))


def describe(model):
    tensors = {
        name: {"shape": list(tensor.shape), "checksum": checksum(tensor)}
        for name, tensor in model.state_dict().items()
    }
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        output = model(ids).logits
    print(json.dumps({"config": model.config.to_dict(), "tensors": tensors, "output": list(output.shape)}))


def read(path, kind="lm"):
    auto = transformers.AutoModelForCausalLM
    if kind == "score":
        auto = transformers.AutoModelForSequenceClassification
    model, info = auto.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["mismatched_keys"], info
    describe(model.eval())


def make(path, family, dtype):
    common = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    config = {
        "qwen2": lambda: transformers.Qwen2Config(**common, tie_word_embeddings=True),
        "qwen3": lambda: transformers.Qwen3Config(**common, head_dim=8),
        "llama": lambda: transformers.LlamaConfig(**common, rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
        "mistral": lambda: transformers.MistralConfig(**common, sliding_window=None),
    }[family]()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    model.save_pretrained(path, max_shard_size="4KB")
    describe(model.float().eval())


if __name__ == "__main__":
    {"read": read, "make": make}[sys.argv[1]](*sys.argv[2:])
