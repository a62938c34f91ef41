"""All CUDA kernels with tensor cores: checks first, then times beside the limits and beside torch's
libraries."""

import sys
import time

import torch

import flash as attention
import gemm as gemms

begin = time.time()
say = lambda text: print(f"[{time.time() - begin:5.1f}s] {text}", flush=True)
torch.manual_seed(int(time.time()))
gemm = gemms.Gemm([v for f in gemms.FORMATS for v in gemms.variants(f)], say)
say(f"compiled {len(gemm.kernels)} GEMMs")
good = True
for v in gemm.kernels:
    if v[4] == "GATED":
        worst = max(
            gemms.verify_swiglu(gemm, v, tokens, n, k)
            for tokens, n, k in ((256, 9728, 896), (201, 1408, 3584), (130, 640, 128))
        )
        good &= worst <= 1e-6
        say(f"gemm {v}: error {worst:.1e} {'ok' if worst <= 1e-6 else 'WRONG'}")
        continue
    found = []
    for tokens, n, k, bias, add in (
        (v[1], 896, 896, False, False),
        (v[1] - 5, 1000, 1184, True, True),
        (max(1, v[1] // 2 - 3), 510, 4864, True, False),
        (v[1] if v[4] == "STREAM" else 700, 4608, 3584, False, True),
    ):
        found.append(gemms.verify(gemm, v, tokens, n, k, bias, add))
    worst, steady = max(e for e, _ in found), all(s for _, s in found)
    fine = steady and worst <= {"int8": 0, "bf16": 1e-5, "fp8": 1e-3}[v[0]]
    good &= fine
    say(f"gemm {v}: error {worst:.1e} {'ok' if fine else 'WRONG'}")
for f in ("bf16", "fp8"):
    small = (f, 16, 2, 1, "STREAM")
    for v in gemms.variants(f)[1:]:
        same = all(gemms.invariance(gemm, small, v, n, k) for n, k in ((4608, 3584), (896, 4864)))
        good &= same
        if not same:
            say(f"bits of {v} differ from {small}: WRONG")
say(f"GEMMs {'right, bits do not depend on the number of rows' if good else 'WRONG'}")
wrong = not good
pool = gemms.Pool()
for model in gemms.SHAPES:
    for tokens in (16, 64, 128, 256):
        for f in gemms.FORMATS:
            times, libraries, names = [], [], []
            for name, n, k in gemms.SHAPES[model]:
                v = gemms.choose(f, tokens, n, k * gemms.FORMATS[f][1])
                times.append(gemms.timing(gemm, pool, v, tokens, n, k))
                names.append("/".join(str(x) for x in v[1:4]) + v[4][0])
                if tokens > 16:
                    libraries.append(gemms.torch_timing(pool, f, tokens, n, k))
            size = sum(n * k for _, n, k in gemms.SHAPES[model]) * gemms.FORMATS[f][1]
            each = " ".join(f"{t:.1f} ({name})" for t, name in zip(times, names))
            say(
                f"{model} {tokens} {f}: {sum(times):.1f} us {size / sum(times) / 1e6:.2f} TB/s, "
                f"torch {sum(libraries):.1f} us; each {each}"
            )
for tokens, n, k in ((8192, 3584, 3584), (4096, 37888, 3584)):
    for f in gemms.FORMATS:
        v = gemms.choose(f, tokens, n, k * gemms.FORMATS[f][1])
        t = gemms.timing(gemm, pool, v, tokens, n, k)
        say(
            f"{tokens} x {n} x {k} {v}: {t:.0f} us {2 * tokens * n * k / t / 1e6:.0f} TFLOP/s, "
            f"torch {gemms.torch_timing(pool, f, tokens, n, k):.0f} us"
        )
del pool
flash = attention.Flash()
say("compiled")
good = attention.check_forward(flash, say)
good &= attention.check_rotation(flash, say)
say(f"attention forward {'right' if good else 'WRONG'}")
wrong |= not good
for backward in (attention.Backward(False), attention.Backward()):
    good = attention.check_backward(backward, say)
    say(f"attention backward {'right' if good else 'WRONG'}")
    wrong |= not good
    for heads, kv_heads, hd, batch, length in (
        (12, 2, 128, 8, 4096),
        (12, 2, 128, 2, 4096),
        (12, 2, 128, 8, 1024),
        (14, 2, 64, 2, 4096),
        (14, 2, 64, 32, 512),
    ):
        t, flops = attention.time_backward(backward, heads, kv_heads, hd, batch, length)
        say(
            f"{backward.name} {heads}/{kv_heads}x{hd} {batch} x {length}: "
            f"{t:.1f} us {flops / t / 1e6:.0f} TFLOP/s (of the five GEMMs needed)"
        )
        if backward.hopper and batch * length > 8000:
            for library, t in attention.torch_backward(heads, hd, batch, length):
                say(f"torch's {library} (heads not shared): {t:.1f} us {flops / t / 1e6:.0f} TFLOP/s")
for heads, kv_heads, hd, batch, context in (
    (28, 4, 128, 64, 384),
    (28, 4, 128, 64, 640),
    (28, 4, 128, 256, 384),
    (40, 8, 128, 64, 384),
    (14, 2, 64, 256, 384),
    (28, 4, 128, 8, 8192),
):
    for fmt in attention.FORMATS:
        t, size = attention.time_decode(flash, fmt, heads, kv_heads, hd, batch, context)
        say(
            f"decode {heads}/{kv_heads}x{hd} batch {batch} context {context} {fmt}: "
            f"{t:.1f} us {size / t / 1e6:.2f} TB/s"
        )
for heads, kv_heads, hd, batch, length in (
    (12, 2, 128, 8, 4096),
    (28, 4, 128, 8, 1024),
    (14, 2, 64, 32, 512),
):
    for fmt in attention.FORMATS:
        t, flops = attention.time_prefill(flash, fmt, heads, kv_heads, hd, batch, length)
        say(
            f"prefill {heads}/{kv_heads}x{hd} {batch} x {length} {fmt}: "
            f"{t:.1f} us {flops / t / 1e6:.0f} TFLOP/s"
        )
    t, flops = attention.time_prefill(flash.hopper, "bf16", heads, kv_heads, hd, batch, length)
    say(
        f"prefill of Hopper {heads}/{kv_heads}x{hd} {batch} x {length} bf16: "
        f"{t:.1f} us {flops / t / 1e6:.0f} TFLOP/s"
    )
    for library, t in attention.torch_prefill(heads, hd, batch, length):
        say(f"torch's {library} (heads not shared): {t:.1f} us {flops / t / 1e6:.0f} TFLOP/s")
say("end")
sys.exit(int(wrong))
