"""Tries the variants of the packed-weight GEMM on the shapes of real models: checks, then the best times of
each."""

import itertools
import sys
import time

import torch

from gemm import FORMATS, SHAPES, SMS, Gemm, Pool, invariance, timing, torch_timing, verify, verify_swiglu

begin = time.time()
say = lambda text: print(f"[{time.time() - begin:5.1f}s] {text}", flush=True)
torch.manual_seed(int(time.time()))
FORMAT_NAMES = list(FORMATS)
CONFIGS = [(1, 1), (2, 1), (2, 2)]
streams = [(f, t, 2, 1, "STREAM") for f in FORMAT_NAMES for t in (16, 64, 128, 256) if (f, t) != ("fp8", 256)]
whole = [("int8", t, w, c, "TILES") for t in (64, 128, 256) for w, c in CONFIGS]
whole += [(f, t, w, c, "VIRTUAL") for f in ("bf16", "fp8") for t in (64, 128) for w, c in CONFIGS]
extra = [(f, 256, 2, 2, "TILES") for f in ("bf16", "fp8")]
gemm = Gemm(streams + whole + extra, say)
say(f"compiled {len(gemm.kernels)} kernels")

bad = set()
for v in streams + whole + extra:
    worst, steady = 0.0, True
    for tokens, n, k, bias, add, ranges in [
        (v[1], 896, 896, False, False, None),
        (v[1] - 5, 1000, 1184, True, True, None),
        (max(1, v[1] // 2 - 3), 510, 4864, True, False, 66),
        (v[1] if v[4] == "STREAM" else 700, 4608, 3584, False, True, None),
    ]:
        try:
            error, same = verify(gemm, v, tokens, n, k, bias, add, ranges)
        except RuntimeError as failure:
            say(f"{v}: {failure}")
            sys.exit(1)
        worst, steady = max(worst, error), steady and same
    limit = 0 if v[0] == "int8" else 1e-5 if v[0] == "bf16" else 3e-2
    fine = worst <= limit and steady
    if not fine:
        bad.add(v)
        say(f"check {v}: error {worst:.2e} steady {steady} WRONG")
say(f"{len(streams + whole + extra) - len(bad)} variants right, {len(bad)} wrong")
for fmt in ("bf16", "fp8"):
    for small, large in [
        ((16, 2, 1, "STREAM"), (128, 2, 1, "STREAM")),
        ((64, 2, 1, "STREAM"), (128, 1, 1, "VIRTUAL")),
        ((64, 2, 1, "STREAM"), (128, 2, 2, "VIRTUAL")),
    ]:
        same = [invariance(gemm, (fmt, *small), (fmt, *large), n, k) for n, k in ((4608, 3584), (896, 4864))]
        say(f"same bits {fmt} {small} {large}: {same}")

for v in [
    ("bf16", 16, 2, 1, "STREAM"),
    ("int8", 64, 2, 1, "STREAM"),
    ("fp8", 128, 2, 1, "STREAM"),
    ("int8", 128, 1, 1, "TILES"),
]:
    say(
        f"swiglu {v}: "
        + str([f"{verify_swiglu(gemm, v, *s):.1e}" for s in ((v[1], 9728, 896), (v[1] - 3, 1040, 3584))])
    )

pool = Pool()
say("timing")
sums = {}
for model, tokens in itertools.product(("7B", "32B", "0.5B"), (64, 16, 256)):
    for f in FORMAT_NAMES:
        print(f"{model} tokens {tokens} {f}")
        for name, n, k in SHAPES[model]:
            size = n * k * FORMATS[f][1]
            found = []
            for v in streams + whole + (extra if tokens == 256 else []):
                if v[0] != f or v in bad or time.time() - begin > 120:
                    continue
                cuts = [None]
                if v[4] == "STREAM":
                    if v[1] != tokens:
                        continue
                    tiles, units = -(-n // 128), -(-n // 128) * -(-k * FORMATS[f][1] // 128)
                    cuts = [None, SMS] + [tiles * split for split in (1, 2, 3, 4) if tiles * split <= SMS]
                    cuts = [cut for cut in cuts if cut is None or cut <= units]
                elif v[1] > tokens or v[1] * 4 < tokens:
                    continue
                for cut in cuts:
                    found.append((timing(gemm, pool, v, tokens, n, k, cut), v[1:], cut))
            found.sort(key=lambda x: x[0])
            library = torch_timing(pool, f, tokens, n, k) if tokens > 16 or f != "int8" else 0
            sums.setdefault((model, tokens, f), []).append((found[0][0] if found else 0, library))
            cells = "  ".join(f"{t:5.1f}us {v[0]}/{v[1]}/{v[2]}/{v[3][0]} cut {c}" for t, v, c in found[:7])
            best = found[0][0] if found else 1
            if name == "gate_up" and found:
                _, v, cut = found[0]
                cells = f"with swiglu {timing(gemm, pool, (f, *v), tokens, n, k, cut, 1):5.1f}us  " + cells
            print(f"  {name:8} {size / best / 1e6:4.2f}TB/s torch {library:5.1f}us | {cells}", flush=True)
for tokens, n, k in ((8192, 3584, 3584), (4096, 37888, 3584)):
    for v in [
        ("bf16", 128, 2, 1, "VIRTUAL"),
        ("bf16", 128, 2, 2, "VIRTUAL"),
        ("int8", 256, 2, 1, "TILES"),
        ("int8", 256, 2, 2, "TILES"),
    ] + extra:
        t = timing(gemm, pool, v, tokens, n, k)
        print(
            f"many tokens {tokens} {n} {k} {v}: {t:.1f} us {2 * tokens * n * k / t / 1e6:.0f} TFLOP/s; "
            f"torch {torch_timing(pool, v[0], tokens, n, k):.1f} us",
            flush=True,
        )
for key, times in sums.items():
    print(key, f"sum of four: {sum(t for t, _ in times):.1f} us, torch {sum(t for _, t in times):.1f} us")
say("end")
sys.exit(len(bad) > 0)
