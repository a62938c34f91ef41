"""Gradients of a forward pass with quantized weights, straight through the rounding: straight_through-FORMAT-CACHE.json
and .safetensors of the models named below.

    python straight_through.py

A plain PyTorch model of the same weights: linear layers round their weights and their inputs as the format says,
keys and values are rounded as the cache holds them, and gradients go through every rounding as through the identity.
A linear layer is differentiated at its weights and inputs as they were before rounding, as docs/math.md defines it
(dL/dx = dL/dy W and not dL/dy Q(W)); attention at the rounded keys and values. Nothing here shares code or structure
with the Rust side. The roundings are written from docs/formats.md. Weights are rounded in float32, as by the
kernels; everything else is computed in float64.

A number that lies between two values of eight bits may fall either way: sums in another order move it by a few 1e-7
of the largest of its row (by more where QK-norm has blown up a small head), and where it falls the other way it
moves by up to 1/16 of itself, takes later roundings with it, and gradients end up a few percent away. That would
hide an error of the same size. So sequences are drawn at random until each of their numbers lies AWAY times further
from such a place than float32 moves any number of its row: what is left between this and a right implementation is
the rounding of sums. (One key that falls the other way in bf16, by 1/256, can take so many of the next roundings in
fp8 with it that the gradient of the embedding is 4e-2 away.) Where activations are bf16, nothing is so steep, and
roundings to bf16 are left out of this: there are too many.
"""

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)
F8 = torch.float8_e4m3fn
AWAY = 8
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Models, formats, formats of keys and values, lengths of sequences.
CASES = [
    ("qwen2", "int8", "int8", [3, 5, 9, 8]),
    ("qwen3", "fp8", "fp8", [3, 5, 4, 5]),
    ("qwen3", "fp8", "bf16", [2, 3, 2, 3]),
    ("llama3", "int4", "bf16", [3, 15, 9]),
    ("qwen2-untied", "nvfp4", "bf16", [3, 15, 9]),
]


# What was rounded on the way, in units of the scales, and the largest of a row; bf16 in units of that.
ROUNDED = []


def near(exact, single):
    """Whether a number is close to the middle between two values, of what two passes have rounded."""
    for (v, largest), (w, _) in zip(exact, single):
        v, w = v.abs(), w.abs().double()
        step = torch.ones_like(v)
        if largest == 448.0:
            step = 2.0 ** (v.clamp(min=2.0**-6).log2().floor() - 3)
        if largest == 1.0:
            step = 2.0 ** (v.log2().floor() - 7)
        distance = ((v / step) % 1 - 0.5).abs() * step
        noise = (v - w).abs().amax(-1, keepdim=True) + 1e-7 * (v.amax(-1, keepdim=True) if largest == 1.0 else largest)
        if (distance < AWAY * noise).any():
            return True
    return False


def straight(x, rounded):
    return x + (rounded - x).detach()


def safe(absmax):
    return torch.where(absmax < 2.0**-100, torch.ones_like(absmax), absmax)


def codes(x, largest, scale):
    """round(x * (1 / scale)) in int8 or E4M3, times the scale."""
    v = x * (1.0 / scale)
    v = v.round().clamp(-127, 127) if largest == 127.0 else v.float().clamp(-448, 448).to(F8).to(x.dtype)
    return v * scale


def rows(x, largest):
    scale = safe(x.abs().amax(-1, keepdim=True)) / largest
    return codes(x, largest, scale)


def weights(w, form, fused):
    if form == "int8":
        return rows(w, 127.0)
    if form == "fp8":
        return rows(w, 448.0)
    n, k = w.shape
    if form == "int4":
        groups = [w[:, i : i + 128] for i in range(0, k, 128)]
        out = []
        for g in groups:
            scale = safe(g.abs().amax(-1, keepdim=True)) / 7.0
            out.append((g * (1.0 / scale)).round().clamp(-7, 7) * scale)
        return torch.cat(out, -1)
    assert form == "nvfp4"
    return nvfp4(w, fused)


def nvfp4(w, fused):
    n, k = w.shape
    whole = safe(max(part.abs().max() for part in fused)) / (6.0 * 448.0)
    padded = torch.nn.functional.pad(w, (0, -k % 16)).view(n, -1, 16)
    group = (padded.abs().amax(-1, keepdim=True) / 6.0) / whole
    scale = group.to(F8).float() * whole
    v = padded * torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))
    magnitude = v.abs().clamp(max=6.0)
    # Nearest, ties to the even code.
    distance = (magnitude.unsqueeze(-1) - E2M1).abs()
    best = distance.min(-1, keepdim=True).values
    tied = distance == best
    even = torch.arange(8) % 2 == 0
    score = tied.float() + (tied & even).float()
    q = E2M1[score.argmax(-1)] * v.sign()
    return (q * scale).view(n, -1)[:, :k]


def bf16(x):
    return x.bfloat16().to(x.dtype)


class Straight(torch.autograd.Function):
    """The product of rounded inputs and weights, differentiated at those that were not rounded."""

    @staticmethod
    def forward(ctx, x, w, xq, wq):
        ctx.save_for_backward(x, w)
        return xq @ wq.T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.T @ x, None, None


def linear(x, w, bias, form, fused=None):
    """`fused` are the matrices that lie in one with w: they share a scale of the whole matrix."""
    if form == "full":
        return x @ w.T if bias is None else x @ w.T + bias
    whole = [part.detach().float() for part in fused or [w]]
    wq = weights(w.detach().float(), form, whole).to(w.dtype)
    largest = {"int8": 127.0, "fp8": 448.0}.get(form)
    if largest:
        ROUNDED.append((x.detach() / safe(x.detach().abs().amax(-1, keepdim=True)) * largest, largest))
    xq = rows(x.detach(), largest) if largest else bf16(x.detach())
    y = Straight.apply(x, w, xq, wq)
    return y if bias is None else y + bias


def cached(x, form, steep):
    """One head of one token; scales are rounded up to sixteen significant bits."""
    if form == "full":
        return x
    if form == "bf16":
        if steep:
            ROUNDED.append((x.detach(), 1.0))
        return straight(x, bf16(x.detach()))
    largest = {"int8": 127.0, "fp8": 448.0}[form]
    scale = safe(x.detach().abs().amax(-1, keepdim=True)) / largest
    bits = scale.float().contiguous().view(torch.int32)
    scale = ((bits + 0xFF) & ~0xFF).view(torch.float32).to(x.dtype)
    ROUNDED.append((x.detach() / scale, largest))
    return straight(x, codes(x.detach(), largest, scale))


def norm(x, gain, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def rope(x, config):
    d = x.shape[-1]
    parameters = config["rope_parameters"]
    inverse = parameters["rope_theta"] ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    if parameters["rope_type"] == "llama3":
        factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        wavelength = 2 * torch.pi / inverse
        blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        inverse = (1 - blend) * inverse / factor + blend * inverse
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * inverse
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def logprobs(p, config, ids, form, kv):
    """Log-probs of ids[1:]; the head is in full, as the engine has it in this test."""
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    x = p["model.embed_tokens.weight"][ids]
    steps = len(ids)
    for layer in range(config["num_hidden_layers"]):
        at = lambda name: p[f"model.layers.{layer}.{name}.weight"]
        bias = lambda name: p.get(f"model.layers.{layer}.{name}.bias")
        h = norm(x, at("input_layernorm"), eps)

        def split(name, count):
            name = f"self_attn.{name}"
            fused = [at(f"self_attn.{part}_proj") for part in "qkv"]
            return linear(h, at(name), bias(name), form, fused).view(steps, count, d).transpose(0, 1)

        q, k, v = split("q_proj", heads), split("k_proj", kv_heads), split("v_proj", kv_heads)
        if config["model_type"] == "qwen3":
            q, k = norm(q, at("self_attn.q_norm"), eps), norm(k, at("self_attn.k_norm"), eps)
        steep = form in ("int8", "fp8")
        q, k = rope(q, config), cached(rope(k, config), kv, steep)
        v = cached(v, kv, steep)
        k, v = (y.repeat_interleave(heads // kv_heads, 0) for y in (k, v))
        scores = q @ k.transpose(1, 2) / d**0.5
        scores = scores.masked_fill(torch.ones(steps, steps).triu(1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(steps, heads * d)
        x = x + linear(out, at("self_attn.o_proj"), None, form)
        h = norm(x, at("post_attention_layernorm"), eps)
        fused = [at(f"mlp.{part}_proj") for part in ("gate", "up")]
        gate, up = (linear(h, w, None, form, fused) for w in fused)
        x = x + linear(torch.nn.functional.silu(gate) * up, at("mlp.down_proj"), None, form)
    x = norm(x, p["model.norm.weight"], eps)
    head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    return (x @ head.T).log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def rounded(p, config, ids, form, kv):
    ROUNDED.clear()
    with torch.no_grad():
        logprobs(p, config, ids, form, kv)
    return list(ROUNDED)


def sequence(length, p, config, form, kv, random):
    """Ids of a sequence in which no rounding is near; and how many were drawn."""
    single = {key: value.detach().float() for key, value in p.items()}
    for drawn in itertools.count(1):
        ids = torch.randint(config["vocab_size"], (length,), generator=random).tolist()
        if not near(*(rounded(weights, config, ids, form, kv) for weights in (p, single))):
            return ids, drawn


def main():
    for name, form, kv, lengths in CASES:
        folder = HERE / name
        config = json.loads((folder / "config.json").read_text())
        config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.get("rope_theta")})
        weights = load_file(folder / "model.safetensors")
        p = {key: value.double().requires_grad_() for key, value in weights.items()}
        random = torch.Generator().manual_seed(1)
        sequences, loss, tried = [], 0.0, 0
        for length in lengths:
            ids, drawn = sequence(length, p, config, form, kv, random)
            logp = logprobs(p, config, ids, form, kv)
            g = torch.randn(length - 1, generator=random)
            loss = loss + (g.double() * logp).sum()
            tried += drawn
            sequences.append({"ids": ids, "g": g.tolist(), "logprobs": logp.tolist()})
        loss.backward()
        gradients = {key: value.grad for key, value in p.items() if value.grad is not None}
        plain = {key: value.double().requires_grad_() for key, value in weights.items()}
        full = sum(
            (torch.tensor(s["g"]).double() * logprobs(plain, config, s["ids"], "full", "full")).sum()
            for s in sequences
        )
        full.backward()
        distance = {
            key: float((gradients[key] - plain[key].grad).norm() / plain[key].grad.norm()) for key in gradients
        }
        nearest, furthest = min(distance.values()), max(distance.values())
        print(f"{name} {form} kv {kv}: {tried} sequences drawn for {len(sequences)}; gradients are {nearest:.3f} to "
              f"{furthest:.3f} of their norm away from those without rounding")
        file = folder / f"straight_through-{form}-{kv}"
        save_file({key: g.float() for key, g in gradients.items()}, file.with_suffix(".safetensors"))
        text = {"format": form, "kv_cache": kv, "sequences": sequences}
        file.with_suffix(".json").write_text(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
