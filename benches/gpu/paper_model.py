"""A model directory of a published shape with random weights and a real tokenizer, to start the paper's
recipes on.

    python benches/gpu/paper_model.py SHAPE TOKENIZER OUT

SHAPE is one of the three below; TOKENIZER holds Qwen2's vocab.json and merges.txt. Weights are N(0, 0.02),
gains 1, biases 0, in bf16: what such a model writes is noise, but sizes, memory and time are those of the
real one.
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

COMMON = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
SHAPES = {
    "Qwen2.5-0.5B-Instruct": dict(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "DeepSeek-R1-Distill-Qwen-1.5B": dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=131072,
        rope_theta=1e4,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-Math-7B": dict(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=4096,
        rope_theta=1e4,
        tie_word_embeddings=False,
    ),
}
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(source: pathlib.Path, out: pathlib.Path) -> None:
    tokenizer = Tokenizer(BPE.from_file(str(source / "vocab.json"), str(source / "merges.txt")))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    shape, source, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    c = SHAPES[shape] | COMMON | {"bos_token_id": 151643, "eos_token_id": 151645}
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(source, out)
    (out / "config.json").write_text(json.dumps(c, indent=1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(1)
    d, f, layers, vocab = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["vocab_size"]
    kv = d // c["num_attention_heads"] * c["num_key_value_heads"]

    def matrix(rows, columns):
        weights = torch.randn(rows, columns, generator=generator, device=device) * 0.02
        return weights.to(torch.bfloat16).cpu()

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, d),
        "model.norm.weight": torch.ones(d, dtype=torch.bfloat16),
    }
    if not c["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, d)
    for i in range(layers):
        name = f"model.layers.{i}."
        for norm in ["input_layernorm", "post_attention_layernorm"]:
            tensors[f"{name}{norm}.weight"] = torch.ones(d, dtype=torch.bfloat16)
        for projection, rows in [("q", d), ("k", kv), ("v", kv)]:
            tensors[f"{name}self_attn.{projection}_proj.weight"] = matrix(rows, d)
            tensors[f"{name}self_attn.{projection}_proj.bias"] = torch.zeros(rows, dtype=torch.bfloat16)
        tensors[f"{name}self_attn.o_proj.weight"] = matrix(d, d)
        for projection, rows, columns in [("gate", f, d), ("up", f, d), ("down", d, f)]:
            tensors[f"{name}mlp.{projection}_proj.weight"] = matrix(rows, columns)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    print(f"{shape}: {sum(t.numel() for t in tensors.values())} parameters")


if __name__ == "__main__":
    main()
