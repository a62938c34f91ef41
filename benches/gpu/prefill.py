"""Prefill attention in bf16 on Hopper alone, in under 40 s: bits against flash_prefill.cu, errors against
float64, and times.

`python3 prefill.py [NAME=VALUE,NAME=VALUE]...`: each argument is a variant, compiled with these definitions,
and timed beside the kernel as it is.
"""

import sys
import time

import torch

import flash as attention
from device import Kernel, compile_all, load

begin = time.time()
say = lambda text: print(f"[{time.time() - begin:5.1f}s] {text}", flush=True)
torch.manual_seed(1)
variants = {"": attention.Hopper()}
for names in sys.argv[1:]:
    variants[names] = attention.Hopper(names.split(","))


class Old:
    """flash_prefill.cu without what else `Flash` compiles."""

    def __init__(self):
        cubin, log = compile_all([("flash_prefill.cu", "sm_90", [])])[0]
        module = load(cubin) if cubin else sys.exit(log)
        kernel = lambda hd: Kernel(module, f"flash_prefill_bf16_{hd}")
        self.kernels = {("prefill", "bf16", hd): kernel(hd) for hd in (64, 128)}

    inputs, numbers, prefill = attention.Flash.inputs, attention.Flash.numbers, attention.Flash.prefill


old = Old()
say("compiled")
good = {names: True for names in variants}
SMALL = [(0, 40)]
MIXED = [(0, 1), (0, 7), (0, 64), (0, 65), (100, 30), (0, 600), (513, 1), (1500, 40), (2047, 1), (0, 1300)]
SHAPES = ((8, 8, 128), (12, 2, 128), (14, 2, 64), (28, 4, 128), (40, 8, 128), (4, 4, 64), (16, 1, 128))
for heads, kv_heads, hd in SHAPES:
    for page in (16, 64, 256):
        for window in (attention.EVERYTHING, 100, 700):
            for sequences in (SMALL, MIXED):
                case = attention.Case("bf16", heads, kv_heads, hd, sequences, page, window)
                want, want_lse = case.reference()
                out, lse = attention.run(old.prefill, case)
                errors = [attention.relative(out, want), attention.relative(lse, want_lse)]
                if not all(e < 6e-3 for e in errors):
                    good[""] = False
                    what = f"flash_prefill.cu {heads}/{kv_heads}x{hd} page {page} window {window}"
                    say(f"{what}: errors {errors} WRONG")
                for names, hopper in variants.items():
                    tell = lambda text: say(f"[{names}] {text}")
                    good[names] &= attention.check_hopper(hopper, case, out, lse, want, tell)
for names, fine in good.items():
    say(f"{names or 'as it is'}: {'right' if fine else 'WRONG'}")
for heads, kv_heads, hd in ((12, 2, 128), (28, 4, 128), (14, 2, 64)):
    for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
        for page in (64, 16):
            found = []
            kernels = {"flash_prefill.cu": old, **variants} if page == 64 else {"": variants[""]}
            for names, kernel in kernels.items():
                t, flops = attention.time_prefill(kernel, "bf16", heads, kv_heads, hd, batch, length, page)
                found.append(f"{names or 'Hopper'} {t:.1f} us {flops / t / 1e6:.0f} TFLOP/s")
            say(f"{heads}/{kv_heads}x{hd} {batch} x {length} page {page}: {', '.join(found)}")
        for library, t in attention.torch_prefill(heads, hd, batch, length):
            say(f"torch's {library} (heads not shared): {t:.1f} us {flops / t / 1e6:.0f} TFLOP/s")
say("end")
sys.exit(not all(good.values()))
