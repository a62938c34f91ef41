"""The forward GEMMs of a training step of 1.5B on 8192 tokens, in variants, beside torch's."""

from gemm import Gemm, Pool, timing, torch_timing, verify

TOKENS = 8192
# The head has as many rows as a part of the logits.
SHAPES = [
    ("qkv", TOKENS, 2048, 1536),
    ("o", TOKENS, 1536, 1536),
    ("gate_up", TOKENS, 17920, 1536),
    ("down", TOKENS, 1536, 8960),
    ("head", 1766, 151936, 1536),
]
VARIANTS = [("bf16", t, 2, c, "VIRTUAL") for t in (96, 128, 160, 192) for c in (1, 2, 4) if t % (8 * c) == 0]

gemm, pool = Gemm(VARIANTS), Pool()
for v in VARIANTS:
    error, steady = verify(gemm, v, 700, 4608, 3584, False, True, None)
    print(f"{v[1:4]}: error {error:.1e}{'' if steady else ', NOT STEADY'}", flush=True)
for name, tokens, n, k in SHAPES:
    library = torch_timing(pool, "bf16", tokens, n, k)
    print(f"{name} {tokens}x{n}x{k}: torch {library:.1f} us (bf16 results)", flush=True)
    for v in VARIANTS:
        rate = lambda t: f"{t:7.1f} us {2 * tokens * n * k / t / 1e6:4.0f} TFLOP/s"
        text = rate(timing(gemm, pool, v, tokens, n, k))
        if name == "gate_up":
            text += f"; swiglu {rate(timing(gemm, pool, v, tokens, n, k, None, 1))}"
            text += f"; swiglu, kept {rate(timing(gemm, pool, v, tokens, n, k, None, 1, True))}"
        print(f"  {v[1]:3}/{v[2]}/{v[3]} {text}", flush=True)
