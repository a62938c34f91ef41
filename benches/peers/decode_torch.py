"""Decoding with PyTorch, done well, beside ours on the same device: compiled blocks, one CUDA graph for a
step, a static cache.

`python3 decode_torch.py [shape,batch[,context] ...]` prints tokens/s of Qwen2.5's shapes with random weights
in bf16, sampling at temperature 1 included. Without a context: prompts of 128 tokens, 256 new ones, as
`qurl bench rollout --prompt 128 --new 256` has them. With one: steps at this context, as
`qurl bench rollout --context N`; attention is then SDPA with the heads of a group as queries, so that keys
and values are read once.
"""

import sys
import time

import torch
import torch.nn.functional as F

# hidden, intermediate, layers, heads, key-value heads, head dimension, vocabulary
SHAPES = {
    "0.5b": (896, 4864, 24, 14, 2, 64, 151_936),
    "1.5b": (1536, 8960, 28, 12, 2, 128, 151_936),
    "7b": (3584, 18_944, 28, 28, 4, 128, 152_064),
    "32b": (5120, 27_648, 64, 40, 8, 128, 152_064),
}
PROMPT, NEW = 128, 256
LENGTH = PROMPT + NEW


def normed(x, gain):
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * gain


def rotated(x, cos, sin):
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@torch.compile(dynamic=False, fullgraph=True)
def block(x, w, bias, keys, values, position, cos, sin, heads, kv_heads, hd):
    """One block for one new token of every sequence: x [batch, hidden]; keys, values
    [batch, kv_heads, length, hd]."""
    qkv_w, o_w, gate_up_w, down_w, gain1, gain2 = w
    batch = x.shape[0]
    qkv = F.linear(normed(x, gain1), qkv_w, bias).view(batch, heads + 2 * kv_heads, hd)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    c, s = cos[position], sin[position]
    keys.index_copy_(2, position, rotated(k, c, s).unsqueeze(2))
    values.index_copy_(2, position, v.unsqueeze(2))
    q = rotated(q, c, s).reshape(batch, kv_heads, heads // kv_heads, hd)
    length = keys.shape[2]
    if length > LENGTH:
        attended = F.scaled_dot_product_attention(q, keys, values).reshape(batch, heads * hd)
    else:
        scores = (q @ keys.transpose(2, 3)).float() * hd**-0.5
        scores = scores.masked_fill(torch.arange(length, device=x.device) > position, float("-inf"))
        attended = (scores.softmax(-1).bfloat16() @ values).reshape(batch, heads * hd)
    x = x + F.linear(attended, o_w)
    gate, up = F.linear(normed(x, gain2), gate_up_w).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down_w)


@torch.compile(dynamic=False, fullgraph=True)
def sampled(x, gain, head):
    logits = F.linear(normed(x, gain), head).float()
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-20, 1.0)).clamp(min=1e-20))
    token = (logits + noise).argmax(-1)
    return token, logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)


@torch.inference_mode()
def tokens_per_second(shape, batch, context=None):
    length, new = context or LENGTH, 16 if context else NEW
    hidden, inner, layers, heads, kv_heads, hd, vocabulary = SHAPES[shape]
    random = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16) * 0.02
    width = (heads + 2 * kv_heads) * hd
    ones = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    matrices = [(width, hidden), (hidden, heads * hd), (2 * inner, hidden), (hidden, inner)]
    weights = [(*(random(*shape) for shape in matrices), ones, ones) for _ in range(layers)]
    biases = [random(width) for _ in range(layers)]
    caches = [[random(batch, kv_heads, length, hd) for _ in range(2)] for _ in range(layers)]
    embedding, head = random(vocabulary, hidden), random(vocabulary, hidden)
    frequencies = 1e6 ** (torch.arange(hd // 2, device="cuda") * -2 / hd)
    angles = torch.arange(length, device="cuda")[:, None] * frequencies
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    token = torch.randint(vocabulary, (batch,), device="cuda")
    position = torch.zeros(1, dtype=torch.long, device="cuda")

    def step():
        x = embedding[token]
        for w, bias, (keys, values) in zip(weights, biases, caches):
            x = block(x, w, bias, keys, values, position, cos, sin, heads, kv_heads, hd)
        next_token, log_probs = sampled(x, ones, head)
        token.copy_(next_token)
        if context is None:
            position.add_(1)
        return log_probs

    # What was made on the default stream must be there before another one uses it.
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    rates = []
    for _ in range(3):
        position.fill_(context - 1 if context else PROMPT)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(new):
            graph.replay()
            token.tolist()  # the ids are needed on the host, as by an engine
        rates.append(batch * new / (time.perf_counter() - began))
    return rates


def main():
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)
    for case in sys.argv[1:] or ("0.5b,256", "7b,64", "7b,256", "32b,64"):
        shape, *numbers = case.split(",")
        began = time.time()
        rates = ", ".join(f"{rate:.0f}" for rate in tokens_per_second(shape, *map(int, numbers)))
        seconds = time.time() - began
        print(f"{case}: bf16 {rates} tokens/s ({seconds:.0f} s with compiling)", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
