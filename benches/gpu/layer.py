"""One block of a decode step as the backend launches it, replayed as a graph over several blocks' weights.

`python3 layer.py [shape,format,rows,context ...]` prints microseconds a block, and what each kernel adds: the
time without it.
"""

import ctypes
import sys
import time

import torch

import gemm as gemms
from flash import EVERYTHING, decode_shape
from device import Kernel, compile_all, graph_time, load, tensor_map

SHAPES = {
    "0.5B": (896, 14, 2, 64, 4864),
    "1.5B": (1536, 12, 2, 128, 8960),
    "7B": (3584, 28, 4, 128, 18944),
    "32B": (5120, 40, 8, 128, 27648),
}
u32, f32, ptr = ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p


def threads(width):
    return min(1024, max(128, 1 << (-(-width // 16) - 1).bit_length()))


class Kernels:
    def __init__(self, formats, defines=()):
        self.variants = [v for f in formats for v in gemms.variants(f)]
        jobs = [(f"{name}.cu", "sm_90", list(defines)) for name in ("quantize", "kv", "flash_decode")]
        built = compile_all(jobs)
        for job, (cubin, log) in zip(jobs, built):
            if cubin is None:
                raise SystemExit(f"{job}: {log}")
        self.modules = {job[0]: load(cubin) for job, (cubin, _) in zip(jobs, built)}
        self.known = {}
        self.gemm = gemms.Gemm(self.variants, defines=defines)
        self.partials = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, device="cuda")
        self.maxima = torch.full((1 << 18,), -1, dtype=torch.int32, device="cuda")
        self.largest = torch.zeros(256 * 32, dtype=torch.int32, device="cuda")

    def get(self, file, name):
        if name not in self.known:
            self.known[name] = Kernel(self.modules[file + ".cu"], name)
        return self.known[name]


class Block:
    """The buffers of a shape, and the launches of one block with the weights of set `i`."""

    def __init__(self, kernels, shape, fmt, rows, context, sets, kv="bf16", options=()):
        self.options = options
        self.k, self.fmt, self.rows, self.context, self.kv = kernels, fmt, rows, context, kv
        self.d, self.heads, self.kv_heads, self.hd, self.f = SHAPES[shape]
        d, f, q = self.d, self.f, self.heads * self.hd
        self.width = q + 2 * self.kv_heads * self.hd
        self.element = gemms.FORMATS[fmt][1]
        self.sizes = {"qkv": (self.width, d), "o": (d, q), "gate_up": (2 * f, d), "down": (d, f)}
        total = lambda n, k: -(-n // 64) * -(-k * self.element // 128) * 8192
        make = lambda size: (
            torch.randint(-127, 127, (size,), dtype=torch.int8, device="cuda").view(torch.uint8)
            if fmt != "bf16"
            else (torch.randn(size // 2, device="cuda") * 0.02).bfloat16().view(torch.uint8)
        )
        self.weights = [{name: make(total(n, k)) for name, (n, k) in self.sizes.items()} for _ in range(sets)]
        self.scales = {name: torch.rand(n, device="cuda") * 1e-4 for name, (n, _) in self.sizes.items()}
        self.bias = torch.randn(self.width, device="cuda")
        self.gain = torch.ones(d, device="cuda")
        wide = max(f, d, q)
        self.left = torch.zeros(256 * wide * 2, dtype=torch.uint8, device="cuda")
        self.left_scales = torch.ones(256, device="cuda")
        self.x = torch.randn(rows, d, device="cuda")
        self.qkv = torch.randn(rows, self.width, device="cuda")
        self.attention = torch.randn(rows, q, device="cuda")
        self.gate_up = torch.randn(rows, 2 * f, device="cuda")
        page, per = 64, -(-context // 64)
        kv_bytes = 2 if kv == "bf16" else 1
        pages = rows * per
        self.caches = [
            (
                torch.zeros(
                    pages * self.kv_heads * page * self.hd * kv_bytes, dtype=torch.uint8, device="cuda"
                ),
                torch.zeros(
                    pages * self.kv_heads * page * self.hd * kv_bytes, dtype=torch.uint8, device="cuda"
                ),
            )
            for _ in range(sets)
        ]
        self.kv_scales = torch.ones(pages * self.kv_heads * page, device="cuda")
        self.pages = torch.randperm(pages, device="cuda").int()
        self.spans = torch.tensor(
            [[i, 1, context - 1, i * per] for i in range(rows)], dtype=torch.int32, device="cuda"
        )
        slots = [int(p) * page + (context - 1) % page for p in self.pages[per - 1 :: per].tolist()]
        self.slots = torch.tensor(slots, dtype=torch.int32, device="cuda")
        self.positions = torch.full((rows,), context - 1, dtype=torch.int32, device="cuda")
        self.cos, self.sin = (torch.rand(context * self.hd // 2, device="cuda") for _ in range(2))
        self.maps = {}

    def matmul(self, i, name, out, bias=None, add=0, **more):
        n, k = self.sizes[name]
        v = gemms.choose(self.fmt, self.rows, n, k * self.element, more.get("swiglu", 0))
        key = (k, gemms.box_rows(v[1], v[3], v[4]))
        if key not in self.maps:
            self.maps[key] = tensor_map(self.left.data_ptr(), self.rows, k * self.element, key[1])
        x = self.left[: self.rows * k * self.element].view(self.rows, -1)
        scales = (self.left_scales, self.scales[name]) if self.fmt != "bf16" else (None, None)
        self.k.gemm.run(
            v,
            x,
            self.weights[i][name],
            n,
            out,
            *scales,
            bias,
            add,
            prepared=self.maps[key],
            row_bytes=k * self.element,
            **more,
        )

    def rows_of(self, kind, source, k, *more):
        tail = {"int8": "i8", "fp8": "e4m3", "bf16": "bf16"}[self.fmt]
        given = [*source, u32(k), *more, self.left] + ([self.left_scales] if self.fmt != "bf16" else [])
        if kind == "known":
            return self.k.get("quantize", f"known_{tail}").launch(
                (self.rows, -(-k // 4096)), (256,), 0, given, True
            )
        if kind == "norm" and self.fmt != "bf16":
            given.append(self.k.largest)
        self.k.get("quantize", f"{kind}_{tail}").launch((self.rows,), (threads(k),), 0, given, True)

    def rope(self, i):
        keys, values = self.caches[i]
        code = {"bf16": 1, "int8": 2, "fp8": 3}[self.kv]
        given = [
            self.qkv,
            u32(self.rows),
            u32(self.width),
            u32(self.heads),
            u32(self.kv_heads),
            u32(self.hd),
            self.positions,
            self.cos,
            self.sin,
            self.slots,
            u32(64),
            u32(code),
            keys,
            values,
            self.kv_scales,
            self.kv_scales,
        ]
        warps = self.rows * (self.heads + 2 * self.kv_heads)
        self.k.get("kv", "rope_write").launch((-(-warps // 4),), (128,), 0, given, True)

    def shape(self):
        """Splits of attention, the shape of its blocks, and whether it writes quantized values."""
        splits = -(-self.context // 512)
        block, smem, at_once = decode_shape(
            self.kv, self.hd, splits * self.kv_heads * self.rows, self.context
        )
        return (
            splits,
            block,
            smem,
            "quantized" in self.options and self.fmt != "bf16" and at_once and self.rows <= 64,
        )

    def attend(self, i, rotate=False):
        keys, values = self.caches[i]
        splits, block, smem, quantized = self.shape()
        given = [
            self.qkv,
            keys,
            values,
            self.kv_scales,
            self.kv_scales,
            self.spans,
            self.pages,
            self.attention,
            ptr(0),
            self.k.partials,
            self.k.counters,
            *[u32(v) for v in (self.width, self.heads, self.kv_heads, 6, splits)],
            f32(0.1),
            u32(EVERYTHING),
        ]
        output = 0
        if rotate and self.fmt == "bf16":
            output = 1
        if rotate and quantized:
            output = 2 if self.fmt == "int8" else 3
        given += [
            self.cos if rotate else ptr(0),
            self.sin if rotate else ptr(0),
            u32(output),
            self.left_scales,
            self.k.maxima,
        ]
        if output:
            given[7] = self.left
        self.k.get("flash_decode", f"flash_decode_{self.kv}_{self.hd}").launch(
            (splits, self.kv_heads, self.rows), (block,), smem, given, True
        )

    def launches(self, i):
        q = self.heads * self.hd
        mlp = [
            ("gate_up", lambda: self.matmul(i, "gate_up", self.gate_up)),
            ("swiglu", lambda: self.rows_of("swiglu", [self.gate_up], self.f)),
        ]
        if "fused" in self.options:
            largest = self.k.largest if self.fmt != "bf16" else None
            mlp = [("gate_up", lambda: self.matmul(i, "gate_up", self.gate_up, swiglu=1, largest=largest))]
            if self.fmt != "bf16":
                mlp.append(("swiglu", lambda: self.rows_of("known", [self.gate_up], self.f, self.k.largest)))
        middle = [
            ("rope", lambda: self.rope(i)),
            ("attention", lambda: self.attend(i)),
            ("rows", lambda: self.rows_of("rows", [self.attention], q)),
        ]
        if "rotate" in self.options:
            middle = [("attention", lambda: self.attend(i, True))] + (
                middle[2:] if self.fmt != "bf16" and not self.shape()[3] else []
            )
        return [
            ("norm1", lambda: self.rows_of("norm", [self.x, self.gain], self.d, f32(1e-6))),
            ("qkv", lambda: self.matmul(i, "qkv", self.qkv, self.bias)),
            *middle,
            ("o", lambda: self.matmul(i, "o", self.x, add=1)),
            ("norm2", lambda: self.rows_of("norm", [self.x, self.gain], self.d, f32(1e-6))),
            *mlp,
            ("down", lambda: self.matmul(i, "down", self.x, add=1)),
        ]

    def time(self, without=()):
        sets = len(self.weights)
        all_launches = [
            launch
            for _ in range(2)
            for i in range(sets)
            for name, launch in self.launches(i)
            if name not in without
        ]
        return graph_time(all_launches, 9) * len(all_launches) / (2 * sets)


def main():
    begin = time.time()
    cases = [c.split(",") for c in sys.argv[1:] if "," in c] or [
        ("7B", "int8", 64, 256),
        ("7B", "bf16", 64, 256),
        ("32B", "int8", 64, 256),
        ("0.5B", "int8", 256, 256),
        ("0.5B", "bf16", 256, 256),
    ]
    kernels = Kernels({c[1] for c in cases}, [a[2:] for a in sys.argv[1:] if a.startswith("-D")])
    print(f"compiled {time.time() - begin:.1f} s", flush=True)
    for shape, fmt, rows, context in cases:
        block = Block(
            kernels,
            shape,
            fmt,
            int(rows),
            int(context),
            16 if shape == "0.5B" else 4,
            *[a[3:] for a in sys.argv[1:] if a.startswith("kv=")],
        )
        for options in ((), ("fused", "rotate"), ("fused", "rotate", "quantized")):
            block.options = options
            whole = block.time()
            parts = (
                []
                if "quick" in sys.argv
                else [(name, whole - block.time((name,))) for name, _ in block.launches(0)]
            )
            print(
                f"{shape} {fmt} {rows} rows, context {context} {options}: {whole:.1f} us a block; "
                + ", ".join(f"{n} {t:.1f}" for n, t in parts),
                flush=True,
            )


if __name__ == "__main__":
    main()
