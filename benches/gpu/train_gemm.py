"""The forward GEMMs of a training step of 1.5B on 8192 tokens, in variants, beside torch's."""

import torch

from gemm import Gemm, Pool, operands, timing, torch_timing, verify

TOKENS = 8192
# The head has as many rows as a part of the logits.
SHAPES = [
    ("qkv", TOKENS, 2048, 1536),
    ("o", TOKENS, 1536, 1536),
    ("gate_up", TOKENS, 17920, 1536),
    ("down", TOKENS, 1536, 8960),
    ("head", 1766, 151936, 1536),
]
VARIANTS = [("bf16", t, 2, c, s) for s in ("VIRTUAL", "BULK") for t in (128, 192) for c in (1, 2)]


def same_bits(gemm, v, other, tokens, n, k, bias, add, swiglu=0, keeps=False):
    """Whether two variants give the same bits."""
    x, w, _, _ = operands("bf16", tokens, n, k)
    b = torch.randn(n, device="cuda") if bias else None
    tiles, outs = gemm.pack(w * 0.02), []
    for one in (v, other):
        torch.manual_seed(5)
        kind = torch.bfloat16 if swiglu else torch.float32
        out = torch.randn(tokens, n // 2 if swiglu else n, device="cuda").to(kind)
        kept = torch.zeros(tokens, n, dtype=torch.bfloat16, device="cuda") if keeps else None
        gemm.run(one, x, tiles, n, out, None, None, b, int(add), swiglu=swiglu, kept=kept)
        outs += [out] + ([kept] if keeps else [])
    torch.cuda.synchronize()
    half = len(outs) // 2
    return all(torch.equal(a, b) for a, b in zip(outs[:half], outs[half:]))


gemm, pool = Gemm(VARIANTS), Pool()
for v in VARIANTS:
    error, steady = verify(gemm, v, 700, 4608, 3584, False, True, None)
    print(f"{v[1:]}: error {error:.1e}{'' if steady else ', NOT STEADY'}", flush=True)
for v in VARIANTS:
    other = (*v[:4], "VIRTUAL")
    if v == other:
        continue
    cases = [
        (tokens, n, k) for tokens in (129, 700, 1766) for n, k in ((2048, 1536), (1536, 8960), (1092, 192))
    ]
    plain = [
        same_bits(gemm, v, other, *case, bias, add) for case in cases for bias in (0, 1) for add in (0, 1)
    ]
    gated = [
        same_bits(gemm, v, other, t, 17920, 1536, 0, 0, 1, keeps) for t in (129, 1766) for keeps in (0, 1)
    ]
    print(
        f"{v[1:]}: bits of VIRTUAL in {sum(plain)} of {len(plain)}, gated {sum(gated)} of {len(gated)}",
        flush=True,
    )
for name, tokens, n, k in SHAPES:
    library = torch_timing(pool, "bf16", tokens, n, k)
    print(f"{name} {tokens}x{n}x{k}: torch {library:.1f} us (bf16 results)", flush=True)
    for v in VARIANTS:
        rate = lambda t: f"{t:7.1f} us {2 * tokens * n * k / t / 1e6:4.0f} TFLOP/s"
        text = rate(timing(gemm, pool, v, tokens, n, k))
        if name == "gate_up":
            text += f"; swiglu {rate(timing(gemm, pool, v, tokens, n, k, None, 1))}"
            text += f"; swiglu, kept {rate(timing(gemm, pool, v, tokens, n, k, None, 1, True))}"
        print(f"  {v[1]:3}/{v[2]}/{v[3]} {v[4]:7} {text}", flush=True)
