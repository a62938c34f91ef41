"""The packed-weight GEMMs of cu/gemm_hopper.cu: checked against exact sums, timed beside torch's
libraries."""

import ctypes

import torch

from device import Kernel, compile_all, graph_time, load, tensor_map

SMS = 132
# Blocks that run at once in clusters of so many.
CLUSTERED = {2: 132, 3: 108, 4: 120}
FORMATS = {"bf16": (0, 2), "int8": (1, 1), "fp8": (2, 1)}
SHAPES = {
    "0.5B": [("qkv", 1152, 896), ("o", 896, 896), ("gate_up", 9728, 896), ("down", 896, 4864)],
    "7B": [("qkv", 4608, 3584), ("o", 3584, 3584), ("gate_up", 37888, 3584), ("down", 3584, 18944)],
    "32B": [("qkv", 7168, 5120), ("o", 5120, 5120), ("gate_up", 55296, 5120), ("down", 5120, 27648)],
}


def variant(fmt, tok, wg, cl, schedule="STREAM"):
    """The name of a kernel. For GATED `wg` is its columns."""
    return f"gemm_{fmt}_{tok}_{wg}_GATED" if schedule == "GATED" else f"gemm_{fmt}_{tok}_{wg}_{cl}_{schedule}"


def instance(fmt, tok, wg, cl, schedule):
    """The macro that makes a kernel."""
    if schedule == "BULK":
        return f"BULK_KERNEL({tok}, {wg}, {cl})"
    return (
        f"GATED({wg})" if schedule == "GATED" else f"K({fmt}, {fmt.upper()}, {tok}, {wg}, {cl}, {schedule})"
    )


def stage_bytes(tok, wg):
    return wg * 8192 + tok * 128


def box_rows(tok, cl, schedule):
    """Rows of tokens of one copy: blocks of a cluster bring a part each, unless they have different parts of
    k."""
    return tok if schedule == "SPLIT" else tok // cl


def shared_bytes(tok, wg, parts, k_blocks):
    """Shared memory of a block: stages, no more than it has k-blocks; the sums of a cluster take their
    place."""
    stages = min(16, 196 * 1024 // stage_bytes(tok, wg), max(2, k_blocks))
    sums = parts * -(-(tok // 32) // parts) * wg * 4 * 2048 if parts > 1 else 0
    return max(stages * stage_bytes(tok, wg), sums) + 1024


def bulk_bytes(tok, wg, k_blocks):
    """The same with bulk stores, which have an area of their own."""
    stages = min(16, 160 * 1024 // stage_bytes(tok, wg), max(2, k_blocks))
    return 64 * 1024 + stages * stage_bytes(tok, wg) + 1024


def bulk_maps(out, kept, tokens, n, swiglu):
    """Where bulk stores store: 64 results by 128 bytes at a time, 32 of SwiGLU's."""
    kind, width, rows = ("bf16", n, 32) if swiglu else ("f32", 4 * n, 64)
    results = tensor_map(out.data_ptr(), tokens, width, rows, 128, kind)
    return results, (
        tensor_map(kept.data_ptr(), tokens, 2 * n, 64, 128, "bf16") if kept is not None else results
    )


def gated_bytes(columns, k_blocks):
    """The same of a gated GEMM of 256 tokens, which needs less beside its stages."""
    stage = (256 + 2 * columns) * 128
    return min(212 * 1024 // stage, max(2, k_blocks)) * stage + 1024


def ranges_for(n, k_bytes):
    """Into how many ranges a matrix is cut: as `cuda/gemm.rs` does it."""
    tiles, kb, most = -(-n // 256), -(-k_bytes // 128), SMS // 2
    return most if tiles > most else tiles * (1 if kb < 16 else min(most // tiles, 4))


def variants(fmt):
    """What the files gemm_*.cu hold."""
    large = "TILES" if fmt == "int8" else "VIRTUAL"
    larger = "BULK" if fmt == "bf16" else large
    streams = (16, 64, 128, 256)
    last = [(fmt, 256 if fmt == "int8" else 128, 2, 2, larger)] + (
        [(fmt, 192, 2, 2, larger)] if fmt == "bf16" else []
    )
    split = [(fmt, 128, 1, parts, "SPLIT") for parts in (2, 4)] + (
        [(fmt, 256, 2, parts, "SPLIT") for parts in (3, 4)] if fmt != "fp8" else []
    )
    gated = [(fmt, 256, columns, 1, "GATED") for columns in (40, 48, 56, 64, 72)] if fmt == "int8" else []
    return (
        [(fmt, t, 2, 2 if t == 256 else 1, "STREAM") for t in streams]
        + [(fmt, 64, 1, 1, large), (fmt, 128, 1, 1, large), (fmt, 128, 2, 1, larger)]
        + last
        + split
        + gated
    )


def choose(fmt, rows, n, k_bytes, swiglu=0):
    """The variant for a number of rows, by estimated microseconds: as `cuda/gemm.rs` does it."""
    tiles, kb = -(-n // 256), -(-k_bytes // 128)
    up = lambda a, b: -(-a // b)
    own = {v[1:]: v for v in variants(fmt)}
    if rows <= 64:
        return own[(16 if rows <= 16 else 64, 2, 1, "STREAM")]
    costs = []
    for v in own.values():
        _, tok, wg, cl, schedule = v
        if swiglu and wg == 1:
            continue
        if schedule == "GATED":
            if swiglu and rows <= tok:
                costs.append((((0.39 + 0.004 * wg) * kb + 3.5) * up(up(n, 2 * wg), SMS), v))
            continue
        if schedule == "STREAM":
            if rows > tok or tok < 128:
                continue
            ranges = ranges_for(n, k_bytes)
            unit, apart, whole = (0.5, 7, 2.5) if tok == 128 else (0.75, 11, 5 if swiglu else 8)
            costs.append((unit * up(tiles * kb, ranges) + (whole if ranges == tiles else apart), v))
        elif schedule == "SPLIT":
            if (
                swiglu
                or kb < 4 * cl
                or (wg > 1 and rows > tok)
                or (fmt != "int8" and ranges_for(n, k_bytes) != tiles * cl)
            ):
                continue
            unit, fixed = (0.25, 3.2) if tok == 128 else (0.72, 8)
            costs.append(
                ((unit * kb / cl + fixed) * up(up(n, 64 * wg) * up(rows, tok) * cl, CLUSTERED[cl]), v)
            )
        elif cl == 2:
            unit, each, fixed = {256: (0.75, 0, 3), 192: (0.62, 3.2, 0), 128: (0.45, 2, 0)}[tok]
            costs.append(
                ((unit * kb + each) * up(up(n, 256) * up(rows, tok), SMS // 2) + fixed, v)
                if rows > 256
                else (1e9, v)
            )
        else:
            unit, fixed = (
                (0.46 if rows > 256 and fmt != "fp8" else 0.42, 2)
                if wg == 2
                else (0.25, 2.5) if tok == 128 else (0.21, 1.5)
            )
            costs.append(((unit * kb + fixed) * up(up(n, 64 * wg) * up(rows, tok), SMS), v))
    return min(costs)[1]


class Gemm:
    """The kernels of a list of (format, tok, wg, cl, schedule)."""

    def __init__(self, variants, report=print, defines=()):
        jobs = [(f"gemm_{v[0]}.cu", "sm_90a", [f"TUNE(K)={instance(*v)}", *defines]) for v in variants]
        jobs.append(("gemm_pack.cu", "sm_90a", []))
        built = compile_all(jobs)
        self.kernels = {}
        for v, (cubin, log) in zip(variants, built):
            if cubin is None:
                report(f"{v}: {log}")
                continue
            self.kernels[v] = Kernel(load(cubin), variant(*v))
        self.packer = Kernel(load(built[-1][0]), "gemm_pack")
        self.partials = torch.full((40 << 20,), 0xFF, dtype=torch.uint8, device="cuda")

    def pack(self, rows):
        n, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
        strips, kb = -(-n // 64), -(-row_bytes // 128)
        tiles = torch.full((strips * kb * 8192,), 0x55, dtype=torch.uint8, device="cuda")
        ints = [ctypes.c_int(v) for v in (n, row_bytes, kb)]
        self.packer.launch((strips * kb * 2,), (256,), 0, [rows, tiles, *ints])
        return tiles

    def run(
        self,
        v,
        x,
        tiles,
        n,
        out,
        xs=None,
        ws=None,
        bias=None,
        add=0,
        swiglu=0,
        ranges=None,
        pdl=True,
        prepared=None,
        row_bytes=None,
        largest=None,
        kept=None,
    ):
        fmt, tok, wg, cl, schedule = v
        element = FORMATS[fmt][1]
        tokens, row_bytes = x.shape[0], row_bytes or x.shape[1] * element
        kb = -(-row_bytes // 128)
        ranges = ranges or ranges_for(n, row_bytes)
        grid, each = ranges * 2, -(-(-(-n // 256) * kb) // ranges)
        if schedule == "SPLIT":
            grid, each = -(-n // (64 * wg)) * -(-tokens // tok) * cl, -(-kb // cl)
        elif schedule != "STREAM":
            work = -(-n // (64 * wg * cl)) * -(-tokens // tok)
            clusters = min(SMS // cl, work)
            grid, each = clusters * cl, -(-work // clusters) * kb
        at = lambda t: t.data_ptr() if t is not None else None
        pointers = [ctypes.c_void_p(at(t)) for t in (tiles, ws, xs, bias, out, self.partials)]
        numbers = [ctypes.c_int(v) for v in (tokens, n, kb, ranges, add, swiglu)]
        parts = cl if schedule == "SPLIT" else 1
        if schedule == "GATED":
            work = -(-n // (2 * wg))
            grid = min(SMS, work)
            smem = gated_bytes(wg, -(-work // grid) * kb)
        elif schedule == "BULK":
            smem = bulk_bytes(tok, wg, each)
        else:
            smem = shared_bytes(tok, wg, parts, each)
        if prepared is None:
            prepared = tensor_map(x.data_ptr(), tokens, row_bytes, box_rows(tok, cl, schedule))
        block = (576 if wg <= 64 else 384) if schedule == "GATED" else wg * 128 + 128 if wg > 1 else 192
        last = [ctypes.c_void_p(at(t)) for t in (largest, kept)]
        arguments = [prepared, *pointers, *numbers, *last]
        if schedule == "BULK":
            stored = bulk_maps(out, kept, tokens, n, swiglu)
            arguments = [prepared, *stored, pointers[0], pointers[3], *numbers, last[1]]
        self.kernels[v].launch((grid,), (block,), smem, arguments, pdl)


def operands(fmt, tokens, n, k):
    if fmt == "bf16":
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        w = torch.randn(n, k, device="cuda").bfloat16()
        return x, w, None, None
    xs, ws = torch.rand(tokens, device="cuda") + 0.5, torch.rand(n, device="cuda") + 0.5
    if fmt == "int8":
        x = torch.randint(-127, 128, (tokens, k), dtype=torch.int8, device="cuda")
        w = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
    else:
        x = (torch.randn(tokens, k, device="cuda") * 30).to(torch.float8_e4m3fn)
        w = (torch.randn(n, k, device="cuda") * 30).to(torch.float8_e4m3fn)
    return x, w, xs, ws


def reference(fmt, x, w, xs, ws, bias, old):
    total = x.double() @ w.double().T if fmt == "bf16" else x.float().double() @ w.float().double().T
    if fmt == "int8":
        v = total.to(torch.int32).float() * (xs[:, None] * ws[None, :])
        v = v + bias if bias is not None else v
        return old + v if old is not None else v
    if xs is not None:
        total = total * xs[:, None].double() * ws[None, :].double()
    total = total + bias.double() if bias is not None else total
    return total + old.double() if old is not None else total


def verify(gemm, v, tokens, n, k, bias, add, ranges=None):
    """Relative error (int8: 0 or the number of wrong elements)."""
    fmt = v[0]
    x, w, xs, ws = operands(fmt, tokens, n, k)
    b = torch.randn(n, device="cuda") if bias else None
    old = torch.randn(tokens, n, device="cuda") if add else None
    out = old.clone() if add else torch.full((tokens, n), float("nan"), device="cuda")
    tiles = gemm.pack(w)
    gemm.run(v, x, tiles, n, out, xs, ws, b, int(add), ranges=ranges)
    again = old.clone() if add else torch.full((tokens, n), float("nan"), device="cuda")
    gemm.run(v, x, tiles, n, again, xs, ws, b, int(add), ranges=ranges)
    torch.cuda.synchronize()
    want = reference(fmt, x, w, xs, ws, b, old)
    same = bool(torch.equal(out.view(torch.int32), again.view(torch.int32)))
    if fmt == "int8":
        return float((out != want).sum()), same
    return float((out.double() - want).norm() / want.norm()), same


def verify_swiglu(gemm, v, tokens, n, k):
    """Relative error of silu(gate) * up made by the GEMM itself."""
    x, w, xs, ws = operands(v[0], tokens, n, k)
    f = n // 2
    kind = torch.bfloat16 if v[0] == "bf16" else torch.float32
    out = torch.full((tokens, f), float("nan"), device="cuda", dtype=kind)
    xs, x = (xs * 1e-3, x) if xs is not None else (None, (x * 0.05).bfloat16())
    gemm.run(v, x, gemm.pack(w), n, out, xs, ws, swiglu=1)
    torch.cuda.synchronize()
    both = reference(v[0], x, w, xs, ws, None, None).double()
    want = torch.nn.functional.silu(both[:, :f]) * both[:, f:]
    return float((out.double() - want).norm() / want.norm())


def invariance(gemm, small, large, n, k):
    """Whether the first rows of a large batch have the bits of a small one."""
    x, w, xs, ws = operands(small[0], large[1], n, k)
    tiles = gemm.pack(w)
    outs = []
    ranges = ranges_for(n, k * FORMATS[small[0]][1])
    for v, rows in ((small, small[1] - 3), (large, large[1])):
        out = torch.full((rows, n), float("nan"), device="cuda")
        gemm.run(v, x[:rows], tiles, n, out, xs, ws, ranges=ranges)
        outs.append(out)
    torch.cuda.synchronize()
    return bool(torch.equal(outs[0], outs[1][: outs[0].shape[0]]))


class Pool:
    """A gigabyte of weights per format, to rotate over more than the L2 holds."""

    def __init__(self):
        size = 1 << 30
        self.data = {
            "bf16": torch.randn(size // 2, device="cuda", dtype=torch.bfloat16).view(torch.uint8),
            "int8": torch.randint(-127, 128, (size,), dtype=torch.int8, device="cuda").view(torch.uint8),
        }
        self.data["fp8"] = (torch.randn(size, device="cuda") * 30).to(torch.float8_e4m3fn).view(torch.uint8)

    def sets(self, fmt, size):
        pool = self.data[fmt]
        count = max(1, min(48, pool.numel() // size))
        return [pool[i * size : (i + 1) * size] for i in range(count)]


def timing(gemm, pool, v, tokens, n, k, ranges=None, swiglu=0, keeps=False):
    fmt, tok, wg, cl, schedule = v
    element = FORMATS[fmt][1]
    x, _, xs, ws = operands(fmt, tokens, 16, k)
    ws = torch.rand(n, device="cuda")
    sets = pool.sets(fmt, -(-n // 64) * -(-k * element // 128) * 8192)
    out = torch.empty(tokens, n, device="cuda")
    prepared = tensor_map(x.data_ptr(), tokens, k * element, box_rows(tok, cl, schedule))
    kept = torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda") if keeps else None
    more = dict(swiglu=swiglu, kept=kept)
    launches = [
        (lambda t=t: gemm.run(v, x, t, n, out, xs, ws, ranges=ranges, prepared=prepared, **more))
        for t in sets * max(1, 8 // len(sets))
    ]
    return graph_time(launches, 5)


def torch_timing(pool, fmt, tokens, n, k):
    element = FORMATS[fmt][1]
    x, _, xs, ws = operands(fmt, tokens, 16, k)
    dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[fmt]
    sets = [s[: n * k * element].view(dtype).view(n, k) for s in pool.sets(fmt, n * k * element)]
    ws = torch.rand(n, device="cuda")
    if fmt == "bf16":
        call = lambda w: torch.nn.functional.linear(x, w)
    elif fmt == "fp8":
        call = lambda w: torch._scaled_mm(
            x, w.T, scale_a=xs[:, None], scale_b=ws[None, :], out_dtype=torch.bfloat16
        )
    else:
        call = lambda w: torch._int_mm(x, w.T)
    return graph_time([(lambda w=w: call(w)) for w in sets * max(1, 8 // len(sets))], 5)
