"""PyTorch's training speed on the model of `qurl bench train`.

    python train_torch.py --variant f32-sdpa --steps 8 --json

A Llama-style model of 5,082,368 parameters (width 256, 6 layers, 4 heads, SwiGLU of 704,
512 tokens, untied head, no biases). One step is 16 sequences of 256 tokens: forward,
cross-entropy on every next token, backward, clipping to norm 1 and an AdamW update. The
model is written as a PyTorch user who cares for speed would write it: library kernels for
norm, attention and loss, q/k/v and gate/up as one GEMM each, the fused AdamW.

Variants
    f32-eager      attention written out: scores, mask, softmax, matmul
    f32-sdpa       scaled_dot_product_attention
    bf16-autocast  f32 weights, matmuls in bf16 by autocast, sdpa
    bf16-pure      weights, gradients and moments all in bf16, sdpa: about as fast as
                   autocast, but small updates are lost to rounding
`--compile` runs the variant through torch.compile, which needs a C++ compiler.
"""

import argparse
import json
import math
import resource
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, INNER = 512, 256, 6, 4, 704
PARAMETERS = 5_082_368
VARIANTS = ("f32-eager", "f32-sdpa", "bf16-autocast", "bf16-pure")


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Block(nn.Module):
    def __init__(self, eager):
        super().__init__()
        self.eager = eager
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner_norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate_up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def attend(self, x, cos, sin, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.eager:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))

    def forward(self, x, cos, sin, mask):
        x = x + self.attend(self.attention_norm(x), cos, sin, mask)
        gate, up = self.gate_up(self.inner_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, eager, length):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(eager) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        size = WIDTH // HEADS
        speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(length), speeds).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        mask = torch.full((length, length), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))


def measure(options):
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    model = Model(options.variant == "f32-eager", options.length)
    count = sum(p.numel() for p in model.parameters())
    assert count == PARAMETERS, f"the model has {count} parameters, not {PARAMETERS}"
    if options.variant == "bf16-pure":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    parameters = list(model.parameters())
    forward = torch.compile(model) if options.compile else model
    ids = torch.randint(VOCABULARY, (options.batch, options.length + 1))
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.variant == "bf16-autocast"):
            loss = forward(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    first = step()
    for _ in range(options.warmup - 1):
        step()
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        last = step()
        seconds.append(time.perf_counter() - start)
    # The same batch every time: a model that does not learn it is not training.
    assert last < first, f"the loss went from {first} to {last}"

    tokens = options.batch * options.length
    return {
        "case": "train",
        "variant": options.variant + ("-compiled" if options.compile else ""),
        "format": options.variant.split("-")[0],
        "batch": options.batch,
        "tokens_per_s": tokens / statistics.median(seconds),
        "fastest_tokens_per_s": tokens / min(seconds),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "first_loss": first,
        "last_loss": last,
        "steps": options.steps,
        "threads": options.threads,
        "torch": torch.__version__,
    }


def main():
    parser = argparse.ArgumentParser(
        description="PyTorch's training speed on the model of `qurl bench train`"
    )
    parser.add_argument("--variant", choices=VARIANTS, default="f32-sdpa")
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before measuring")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if options.steps < 1 or options.warmup < 1:
        parser.error("--steps and --warmup must be at least 1")
    result = measure(options)
    if options.json:
        json.dump({"results": [result]}, sys.stdout)
        print()
    else:
        print(
            f"{result['variant']}: {result['tokens_per_s']:,.0f} tokens/s, "
            f"peak {result['peak_rss_mb']:,.0f} MB, "
            f"loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}"
        )


if __name__ == "__main__":
    main()
