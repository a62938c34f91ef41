"""Means and spreads over seeds of a study's runs, step by step, and a plot of them.

    python study_curves.py collect STUDY_DIR RECIPE OUT.json [--window 20]
    python study_curves.py plot OUT.json FILE.svg [--methods full,naive,tis,acr] [--title TEXT]

`collect` reads `metrics.jsonl` of every finished run: means over windows of so many steps (of the largest
ratio: the largest of the window), one list for each method, seed and figure; the held-out accuracy where it
was measured. `plot` draws the mean over seeds (of logarithms where the axis has them) in a band of one
sample standard deviation. Needs only the standard library.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

COLOURS = {
    "full": "#57606a",
    "naive": "#d1242f",
    "tis": "#1f6feb",
    "acr": "#1a7f37",
    "decoupled": "#9a6700",
    "acr-uaq": "#8250df",
    "rollout-forward": "#bf3989",
}
# name, title, logarithmic
PANELS = [
    ("accuracy", "held-out accuracy of the policy that is trained", False),
    ("reward", "reward of rollouts (the quantized policy)", False),
    ("kl", "mismatch KL", True),
    ("rho_max", "largest ratio of each window", True),
]


def collect(study, recipe, out, window):
    methods = {}
    for run in sorted(Path(study, recipe).glob("*/seed-*")):
        summary = run / "summary.json"
        if not summary.is_file() or "accuracy_after" not in json.loads(summary.read_text()):
            continue
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        parts = [lines[i : i + window] for i in range(0, len(lines), window)]
        mean = lambda f: [float(f"{statistics.fmean(f(line) for line in part):.4g}") for part in parts]
        largest = lambda f: [float(f"{max(f(line) for line in part):.4g}") for part in parts]
        tests = [(line["step"], line["test_accuracy"]) for line in lines if "test_accuracy" in line]
        methods.setdefault(run.parent.name, {})[run.name.removeprefix("seed-")] = {
            "kl": mean(lambda line: line["mismatch"]["kl"]),
            "rho_max": largest(lambda line: line["mismatch"]["rho_max"]),
            "rho_p999": mean(lambda line: line["mismatch"]["rho_p999"]),
            "reward": mean(lambda line: line["reward"]),
            "clip_fraction_upper": mean(lambda line: line["clip_fraction_upper"]),
            "entropy": mean(lambda line: line["entropy"]),
            "tests": tests,
        }
    text = json.dumps({"recipe": recipe, "window": window, "methods": methods}, separators=(",", ":"))
    Path(out).write_text(text.replace('"seed', '\n"seed').replace('},"', '},\n"') + "\n")


def series(data, method, figure):
    """Steps and, for each, the values of the seeds."""
    runs = data["methods"][method].values()
    if figure == "accuracy":
        steps = [step for step, _ in next(iter(runs))["tests"]]
        return steps, list(zip(*([value for _, value in run["tests"]] for run in runs)))
    columns = list(zip(*(run[figure] for run in runs)))
    return [(i + 0.5) * data["window"] for i in range(len(columns))], columns


def plot(source, path, methods, title):
    data = json.loads(Path(source).read_text())
    methods = [m for m in methods if m in data["methods"]]
    width, height, left, right, top, bottom = 470, 250, 56, 12, 34, 30
    text = lambda x, y, s, more="": f'<text x="{x:.1f}" y="{y:.1f}" {more}>{s}</text>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width} {2 * height + 60}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{2 * width}" height="{2 * height + 60}" fill="white"/>',
        text(left, 22, title, 'font-size="14" font-weight="bold"'),
    ]
    for i, method in enumerate(methods):
        x = left + i * 130
        parts.append(f'<rect x="{x}" y="32" width="12" height="12" fill="{COLOURS[method]}"/>')
        parts.append(text(x + 18, 42, f"{method} ({len(data['methods'][method])})"))
    for panel, (figure, name, logarithmic) in enumerate(PANELS):
        x0, y0 = panel % 2 * width + left, panel // 2 * height + 50 + top
        inner, tall = width - left - right, height - top - bottom
        lines = []
        for method in methods:
            steps, columns = series(data, method, figure)
            # Nothing to see where rho is 1.
            if logarithmic and (figure == "kl" and max(map(max, columns)) < 1e-6):
                continue
            if logarithmic and figure == "rho_max" and max(map(max, columns)) <= 1.0:
                continue
            change = math.log10 if logarithmic else float
            columns = [[change(max(v, 1e-9)) for v in column] for column in columns]
            means = [statistics.fmean(c) for c in columns]
            spread = [statistics.stdev(c) if len(c) > 1 else 0.0 for c in columns]
            lines.append((method, steps, means, spread))
        if not lines:
            continue
        low = min(m - s for _, _, ms, ss in lines for m, s in zip(ms, ss))
        high = max(m + s for _, _, ms, ss in lines for m, s in zip(ms, ss))
        high = min(high, 1.0) if not logarithmic else high
        low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
        last = max(steps[-1] for _, steps, _, _ in lines)
        last = math.ceil(last / 100) * 100
        x_at = lambda x: x0 + x / last * inner
        y_at = lambda y: y0 + tall - (min(max(y, low), high) - low) / (high - low) * tall
        parts.append(text(x0, y0 - 8, name, 'font-weight="bold"'))
        if logarithmic:
            decades = range(math.floor(low), math.ceil(high) + 1)
            ticks = [(math.log10(f) + d, f"{f * 10.0**d:g}") for d in decades for f in (1, 2, 5)]
        else:
            unit = 0.1 if high - low > 0.35 else 0.05 if high - low > 0.15 else 0.02
            ticks = [(i * unit, f"{100 * i * unit:.0f}%") for i in range(int(1 / unit) + 1)]
        for at, label in ticks:
            if low <= at <= high:
                y = y_at(at)
                parts.append(f'<line x1="{x0}" x2="{x0 + inner}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eaeef2"/>')
                parts.append(text(x0 - 6, y + 4, label, 'text-anchor="end"'))
        for step in range(0, last + 1, 200):
            parts.append(text(x_at(step), y0 + tall + 18, step, 'text-anchor="middle"'))
        for method, steps, means, spread in lines:
            over = [f"{x_at(x):.1f},{y_at(m + s):.1f}" for x, m, s in zip(steps, means, spread)]
            under = [f"{x_at(x):.1f},{y_at(m - s):.1f}" for x, m, s in zip(steps, means, spread)]
            band = " ".join(over + under[::-1])
            parts.append(f'<polygon points="{band}" fill="{COLOURS[method]}" fill-opacity="0.12"/>')
        for method, steps, means, _ in lines:
            where = " ".join(f"{x_at(x):.1f},{y_at(m):.1f}" for x, m in zip(steps, means))
            colour = COLOURS[method]
            parts.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    for name in ("study", "recipe", "out"):
        one.add_argument(name)
    one.add_argument("--window", type=int, default=20)
    two = commands.add_parser("plot")
    two.add_argument("source")
    two.add_argument("path")
    two.add_argument("--methods", default="full,naive,tis,acr,rollout-forward")
    two.add_argument("--title", default="")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.study, args.recipe, args.out, args.window)
    else:
        plot(args.source, args.path, args.methods.split(","), args.title)


if __name__ == "__main__":
    main()
