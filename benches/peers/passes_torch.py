"""Forward passes and training steps with transformers on a GPU, beside ours: Qwen2.5's shapes, random
weights, bf16, fused attention (SDPA), compiled blocks.

`python3 passes_torch.py [SHAPE] [forward|train:BATCHxLENGTH ...]` prints tokens/s. A forward pass gives the
log-prob of every next token; a training step adds backward and fused AdamW with weights, gradients and
moments in bf16, which is less work than ours with f32. The head goes 2,048 tokens at a time, since logits of
a whole batch would not fit; `train` keeps all activations and computes blocks again (checkpointing) where it
does not fit otherwise.
"""

import sys
import time

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

# hidden, intermediate, layers, heads, key-value heads, tied head
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, True),
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18_944, 28, 28, 4, False),
}
CASES = ["forward:8x4096", "forward:2x16384", "train:8x1024", "train:8x4096", "train:2x16384"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHUNK = 2048


def model_of(shape):
    hidden, wide, layers, heads, kv_heads, tied = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=512 if shape == "tiny" else 151_936,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config).bfloat16()
    if DEVICE == "cuda":
        for layer in model.model.layers:
            layer.compile()
    return model


def chunk_logprobs(hidden, head, targets):
    """[tokens] log-probs of the targets, of hidden rows [tokens, d]."""
    return -F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="none")


def logprobs(model, ids, again):
    """Of every next token; with `again` the head's logits are made once more on the way back."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1].flatten(0, 1)
    targets, head, parts = ids[:, 1:].flatten(), model.lm_head.weight, []
    for rows, wanted in zip(hidden.split(CHUNK), targets.split(CHUNK)):
        parts.append(
            torch.utils.checkpoint.checkpoint(chunk_logprobs, rows, head, wanted, use_reentrant=False)
            if again
            else chunk_logprobs(rows, head, wanted)
        )
    return torch.cat(parts)


def seconds_of(work, rounds=5):
    """The median of several, after two that compile and warm up."""
    times = []
    for round in range(rounds + 2):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if round >= 2:
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def forward(model, ids):
    with torch.no_grad():
        return seconds_of(lambda: logprobs(model, ids, False))


def train(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=DEVICE == "cuda")

    def step():
        (-logprobs(model, ids, True).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return seconds_of(step)


def main():
    shape, *cases = sys.argv[1:] or ["1.5b"]
    torch.manual_seed(0)
    model = model_of(shape)
    for case in cases or CASES:
        what, size = case.split(":")
        batch, length = map(int, size.split("x"))
        ids = torch.randint(model.config.vocab_size, (batch, length), device=DEVICE)
        note = ""
        model.gradient_checkpointing_disable()
        model.train(what == "train")
        try:
            seconds = forward(model, ids) if what == "forward" else train(model, ids)
        except torch.OutOfMemoryError:
            note = " (blocks computed again)"
            torch.cuda.empty_cache()
            model.zero_grad(set_to_none=True)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            seconds = train(model, ids)
        peak = f", peak {torch.cuda.max_memory_allocated() >> 20} MiB" if DEVICE == "cuda" else ""
        print(f"{what:7} {shape} {size:8} {batch * length / seconds:9.0f} tokens/s{note}{peak}", flush=True)


if __name__ == "__main__":
    main()
