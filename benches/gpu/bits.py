"""Whether `wgmma` and `mma.sync` give the same bits: 64 x 128 by 128 x 16 of random numbers, in bf16 and f16.

Attention decodes with `mma.sync` and prefills with `wgmma`; that a row has the same bits in both rests on this.
"""

import os
import sys

import torch

import nvrtc
from device import Kernel, load

SOURCE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bits.cu")
MATRICES = 4096


def differing(kernels, kind, dtype, spread):
    """Elements whose bits differ, of how many; numbers are spread over e^spread."""
    numbers = lambda *shape: torch.randn(*shape, device="cuda") * torch.exp(
        spread * torch.randn(*shape, device="cuda")
    )
    a, b = numbers(MATRICES, 64, 128).clamp(-1e3, 1e3), numbers(MATRICES, 16, 128).clamp(-60, 60)
    a, b = a.to(dtype), b.to(dtype)
    out = [torch.full((MATRICES, 64, 16), float("nan"), device="cuda") for _ in range(2)]
    kernels["mma", kind].launch((MATRICES,), (128,), 0, [a, b, out[0]])
    kernels["wgmma", kind].launch((MATRICES,), (128,), 40 << 10, [a, b, out[1]])
    torch.cuda.synchronize()
    exact = torch.einsum("nik,njk->nij", a.double(), b.double())
    error = float((out[1].double() - exact).norm() / exact.norm())
    if not error < 1e-5:
        sys.exit(f"{kind}: relative error {error:.1e}")
    return int((out[0].view(torch.int32) != out[1].view(torch.int32)).sum()), out[0].numel()


def main():
    module = load(nvrtc.compile_source(SOURCE, "sm_90a")[0])
    kinds = {"bf16": torch.bfloat16, "f16": torch.float16}
    kernels = {(way, kind): Kernel(module, f"{way}_{kind}") for way in ("mma", "wgmma") for kind in kinds}
    wrong = 0
    for kind, dtype in kinds.items():
        for spread in (0, 1, 3):
            count, total = differing(kernels, kind, dtype, spread)
            print(f"{kind}, spread {spread}: {count} of {total} differ", flush=True)
            wrong += count
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
