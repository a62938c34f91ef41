"""The attention kernels of cu/flash_*.cu: checked against float64, prefill against decode bit for bit, and
timed."""

import ctypes
import math
import sys

import torch

from device import Kernel, compile_all, graph_time, load, tensor_map

LOG2E = math.log2(math.e)
TILE, SPLIT = 64, 512
EVERYTHING = 1 << 30  # the window of rows that see all
FORMATS = ("bf16", "int8", "fp8")


def quantize(x, fmt):
    """Quantized values and scales per token and head, as the CPU makes them; and the numbers they stand
    for."""
    if fmt == "bf16":
        quantized = x.bfloat16()
        return quantized, None, quantized.float()
    most = 127.0 if fmt == "int8" else 448.0
    scale = x.abs().amax(-1) / most
    scale = ((scale.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)
    scaled = x * (1.0 / scale)[..., None]
    quantized = (
        scaled.round().clamp(-128, 127).to(torch.int8) if fmt == "int8" else scaled.to(torch.float8_e4m3fn)
    )
    return quantized, scale, quantized.float() * scale[..., None]


class Case:
    """Sequences with `new` query rows each after `old` positions, their pages shuffled."""

    def __init__(self, fmt, heads, kv_heads, hd, sequences, page_size=16, window=EVERYTHING):
        self.fmt, self.heads, self.kv_heads, self.hd, self.page_size = fmt, heads, kv_heads, hd, page_size
        self.window = window
        self.sequences = sequences
        rows = sum(new for _, new in sequences)
        self.stride = (heads + 2 * kv_heads) * hd
        self.qkv = torch.randn(rows, self.stride, device="cuda")
        counts = [-(-(old + new) // page_size) for old, new in sequences]
        order = torch.randperm(sum(counts)) + 1
        total = sum(counts) + 2
        dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[fmt]
        shape = (total, kv_heads, page_size, hd)
        self.keys = (
            torch.empty(shape, device="cuda").fill_(float("nan")).to(dtype)
            if fmt == "bf16"
            else torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda").view(dtype)
        )
        self.values = self.keys.clone()
        self.key_scales = torch.full(shape[:3], float("nan"), device="cuda")
        self.value_scales = self.key_scales.clone()
        spans, pages, self.contents, row = [], [], [], 0
        for (old, new), count in zip(sequences, counts):
            mine = order[len(pages) : len(pages) + count]
            spans.append([row, new, old, len(pages)])
            pages += mine.tolist()
            k, v = torch.randn(old + new, kv_heads, hd, device="cuda"), torch.randn(
                old + new, kv_heads, hd, device="cuda"
            )
            stored = []
            for x, to, scales in ((k, self.keys, self.key_scales), (v, self.values, self.value_scales)):
                quantized, scale, value = quantize(x, fmt)
                stored.append(value)
                position = torch.arange(old + new, device="cuda")
                page, slot = mine.cuda()[position // page_size], position % page_size
                raw = to.view(torch.uint8 if fmt != "bf16" else torch.int16)
                raw[page, :, slot] = quantized.view(raw.dtype)
                if scale is not None:
                    scales[page, :, slot] = scale
            self.contents.append(stored)
            row += new
        self.rows = rows
        self.spans_host = spans
        self.spans = torch.tensor(spans, dtype=torch.int32, device="cuda")
        self.pages = torch.tensor(pages, dtype=torch.int32, device="cuda")

    def reference(self):
        group = self.heads // self.kv_heads
        outs, lses = [], []
        for (row, new, old, _), (k, v) in zip(self.spans_host, self.contents):
            q = self.qkv[row : row + new, : self.heads * self.hd].view(new, self.heads, self.hd).double()
            k = k.double().repeat_interleave(group, 1)
            v = v.double().repeat_interleave(group, 1)
            s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.hd)
            positions = torch.arange(old + new, device="cuda")
            later = positions[None, :] - positions[old:, None]
            mask = (later > 0) | (later <= -self.window)
            s = s.masked_fill(mask, float("-inf"))
            outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v))
            lses.append(s.logsumexp(-1).T)
        return torch.cat(outs).reshape(self.rows, -1), torch.cat(lses)


def decode_shape(fmt, hd, blocks, longest, teams=None):
    """Threads and shared memory of a block of the decode kernel, and whether all run at the same time: as
    `cuda/flash.rs` does it."""
    team = 1 if fmt != "bf16" and hd == 64 else 2
    tile, own = 2 * TILE * (hd * 2 if fmt == "bf16" else hd + 4), 1024 + 8 * (
        hd + 8
    ) * 2 + 2048 + 4 * 1152 * (team - 1)
    each = -(-blocks // 132)
    fits = lambda n: n * team * each <= 16 and each * (n * tile + own) <= 228 << 10
    most = min(8 // team, -(-min(longest, SPLIT) // TILE))
    chosen = teams or next((n for n in range(most, 0, -1) if fits(n)), min(most, 2))
    return 32 * team * chosen, chosen * tile, fits(chosen)


class Hopper:
    """The prefill kernel of Hopper, for keys and values in bf16."""

    def __init__(self, defines=(), ring=96):
        self.ring = ring
        cubin, log = compile_all([("flash_prefill_hopper.cu", "sm_90a", list(defines))])[0]
        module = load(cubin) if cubin else sys.exit(log)
        self.kernels = {hd: Kernel(module, f"flash_prefill_hopper_{hd}") for hd in (64, 128)}

    def prefill(self, case, out, lse, work=None):
        work = work if work is not None else prefill_work(case)
        hd, rows = case.hd, case.keys.shape[0] * case.kv_heads * case.page_size
        box = min(case.page_size, 64)
        maps = [tensor_map(t.data_ptr(), rows, hd * 2, box) for t in (case.keys, case.values)]
        smem = 1024 + 128 * hd * 2 + self.ring * 1024 + 256 * (hd // 8 + 1) * 16
        shift = case.page_size.bit_length() - 1
        ints = [ctypes.c_int(v) for v in (case.stride, case.heads, case.kv_heads, shift, work.shape[0])]
        numbers = [*ints, ctypes.c_float(LOG2E / math.sqrt(hd)), ctypes.c_uint32(case.window)]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        arguments = [*maps, case.qkv, case.spans, case.pages, work, out, lse, *numbers]
        self.kernels[hd].launch((min(work.shape[0] * case.kv_heads, sms),), (384,), smem, arguments)


class Flash:
    def __init__(self):
        kinds = ("prefill", "decode")
        built = compile_all([(f"flash_{kind}.cu", "sm_90", []) for kind in kinds])
        self.hopper = Hopper()
        modules = {kind: load(cubin) if cubin else sys.exit(log) for kind, (cubin, log) in zip(kinds, built)}
        self.kernels = {
            ("prefill", fmt, hd): Kernel(modules["prefill"], f"flash_prefill_{fmt}_{hd}")
            for fmt in FORMATS
            for hd in (64, 128)
        }
        self.kernels |= {
            ("decode", fmt, hd): Kernel(modules["decode"], f"flash_decode_{fmt}_{hd}")
            for fmt in FORMATS
            for hd in (64, 128)
        }
        self.teams = None
        self.partials = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        self.counters = torch.zeros(1 << 15, dtype=torch.int32, device="cuda")
        self.maxima = torch.full((1 << 16,), -1, dtype=torch.int32, device="cuda")

    def inputs(self, case):
        return [case.qkv, case.keys, case.values, case.key_scales, case.value_scales, case.spans, case.pages]

    def numbers(self, case, *more):
        scale = ctypes.c_float(LOG2E / math.sqrt(case.hd))
        return [
            *[
                ctypes.c_int(v)
                for v in (case.stride, case.heads, case.kv_heads, case.page_size.bit_length() - 1, *more)
            ],
            scale,
            ctypes.c_uint32(case.window),
        ]

    def prefill(self, case, out, lse, work=None):
        work = work if work is not None else prefill_work(case)
        smem = 4 * TILE * case.hd * 2 + 4 * TILE * 4 + 8 * (case.hd // 2 + 4) * 32 * 4
        kernel = self.kernels["prefill", case.fmt, case.hd]
        kernel.launch(
            (work.shape[0], case.kv_heads),
            (256,),
            smem,
            # Sums wait in shared memory.
            [*self.inputs(case), work, out, lse, *self.numbers(case), ctypes.c_uint32(0)],
        )

    def decode(self, case, out, lse, angles=None, output=0, scales=None):
        cos, sin = angles or (ctypes.c_void_p(0), ctypes.c_void_p(0))
        longest = max(old + new for old, new in case.sequences)
        splits = -(-longest // SPLIT)
        parties = case.kv_heads * -(-case.heads // case.kv_heads // 8)
        threads, smem, _ = decode_shape(
            case.fmt, case.hd, splits * parties * len(case.sequences), longest, self.teams
        )
        kernel = self.kernels["decode", case.fmt, case.hd]
        kernel.launch(
            (splits, parties, len(case.sequences)),
            (threads,),
            smem,
            [
                *self.inputs(case),
                out,
                lse,
                self.partials,
                self.counters,
                *self.numbers(case, splits),
                cos,
                sin,
                ctypes.c_int(output),
                scales if scales is not None else ctypes.c_void_p(0),
                self.maxima,
            ],
        )


def prefill_work(case):
    group = case.heads // case.kv_heads
    work = [
        [i, first, old + first // group]
        for i, (_, new, old, _) in enumerate(case.spans_host)
        for first in range(0, new * group, 128)
    ]
    work.sort(key=lambda w: -w[2])
    return torch.tensor([w[:2] for w in work], dtype=torch.int32, device="cuda")


def run(kernel, case):
    out = torch.full((case.rows, case.heads * case.hd), float("nan"), device="cuda")
    lse = torch.full((case.rows, case.heads), float("nan"), device="cuda")
    kernel(case, out, lse)
    torch.cuda.synchronize()
    return out, lse


def relative(a, b):
    return float((a.double() - b).norm() / b.norm())


def check_hopper(hopper, case, out, lse, want, say):
    """The kernel of Hopper against the bits of the other one, twice: what a run leaves in shared memory must
    not matter."""
    for _ in range(2):
        got, got_lse = run(hopper.prefill, case)
        same = torch.equal(got, out) and torch.equal(got_lse, lse)
        if not same:
            rows = (got != out).any(1).nonzero().flatten().tolist()
            say(
                f"Hopper {case.heads}/{case.kv_heads}x{case.hd} page {case.page_size} window {case.window}: "
                f"{len(rows)} of {case.rows} rows differ, first {rows[:6]}, error {relative(got, want):.1e}, "
                f"NaN {int(got.isnan().sum())}: WRONG"
            )
            return False
    return True


def check_forward(flash, say):
    good = True
    shapes = [(14, 2, 64), (28, 4, 128), (40, 8, 128), (4, 4, 64), (8, 8, 128), (16, 1, 128)]
    for fmt in FORMATS:
        for heads, kv_heads, hd in shapes:
            for page in (16, 64):
                mixed = Case(
                    fmt,
                    heads,
                    kv_heads,
                    hd,
                    [(0, 1), (0, 7), (0, 64), (0, 65), (100, 30), (0, 600), (513, 1), (1500, 40), (2047, 1)],
                    page,
                )
                want, want_lse = mixed.reference()
                out, lse = run(flash.prefill, mixed)
                errors = [relative(out, want), relative(lse, want_lse)]
                if fmt == "bf16":
                    good &= check_hopper(flash.hopper, mixed, out, lse, want, say)
                single = Case(
                    fmt,
                    heads,
                    kv_heads,
                    hd,
                    [(n, 1) for n in (0, 1, 15, 63, 64, 65, 200, 511, 512, 700, 1023, 1024, 1300, 2500)],
                    page,
                )
                want, want_lse = single.reference()
                pre, pre_lse = run(flash.prefill, single)
                dec, dec_lse = run(flash.decode, single)
                errors += [relative(dec, want), relative(dec_lse, want_lse)]
                same = torch.equal(pre, dec) and torch.equal(pre_lse, dec_lse)
                fine = same and all(e < 6e-3 for e in errors)
                good &= fine
                if not fine or page == 16:
                    say(
                        f"{fmt} {heads}/{kv_heads}x{hd} page {page}: "
                        f"errors {' '.join(f'{e:.1e}' for e in errors)}"
                        f" decode = prefill: {same} {'ok' if fine else 'WRONG'}"
                    )
    return good


def check_rotation(flash, say):
    """A decode that rotates and stores the new row itself against one that finds it stored: the same bits."""
    cubin, log = compile_all([("kv.cu", "sm_90", [])])[0]
    writer = Kernel(load(cubin), "rope_write")
    good = True
    for fmt in FORMATS:
        for heads, kv_heads, hd in ((14, 2, 64), (28, 4, 128), (40, 8, 128), (16, 1, 128)):
            for page in (16, 64):
                for lengths in (
                    (0, 1, 15, 16, 63, 64, 65, 200, 511, 512, 700, 1023, 1024, 1300),
                    (0, 1, 16, 63, 64, 200, 300, 511),
                ):
                    case = Case(fmt, heads, kv_heads, hd, [(n, 1) for n in lengths], page)
                    cos, sin = torch.rand(1400, hd // 2, device="cuda"), torch.rand(
                        1400, hd // 2, device="cuda"
                    )
                    before = [
                        t.clone()
                        for t in (case.qkv, case.keys, case.values, case.key_scales, case.value_scales)
                    ]
                    positions = torch.tensor(
                        [old for old, _ in case.sequences], dtype=torch.int32, device="cuda"
                    )
                    slots = torch.tensor(
                        [
                            int(case.pages[at + old // page]) * page + old % page
                            for (_, _, old, at) in case.spans_host
                        ],
                        dtype=torch.int32,
                        device="cuda",
                    )
                    ints = [ctypes.c_uint32(v) for v in (case.rows, case.stride, heads, kv_heads, hd)]
                    warps = case.rows * (heads + 2 * kv_heads)
                    code = {"bf16": 1, "int8": 2, "fp8": 3}[fmt]
                    writer.launch(
                        (-(-warps // 4),),
                        (128,),
                        0,
                        [
                            case.qkv,
                            *ints,
                            positions,
                            cos,
                            sin,
                            slots,
                            ctypes.c_uint32(page),
                            ctypes.c_uint32(code),
                            case.keys,
                            case.values,
                            case.key_scales,
                            case.value_scales,
                        ],
                    )
                    want, want_lse = run(flash.decode, case)
                    stored = [case.keys, case.values, case.key_scales, case.value_scales]
                    case.qkv, case.keys, case.values, case.key_scales, case.value_scales = before
                    got, got_lse = run(lambda *a: flash.decode(*a, (cos, sin)), case)
                    half = torch.zeros(case.rows, heads * hd, dtype=torch.bfloat16, device="cuda")
                    case.qkv, case.keys, case.values, case.key_scales, case.value_scales = before
                    flash.decode(case, half, got_lse, (cos, sin), 1)
                    torch.cuda.synchronize()
                    if len(case.sequences) * kv_heads <= 132:
                        for output, most, kind in ((2, 127.0, torch.int8), (3, 448.0, torch.float8_e4m3fn)):
                            quantized = torch.zeros(case.rows, heads * hd, dtype=kind, device="cuda")
                            scales = torch.zeros(case.rows, device="cuda")
                            flash.decode(case, quantized, got_lse, (cos, sin), output, scales)
                            torch.cuda.synchronize()
                            # torch multiplies by the reciprocal of a number; dividing tensors is exact.
                            scale = want.abs().amax(-1) / torch.full((case.rows,), most, device="cuda")
                            scaled = want * (torch.ones_like(scale) / scale)[:, None]
                            exact = scaled.round().to(torch.int8) if output == 2 else scaled.to(kind)
                            if not (
                                torch.equal(scale, scales)
                                and torch.equal(exact.view(torch.uint8), quantized.view(torch.uint8))
                            ):
                                good = False
                                say(
                                    f"{fmt} {heads}/{kv_heads}x{hd} page {page}: "
                                    f"{output} values differ: WRONG"
                                )
                    same = (
                        torch.equal(want, got)
                        and torch.equal(want_lse, got_lse)
                        and torch.equal(half, want.bfloat16())
                    )
                    rows = lambda t: t.view(torch.uint8).cpu()
                    same = same and all(
                        torch.equal(rows(a), rows(b))
                        for a, b in zip(stored, [case.keys, case.values, case.key_scales, case.value_scales])
                    )
                    good &= same
                    if not same:
                        say(f"{fmt} {heads}/{kv_heads}x{hd} page {page}: rotating inside differs: WRONG")
    return good


def time_decode(flash, fmt, heads, kv_heads, hd, batch, context):
    """Microseconds of one layer's decode attention, over several caches, and its bytes."""
    cases = [Case(fmt, heads, kv_heads, hd, [(context - 1, 1)] * batch) for _ in range(4)]
    outs = torch.empty(batch, heads * hd, device="cuda")
    t = graph_time([(lambda c=c: flash.decode(c, outs, ctypes.c_void_p(0))) for c in cases * 4], 5)
    size = 2 * batch * context * kv_heads * (hd * (2 if fmt == "bf16" else 1) + (0 if fmt == "bf16" else 4))
    return t, size


def time_prefill(flash, fmt, heads, kv_heads, hd, batch, length, page=64):
    """Microseconds of one layer's attention, and its FLOPs; `flash` may be the kernels of Hopper alone."""
    case = Case(fmt, heads, kv_heads, hd, [(0, length)] * batch, page)
    out, lse = torch.empty(case.rows, heads * hd, device="cuda"), torch.empty(case.rows, heads, device="cuda")
    work = prefill_work(case)
    t = graph_time([lambda: flash.prefill(case, out, lse, work)] * 4, 5)
    return t, 2 * batch * length * length * heads * hd


def torch_prefill(heads, hd, batch, length):
    """Microseconds of PyTorch's kernels, heads not shared: pairs of a library and its time."""
    q, k, v = (torch.randn(batch, heads, length, hd, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    for library in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, library)):
            attend = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            yield library, graph_time([attend] * 4, 5)


class Backward:
    """Gradients of whole sequences, packed; with the instructions of Hopper, or with those that are
    everywhere."""

    def __init__(self, hopper=True):
        self.hopper, self.name = hopper, f"backward{' of Hopper' if hopper else ''}"
        modules = []
        for cubin, log in compile_all(
            [("flash_backward.cu", "sm_90a", []), ("flash_backward_hopper.cu", "sm_90a", [])]
        ):
            if cubin is None:
                raise SystemExit(log)
            modules.append(load(cubin))
        self.prepare, self.join = Kernel(modules[0], "flash_backward_prepare"), Kernel(
            modules[1], "flash_backward_join"
        )
        name = "flash_backward_hopper" if hopper else "flash_backward"
        self.kernels = {
            (part, hd): Kernel(modules[hopper], f"{name}_{part}_{hd}")
            for part in ("keys", "queries")
            for hd in (64, 128)
        }

    def run(self, qkv, out, dout, lse, heads, kv_heads, hd, dqkv, workspace):
        rows, stride = qkv.shape
        half_qkv, half_dout, facts, parts_of, by_keys, by_queries, spans, maps = workspace
        ints = lambda *v: [ctypes.c_int(x) for x in v]
        scale = ctypes.c_float(1 / math.sqrt(hd))
        self.prepare.launch(
            (rows,), (128,), 0, [qkv, out, dout, lse, half_qkv, half_dout, facts, *ints(stride, heads, hd)]
        )
        if not self.hopper:
            smem = 2 * 64 * hd * 2 + 4 * 32 * hd * 2 + 2 * 32 * 16
            common = [
                half_qkv,
                half_dout,
                facts,
                spans,
                by_keys,
                dqkv,
                *ints(stride, heads, kv_heads, EVERYTHING),
                scale,
            ]
            self.kernels["keys", hd].launch((by_keys.shape[0], kv_heads), (128,), smem, common)
            self.kernels["queries", hd].launch((by_keys.shape[0], heads), (128,), smem, common)
            return
        group, blocks = heads // kv_heads, by_keys.shape[0]
        share = max(
            s for s in range(1, group + 1) if group % s == 0 and (s == 1 or blocks * heads // s >= 4 * 132)
        )
        smem = 1024 + 4 * 64 * hd * 2 + (4 if hd == 64 else 3) * 2 * 64 * hd * 2
        place = lambda at, column: ctypes.c_void_p(at.data_ptr() + 4 * column)
        if share == group:
            to = [place(dqkv, heads * hd), place(dqkv, (heads + kv_heads) * hd), ctypes.c_uint64(stride)]
        else:
            width = heads // share * hd
            to = [place(parts_of, 0), place(parts_of, rows * width), ctypes.c_uint64(width)]
        self.kernels["keys", hd].launch(
            (heads // share * blocks,),
            (384,),
            smem,
            [*maps, spans, by_keys, *to, *ints(heads, kv_heads, share, EVERYTHING), scale],
        )
        if share < group:
            self.join.launch(
                (rows,),
                (128,),
                0,
                [
                    *to[:2],
                    place(dqkv, heads * hd),
                    ctypes.c_uint64(stride),
                    *ints(group // share, kv_heads, hd),
                ],
            )
        self.kernels["queries", hd].launch(
            (heads * blocks,),
            (384,),
            smem,
            [
                *maps[:2],
                facts,
                spans,
                by_queries,
                dqkv,
                ctypes.c_uint64(stride),
                *ints(heads, kv_heads, EVERYTHING),
                scale,
            ],
        )

    def workspace(self, rows, stride, heads, hd, lengths):
        own = 128 if self.hopper else 64
        spans, work, row = [], [], 0
        for i, n in enumerate(lengths):
            spans.append([row, n, 0, 0])
            work += [(i, p, n) for p in range(0, n, own)]
            row += n
        device = lambda x: torch.tensor(x, dtype=torch.int32, device="cuda")
        empty = lambda *shape: torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        half_qkv, half_dout = empty(rows, stride), empty(rows, heads * hd)
        facts = torch.full((rows, heads, 4), float("nan"), device="cuda")
        parts = torch.full((2, rows, heads * hd), float("nan"), device="cuda")
        order = lambda key: device([[i, p] for i, p, _ in sorted(work, key=key)])
        maps = [
            tensor_map(half_qkv.data_ptr(), rows, stride * 2, 64),
            tensor_map(half_dout.data_ptr(), rows, heads * hd * 2, 64),
            tensor_map(facts.data_ptr(), rows, heads * 16, 64, 16),
        ]
        return (
            half_qkv,
            half_dout,
            facts,
            parts,
            order(lambda w: w[1] - w[2]),
            order(lambda w: -w[1]),
            device(spans),
            maps,
        )


def check_backward(backward, say):
    good = True
    for heads, kv_heads, hd in ((14, 2, 64), (28, 4, 128), (4, 4, 64), (12, 2, 128), (6, 1, 128)):
        lengths = [1, 5, 31, 64, 65, 200, 300]
        rows, stride = sum(lengths), (heads + 2 * kv_heads) * hd
        qkv = torch.randn(rows, stride, device="cuda").bfloat16().float()
        exact = qkv.double().requires_grad_(True)
        outs, lses, row = [], [], 0
        for n in lengths:
            part = exact[row : row + n]
            q = part[:, : heads * hd].view(n, heads, hd)
            k = (
                part[:, heads * hd : (heads + kv_heads) * hd]
                .view(n, kv_heads, hd)
                .repeat_interleave(heads // kv_heads, 1)
            )
            v = (
                part[:, (heads + kv_heads) * hd :]
                .view(n, kv_heads, hd)
                .repeat_interleave(heads // kv_heads, 1)
            )
            s = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(hd)
            s = s.masked_fill(torch.ones(n, n, device="cuda").triu(1).bool(), float("-inf"))
            outs.append(torch.einsum("hqk,khd->qhd", s.softmax(-1), v).reshape(n, -1))
            lses.append(s.logsumexp(-1).T)
            row += n
        out, lse = torch.cat(outs), torch.cat(lses)
        dout = torch.randn(rows, heads * hd, device="cuda").bfloat16().float()
        out.backward(dout.double())
        workspace = backward.workspace(rows, stride, heads, hd, lengths)
        found = []
        for _ in range(2):
            dqkv = torch.full((rows, stride), float("nan"), device="cuda")
            backward.run(
                qkv,
                out.float().detach(),
                dout,
                lse.float().detach().contiguous(),
                heads,
                kv_heads,
                hd,
                dqkv,
                workspace,
            )
            torch.cuda.synchronize()
            found.append(dqkv)
        columns = [0, heads * hd, (heads + kv_heads) * hd, stride]
        errors = [relative(found[0][:, a:b], exact.grad[:, a:b]) for a, b in zip(columns, columns[1:])]
        fine = all(e < 1e-2 for e in errors) and torch.equal(found[0], found[1])
        good &= fine
        say(
            f"{backward.name} {heads}/{kv_heads}x{hd}: errors dq dk dv "
            f"{' '.join(f'{e:.1e}' for e in errors)} {'ok' if fine else 'WRONG'}"
        )
    return good


def time_backward(backward, heads, kv_heads, hd, batch, length):
    rows, stride = batch * length, (heads + 2 * kv_heads) * hd
    qkv, dqkv = torch.randn(rows, stride, device="cuda"), torch.empty(rows, stride, device="cuda")
    out, dout = torch.randn(rows, heads * hd, device="cuda"), torch.randn(rows, heads * hd, device="cuda")
    lse = torch.full((rows, heads), math.log(length), device="cuda")
    workspace = backward.workspace(rows, stride, heads, hd, [length] * batch)
    t = graph_time([lambda: backward.run(qkv, out, dout, lse, heads, kv_heads, hd, dqkv, workspace)] * 2, 5)
    return t, 5 * batch * length * length * heads * hd


def torch_backward(heads, hd, batch, length):
    """Microseconds of PyTorch's kernels, heads not shared: pairs of a library and its time."""
    q, k, v = (
        torch.randn(batch, heads, length, hd, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(q)
    for library in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, library)):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            back = lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)
            for _ in range(3):
                back()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                back()
            end.record()
            torch.cuda.synchronize()
            yield library, begin.elapsed_time(end) * 100
