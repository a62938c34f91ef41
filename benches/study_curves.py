"""Figures of a study's runs over steps, and a plot of them.

    python study_curves.py collect STUDY_DIR RECIPE OUT.json [--window 20]
    python study_curves.py plot FILE.svg OUT.json[=TITLE] ... [--methods full,naive,tis,acr]

`collect` reads `metrics.jsonl` of every finished run: means over windows of so many steps (of the largest
ratio: the largest of the window), one list for each method, seed and figure; the held-out accuracy where it
was measured. `plot` draws a column for each file: every seed as a line, or, from five seeds on, the mean over
seeds (of logarithms where the axis has them) in a band of one sample standard deviation. Needs only the
standard library.
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
    ("accuracy", "held-out accuracy", False),
    ("kl", "mismatch KL", True),
    ("rho_max", "largest ratio of a window", True),
]
# Of fewer seeds every one is drawn by itself: a mean of two says nothing of either.
BAND_FROM = 5


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
    runs = list(data["methods"][method].values())
    if figure == "accuracy":
        values = zip(*([value for _, value in run["tests"]] for run in runs))
        return [step for step, _ in runs[0]["tests"]], list(values)
    columns = list(zip(*(run[figure] for run in runs)))
    return [(i + 0.5) * data["window"] for i in range(len(columns))], columns


def lines_of(data, methods, figure, logarithmic):
    """(method, steps, values of the seeds at each), as the axis has them; none where KL is 0 and rho is 1."""
    found = []
    for method in [m for m in methods if m in data["methods"]]:
        steps, columns = series(data, method, figure)
        nothing = {"kl": 1e-6, "rho_max": 1.0}.get(figure, -1.0)
        if max(map(max, columns)) > nothing:
            change = (lambda v: math.log10(max(v, 1e-6))) if logarithmic else float
            found.append((method, steps, [[change(v) for v in column] for column in columns]))
    return found


def panel(parts, lines, box, low, high, last, name, logarithmic):
    """Draws a panel into a box (left, top, width, height)."""
    x0, y0, wide, tall = box
    x_at = lambda x: x0 + x / last * wide
    y_at = lambda y: y0 + tall - (min(max(y, low), high) - low) / (high - low) * tall
    text = lambda x, y, s, more="": parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {more}>{s}</text>')
    text(x0, y0 - 8, name, 'font-weight="bold"')
    if logarithmic:
        decades = range(math.floor(low), math.ceil(high) + 1)
        ticks = [(float(d), f"{10.0**d:g}") for d in decades]
    else:
        ticks = [(i / 5, f"{20 * i}%") for i in range(6)]
    for at, label in ticks:
        if low <= at <= high:
            y = y_at(at)
            parts.append(f'<line x1="{x0}" x2="{x0 + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d8dee4"/>')
            text(x0 - 6, y + 4, label, 'text-anchor="end"')
    for step in range(0, last + 1, 200):
        text(x_at(step), y0 + tall + 16, step, 'text-anchor="middle"')
    draw = lambda steps, values, colour, more: parts.append(
        f'<polyline points="{" ".join(f"{x_at(x):.1f},{y_at(v):.1f}" for x, v in zip(steps, values))}" '
        f'fill="none" stroke="{colour}" {more}/>'
    )
    for method, steps, columns in lines:
        colour = COLOURS[method]
        if len(columns[0]) < BAND_FROM:
            for i, values in enumerate(zip(*columns)):
                dash = f' stroke-dasharray="{2 + 3 * i} 2"' if i else ""
                draw(steps, values, colour, f'stroke-width="1.6"{dash}')
            continue
        mean, spread = [statistics.fmean(c) for c in columns], [statistics.stdev(c) for c in columns]
        edge = [(x, m + s) for x, m, s in zip(steps, mean, spread)]
        edge += [(x, m - s) for x, m, s in zip(steps, mean, spread)][::-1]
        band = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in edge)
        parts.append(f'<polygon points="{band}" fill="{colour}" fill-opacity="0.12"/>')
        draw(steps, mean, colour, 'stroke-width="1.8"')


def plot(path, sources, methods):
    columns = []
    for source in sources:
        file, _, title = source.partition("=")
        columns.append((title, json.loads(Path(file).read_text())))
    width, height, left, right, top, bottom = 470, 210, 60, 14, 30, 26
    tall = len(PANELS) * height + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(columns) * width} {tall}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{len(columns) * width}" height="{tall}" fill="white"/>',
    ]
    shown = [m for m in methods if any(m in data["methods"] for _, data in columns)]
    for i, method in enumerate(shown):
        x = left + i * 120
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{COLOURS[method]}"/>')
        parts.append(f'<text x="{x + 18}" y="20">{method}</text>')
    for row, (figure, name, logarithmic) in enumerate(PANELS):
        drawn = [lines_of(data, methods, figure, logarithmic) for _, data in columns]
        values = [v for lines in drawn for _, _, cs in lines for column in cs for v in column]
        low, high = (min(values), max(values)) if logarithmic else (0.0, 1.0)
        low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)
        last = max(steps[-1] for lines in drawn for _, steps, _ in lines)
        last = math.ceil(last / 100) * 100
        for column, ((title, _), lines) in enumerate(zip(columns, drawn)):
            if row == 0:
                x = column * width + left
                parts.append(f'<text x="{x}" y="48" font-size="14" font-weight="bold">{title}</text>')
            corner = (column * width + left, row * height + 54 + top)
            box = (*corner, width - left - right, height - top - bottom)
            panel(parts, lines, box, low, high, last, name, logarithmic)
    Path(path).write_text("\n".join([*parts, "</svg>"]) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect")
    for name in ("study", "recipe", "out"):
        one.add_argument(name)
    one.add_argument("--window", type=int, default=20)
    two = commands.add_parser("plot")
    two.add_argument("path")
    two.add_argument("sources", nargs="+")
    two.add_argument("--methods", default="full,naive,tis,acr")
    args = parser.parse_args()
    if args.command == "collect":
        collect(args.study, args.recipe, args.out, args.window)
    else:
        plot(args.path, args.sources, args.methods.split(","))


if __name__ == "__main__":
    main()
