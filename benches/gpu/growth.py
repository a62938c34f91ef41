"""How the cost of a token grows with the context, and that of a step with the model, beside the limits.

    python3 growth.py measure QURL OUT.jsonl [decode] [train] [step]
                                                 runs the benchmarks on the GPU at hand
    python3 growth.py plot OUT.jsonl DIR         draws DIR/growth-{decode,train,step}.svg

Plots are written by hand as SVG: nothing but Python is needed.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

CONTEXTS = [1024, 2048, 4096, 8192, 16384, 32768]
# With all of 7B on one GPU moments have 8 bits.
SHAPES = [
    ("0.5B", "qwen2.5-0.5b", 0.49, ""),
    ("1.5B", "qwen2.5-1.5b", 1.54, ""),
    ("3B", "qwen2.5-3b", 3.09, ""),
    ("7B", "qwen2.5-7b", 7.62, " --recompute --set trainer.pack_once=true --set actor.optim.moments=8bit"),
]


def decode_cases():
    """So many sequences that all contexts fill the same memory."""
    for shape, kv in (("qwen2.5-7b", "int8"), ("qwen2.5-7b", "bf16"), ("qwen2.5-1.5b", "int8")):
        for context in CONTEXTS:
            batch = min(256, 524288 // context)
            yield f"bench rollout --device cuda --shape {shape} --formats int8 --quantize-head --kv {kv} " + (
                f"--batch {batch} --context {context - 128} --rounds 1 --json"
            )


def train_cases():
    for length in CONTEXTS:
        micro = max(8192, length)
        yield f"bench train --device cuda --shape qwen2.5-1.5b --formats bf16 --batch {32768 // length} " + (
            f"--length {length} --micro-tokens {micro} --steps 2 --json"
        )


def step_cases():
    for _, shape, _, more in SHAPES:
        size = "--prompts 32 --n 8 --length 1024 --steps 1"
        yield f"bench step --device cuda --shape {shape} {size}{more} --json"


CASES = {"decode": decode_cases, "train": train_cases, "step": step_cases}


def measure(qurl, out, *parts):
    """Adds a line for every case; whether every benchmark came to its end."""
    good = True
    with open(out, "a") as file:
        for case in (case for part in parts or CASES for case in CASES[part]()):
            run = subprocess.run([qurl, *case.split()], capture_output=True, text=True)
            if run.returncode != 0:
                print(f"{case}: status {run.returncode}: {run.stderr.strip()[-300:]}", flush=True)
                good = False
                continue
            for row in json.loads(run.stdout)["results"]:
                row["command"] = f"qurl {case}"
                file.write(json.dumps(row) + "\n")
            file.flush()
            print(case, flush=True)
    return good


# ---- plots ------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 720, 360, 70, 50, 40
COLOURS = ["#1f6feb", "#d1242f", "#1a7f37"]


def plot(path, title, x_label, y_label, x_ticks, lines):
    """lines: (name, points, dashed); axes are logarithmic."""
    xs = [x for _, points, _ in lines for x, _ in points]
    ys = [y for _, points, _ in lines for _, y in points]
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    first, last = math.log2(min(xs)), math.log2(max(xs))
    x_at = lambda x: LEFT + (math.log2(x) - first) / (last - first) * (WIDTH - LEFT - 190)
    y_at = lambda y: HEIGHT - BOTTOM - (math.log10(y) - low) / (high - low) * (HEIGHT - BOTTOM - TOP)
    text = lambda x, y, s, more="": f'<text x="{x:.1f}" y="{y:.1f}" {more}>{s}</text>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 22, title, 'font-size="14" font-weight="bold"'),
    ]
    for decade in range(low, high + 1):
        for factor in (1, 2, 5):
            y = factor * 10.0**decade
            if not 10.0**low <= y <= 10.0**high:
                continue
            at, shade = y_at(y), "#d0d7de" if factor == 1 else "#eaeef2"
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - 190}" y1="{at:.1f}" y2="{at:.1f}" stroke="{shade}"/>'
            )
            parts.append(text(LEFT - 6, at + 4, f"{y:g}", 'text-anchor="end"'))
    for x, name in x_ticks:
        parts.append(text(x_at(x), HEIGHT - BOTTOM + 18, name, 'text-anchor="middle"'))
    parts.append(text((LEFT + WIDTH - 190) / 2, HEIGHT - 10, x_label, 'text-anchor="middle"'))
    parts.append(
        text(14, HEIGHT / 2, y_label, f'text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})"')
    )
    names = list(dict.fromkeys(name for name, _, _ in lines))
    for name, points, dashed in lines:
        colour = COLOURS[names.index(name)]
        where = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        parts.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if not dashed:
            parts += [
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3" fill="{colour}"/>' for x, y in points
            ]
    for i, name in enumerate(names):
        parts.append(
            f'<rect x="{WIDTH - 178}" y="{TOP + 22 * i}" width="12" height="12" fill="{COLOURS[i]}"/>'
        )
        parts.append(text(WIDTH - 160, TOP + 10 + 22 * i, name))
    parts.append(text(WIDTH - 178, TOP + 16 + 22 * len(names), "dashed: the limit"))
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n")


def both(name, points):
    """points: (x, measured, limit)."""
    points = sorted(points)
    return [(name, [(x, y) for x, y, _ in points], False), (name, [(x, z) for x, _, z in points], True)]


def plots(source, folder):
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    contexts = [(c, f"{c // 1024}k") for c in CONTEXTS]
    micros = lambda row: (1e6 / row["tokens_per_s"], 1e6 / row["limit_tokens_per_s"])
    decode = {}
    for row in rows:
        if "context" in row:
            name = row["shape"].removeprefix("qwen2.5-").upper() + f", {row['kv_format']} cache"
            decode.setdefault(name, []).append((row["context"] + 128, *micros(row)))
    lines = [line for name, points in decode.items() for line in both(name, points)]
    plot(
        f"{folder}/growth-decode.svg",
        "Decode with int8 weights, one H200",
        "context",
        "us per token",
        contexts,
        lines,
    )
    train = [(row["length"], *micros(row)) for row in rows if row["case"] == "train"]
    plot(
        f"{folder}/growth-train.svg",
        "Training 1.5B in bf16, one H200",
        "length of sequences",
        "us per token",
        contexts,
        both("1.5B", train),
    )
    sizes = {shape: size for _, shape, size, _ in SHAPES}
    step = []
    for row in rows:
        if row["case"] == "step":
            limits = [phase["limit_s"] or 0 for phase in row["phases"].values()]
            step.append((sizes[row["shape"]], row["seconds"], sum(limits)))
    if len(step) < 2:
        print("fewer than two steps were measured: no plot of them")
        return
    plot(
        f"{folder}/growth-step.svg",
        "A GRPO step, 256 responses of 1024 tokens, one H200",
        "parameters",
        "seconds",
        [(size, name) for name, _, size, _ in SHAPES],
        both("step", step),
    )


if __name__ == "__main__":
    given = sys.argv[1:]
    known = len(given) == 3 and given[0] == "plot" or len(given) >= 3 and given[0] == "measure"
    if not known or not CASES.keys() >= set(given[3:]):
        sys.exit(__doc__)
    if sys.argv[1] == "plot":
        plots(*sys.argv[2:])
    elif not measure(*sys.argv[2:]):
        sys.exit(1)
