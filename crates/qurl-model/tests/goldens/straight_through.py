"""Gradients of a forward pass with quantized weights, straight through the rounding: straight-through.safetensors and
straight-through.json of the models named below.

    python straight_through.py

A plain PyTorch model of the same weights, in float32: linear layers round their weights and their inputs as the
format says, keys and values are rounded as the cache holds them, and autograd goes through every rounding as
through the identity, to weights and inputs as they were before it (x + (rounded(x) - x).detach()). Nothing
here shares code or structure with the Rust side. The roundings are written from docs/formats.md.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
torch.set_num_threads(1)
F8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
CASES = [
    ("qwen2", "int8", "int8"),
    ("qwen3", "fp8", "bf16"),
    ("llama3", "int4", "bf16"),
    ("qwen2-untied", "nvfp4", "fp8"),
]


def straight(x, rounded):
    return x + (rounded - x).detach()


def safe(absmax):
    return torch.where(absmax < 2.0**-100, torch.ones_like(absmax), absmax)


def codes(x, largest, scale):
    """round(x * (1 / scale)) in int8 or E4M3, times the scale."""
    v = x * (1.0 / scale)
    v = v.round().clamp(-127, 127) if largest == 127.0 else v.clamp(-448, 448).to(F8).float()
    return v * scale


def rows(x, largest):
    return codes(x, largest, safe(x.abs().amax(-1, keepdim=True)) / largest)


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
    return x.bfloat16().float()


def linear(x, w, bias, form, fused=None):
    """`fused` are the matrices that lie in one with w: they share a scale of the whole matrix."""
    wq = straight(w, weights(w.detach(), form, [part.detach() for part in fused or [w]]))
    largest = {"int8": 127.0, "fp8": 448.0}.get(form)
    xq = straight(x, rows(x.detach(), largest) if largest else bf16(x.detach()))
    y = xq @ wq.T
    return y if bias is None else y + bias


def cached(x, form):
    """One head of one token; scales are rounded up to sixteen significant bits."""
    if form == "bf16":
        return straight(x, bf16(x.detach()))
    largest = {"int8": 127.0, "fp8": 448.0}[form]
    scale = safe(x.detach().abs().amax(-1, keepdim=True)) / largest
    bits = scale.contiguous().view(torch.int32)
    scale = ((bits + 0xFF) & ~0xFF).view(torch.float32)
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
    cos, sin = angles.cos().float(), angles.sin().float()
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
        q, k = rope(q, config), cached(rope(k, config), kv)
        v = cached(v, kv)
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


def main():
    for name, form, kv in CASES:
        folder = HERE / name
        config = json.loads((folder / "config.json").read_text())
        config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.get("rope_theta")})
        p = {key: value.float().requires_grad_() for key, value in load_file(folder / "model.safetensors").items()}
        golden = json.loads((folder / "golden.json").read_text())
        scoring = golden["scorings"][0]
        scored = []
        loss = 0.0
        for ids, sequence in zip(golden["ids"], scoring["sequences"]):
            logp = logprobs(p, config, ids, form, kv)
            g = torch.tensor(sequence["g"])[-len(logp) :]
            loss = loss + (g * logp).sum()
            scored.append([round(x, 7) for x in logp.tolist()])
        loss.backward()
        gradients = {key: value.grad for key, value in p.items() if value.grad is not None}
        full = load_file(folder / scoring["gradients"])
        distance = max(
            float((gradients[key] - full[key]).norm() / full[key].norm()) for key in gradients if key in full
        )
        print(f"{name} {form} kv {kv}: furthest gradient from that in full precision {distance:.3f}")
        save_file(gradients, folder / "straight_through.safetensors")
        text = {"format": form, "kv_cache": kv, "logprobs": scored}
        (folder / "straight_through.json").write_text(json.dumps(text) + "\n")


if __name__ == "__main__":
    main()
