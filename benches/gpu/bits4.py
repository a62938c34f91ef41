"""GEMMs with weights in four bits: every form checked against exact sums of the numbers that the weights
stand for, then timed at the shapes of 7B and 32B beside int8, with the share of the memory's bandwidth.

    python3 bits4.py [tokens...]
"""

import ctypes
import sys

import torch

import gemm
from device import Kernel, compile_all, graph_time, load, tensor_map

TILE = {"int4": 4352, "nvfp4": 4608}
SMS = gemm.SMS


def forms(fmt):
    """What gemm_int4.cu and gemm_nvfp4.cu hold: tokens, warpgroups, blocks of a cluster, schedule."""
    last = (96, 2, 1, "VIRTUAL") if fmt == "int4" else (128, 2, 1, "VIRTUAL")
    return [
        (16, 2, 1, "STREAM"),
        (64, 2, 1, "STREAM"),
        (64, 2, 2, "STREAM"),
        (128, 2, 2, "STREAM"),
        (64, 2, 1, "VIRTUAL"),
        last,
    ]


def at(tensor):
    return ctypes.c_void_p(tensor.data_ptr() if tensor is not None else None)


def ints(*values):
    return [ctypes.c_int(v) for v in values]


class Bits4:
    def __init__(self):
        files = ["gemm_int4.cu", "gemm_nvfp4.cu", "pack_bits4.cu"]
        built = compile_all([(f, "sm_90a" if f.startswith("gemm") else "sm_90", []) for f in files])
        modules = []
        for file, (cubin, log) in zip(files, built):
            if cubin is None:
                sys.exit(f"{file}: {log}")
            modules.append(load(cubin))
        self.forms = {
            (fmt, *v): Kernel(module, f"gemm_{fmt}_{v[0]}_{v[1]}_{v[2]}_{v[3]}")
            for fmt, module in zip(TILE, modules)
            for v in forms(fmt)
        }
        names = ["weights_int4", "weights_nvfp4", "weights_absmax"]
        names += [f"{what}_{fmt}{kind}" for fmt in TILE for what, kind in (("pack", ""), ("unpack", "_f32"))]
        self.pack_kernels = {name: Kernel(modules[2], name) for name in names}
        self.partials = torch.full((40 << 20,), 0xFF, dtype=torch.uint8, device="cuda")

    def pack(self, fmt, w):
        """Tiles, the scale of all weights, and the numbers that they stand for."""
        n, k = w.shape
        kb = -(-k // 128)
        new = lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda")
        codes, whole, bad = new(n * k // 2), torch.zeros(1, device="cuda"), new(4).fill_(255)
        scales, largest = new(n * kb * 4 if fmt == "int4" else n * -(-k // 16)), new(4)
        row, seed = ((n,), (256,), 0), ctypes.c_uint64(0)
        kernels = self.pack_kernels
        if fmt == "int4":
            kernels["weights_int4"].launch(*row, [w, *ints(k, 0), seed, codes, scales, bad])
        else:
            kernels["weights_absmax"].launch(*row, [w, *ints(k), largest, bad])
            kernels["weights_nvfp4"].launch(*row, [w, *ints(k, 0), seed, codes, scales, largest, whole])
        tiles = new(-(-n // 64) * kb * TILE[fmt])
        kernels[f"pack_{fmt}"].launch((-(-n // 64) * kb,), (256,), 0, [codes, scales, tiles, *ints(n, k, kb)])
        numbers = torch.empty(n, k, device="cuda")
        grid = (-(-n * -(-k // 8) // 256),)
        kernels[f"unpack_{fmt}_f32"].launch(
            grid, (256,), 0, [tiles, scales, whole, numbers, *ints(n, k, kb)]
        )
        return tiles, whole, numbers

    def run(self, v, x, tiles, whole, n, out, prepared=None, gating=0):
        fmt, tok, wg, cl, schedule = v
        tokens, k = x.shape
        kb, cuts = -(-k // 128), -(-n // 256)
        most = SMS // 2
        ranges = most if cuts > most else cuts * (1 if kb < 16 else min(most // cuts, 4))
        if schedule == "STREAM":
            grid, each = ranges * 2, -(-(cuts * kb) // ranges)
        else:
            work = -(-n // (64 * wg * cl)) * -(-tokens // tok)
            grid = min(SMS // cl, work) * cl
            each = -(-work // min(SMS // cl, work)) * kb
        stage = -(-wg * TILE[fmt] // 1024) * 1024 + tok * 256
        smem = min(16, 196 * 1024 // stage, max(3, each)) * stage + 1024
        prepared = prepared or tensor_map(x.data_ptr(), tokens, 2 * k, tok // cl)
        pointers = [at(t) for t in (tiles, whole, None, None, out, self.partials)]
        arguments = [prepared, *pointers, *ints(tokens, n, kb, ranges, 0, gating), at(None), at(None)]
        self.forms[v].launch((grid,), (384,), smem, arguments, True)


def verify(bits):
    """Whether every form is right."""
    right = True
    for fmt in TILE:
        for n, k in [(256, 128), (512, 512), (4608, 3584), (3584, 1536), (192, 2048)]:
            w = torch.randn(n, k, device="cuda")
            tiles, whole, numbers = bits.pack(fmt, w)
            lost = float((numbers - w).norm() / w.norm())
            first = {}
            for v in forms(fmt):
                tokens = min(v[0], 100) if v[3] == "STREAM" else 300
                x = torch.randn(300, k, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
                x = x.bfloat16()[:tokens].contiguous()
                outs = []
                for _ in range(2):
                    out = torch.full((tokens, n), float("nan"), device="cuda")
                    bits.run((fmt, *v), x, tiles, whole, n, out)
                    torch.cuda.synchronize()
                    outs.append(out)
                want = x.double() @ numbers.double().T
                off = float((outs[0].double() - want).norm() / want.norm())
                same = torch.equal(outs[0], outs[1])
                alike = torch.equal(first.setdefault("out", outs[0])[:16], outs[0][:16])
                fine = off < 1e-5 and same and alike
                right &= fine
                print(f"{fmt} {n}x{k} {v}: {off:.1e} off, again {same}, as 16 rows {alike}, "
                      f"quantization {lost:.3f} {'ok' if fine else 'WRONG'}", flush=True)
    return right


def timing(bits, fmt, v, tokens, n, k):
    size = -(-n // 64) * -(-k // 128) * TILE[fmt]
    sets = max(2, min(24, (1 << 30) // size))
    # Random codes; scales are whole ones.
    tiles = torch.randint(0, 255, (sets, size // TILE[fmt], TILE[fmt]), dtype=torch.uint8, device="cuda")
    scales = tiles[:, :, 4096:]
    if fmt == "int4":
        scales.view(torch.float32).fill_(0.01)
    else:
        scales.clamp_(96, 200)
    x, out = torch.randn(tokens, k, device="cuda").bfloat16(), torch.empty(tokens, n, device="cuda")
    whole = torch.full((1,), 0.01, device="cuda")
    map_ = tensor_map(x.data_ptr(), tokens, 2 * k, v[0] // v[2])
    launches = [(lambda t=t: bits.run((fmt, *v), x, t, whole, n, out, map_)) for t in tiles]
    return graph_time(launches * max(1, 8 // sets), 5), size


def main(batches):
    bits = Bits4()
    right = verify(bits)
    pool = gemm.Pool()
    eight = [("int8", 16, 2, 1, "STREAM"), ("int8", 64, 2, 1, "STREAM"), ("int8", 128, 2, 1, "STREAM")]
    int8 = gemm.Gemm(eight)
    for model in ("7B", "32B"):
        for tokens in batches:
            print(f"-- {model}, {tokens} tokens: microseconds (TB/s of weights)")
            sums = {}
            for name, n, k in gemm.SHAPES[model]:
                line = f"{name:8} {n:6} x {k:5}"
                tok = 16 if tokens <= 16 else 64 if tokens <= 64 else 128
                if tokens <= 128:
                    us = gemm.timing(int8, pool, ("int8", tok, 2, 1, "STREAM"), tokens, n, k)
                    sums["int8"] = sums.get("int8", 0) + us
                    line += f"  int8 {us:6.1f} ({n * k / us / 1e6:.2f})"
                for fmt in TILE:
                    for v in forms(fmt):
                        if v[3] == "STREAM" and (v[0] < tokens or v[0] > 2 * max(tokens, 32)):
                            continue
                        if v[3] != "STREAM" and tokens <= 64:
                            continue
                        us, size = timing(bits, fmt, v, tokens, n, k)
                        key = f"{fmt} {v[0]}_{v[1]}_{v[2]}_{v[3]}"
                        sums[key] = sums.get(key, 0) + us
                        line += f"  {key} {us:6.1f} ({size / us / 1e6:.2f})"
                print(line, flush=True)
            print("block: " + ", ".join(f"{key} {us:.1f}" for key, us in sums.items()), flush=True)
    if not right:
        sys.exit("some forms are WRONG")


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [16, 64, 128, 2048])
