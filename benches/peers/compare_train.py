"""Our training speed beside PyTorch's, measured in one alternating run.

    python compare_train.py --qurl target/release/qurl --python venv/bin/python

Each round runs every contender once, each in a process of its own; every other round goes
backwards, so that a machine that slows down or speeds up meanwhile treats all alike. Printed
are medians over the rounds and, for each number format, our speed and peak memory against
PyTorch's fastest variant of that format. Peak memory is what the operating system reports for
the finished process, for both sides alike. Needs only the standard library; `--python` names
the interpreter that has torch.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

TORCH_SCRIPT = Path(__file__).resolve().parent / "train_torch.py"
TORCH_VARIANTS = ("f32-eager", "f32-sdpa", "bf16-autocast", "bf16-pure")


class Contender:
    """One command to run each round, and what it reported."""

    def __init__(self, name, number_format, ours, command):
        self.name, self.format, self.ours, self.command = name, number_format, ours, command
        self.speeds, self.peaks_mb = [], []

    def run(self):
        try:
            process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            sys.exit(f"{self.name}: cannot start {self.command[0]}: {error.strerror}")
        output = process.stdout.read()
        process.stdout.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            sys.exit(f"{self.name}: exit {process.returncode} from {' '.join(self.command)}")
        try:
            results = json.loads(output)["results"]
            speed = next(r["tokens_per_s"] for r in results if r["format"] == self.format)
        except (ValueError, KeyError, StopIteration):
            sys.exit(f"{self.name}: no {self.format} result in what it printed:\n{output}")
        self.speeds.append(speed)
        self.peaks_mb.append(usage.ru_maxrss * 1024 / 1e6)
        return speed

    def summary(self):
        return {
            "name": self.name,
            "format": self.format,
            "tokens_per_s": statistics.median(self.speeds),
            "rounds_tokens_per_s": self.speeds,
            "peak_rss_mb": statistics.median(self.peaks_mb),
        }


def contenders(options):
    steps = str(options.steps)
    for number_format in options.formats:
        yield Contender(
            f"qurl {number_format}",
            number_format,
            True,
            [options.qurl, "bench", "train", "--formats", number_format, "--steps", steps, "--json"],
        )
        for variant in TORCH_VARIANTS:
            if not variant.startswith(number_format):
                continue
            command = [options.python, str(TORCH_SCRIPT), "--variant", variant, "--steps", steps, "--json"]
            yield Contender(f"torch {variant}", number_format, False, command)
            if options.compiled and variant != "f32-eager":
                yield Contender(f"torch {variant} compiled", number_format, False, command + ["--compile"])


def judge(entrants, number_format):
    """Our figures against PyTorch's fastest variant of the format."""
    ours = next(c.summary() for c in entrants if c.ours and c.format == number_format)
    rivals = [c.summary() for c in entrants if not c.ours and c.format == number_format]
    best = max(rivals, key=lambda r: r["tokens_per_s"])
    return {
        "format": number_format,
        "best_peer": best["name"],
        "speed_ratio": ours["tokens_per_s"] / best["tokens_per_s"],
        "memory_ratio": ours["peak_rss_mb"] / best["peak_rss_mb"],
    }


def processor():
    """The processor's name where the system says it, else the architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def main():
    parser = argparse.ArgumentParser(
        description="our training speed beside PyTorch's, in one alternating run"
    )
    parser.add_argument("--qurl", required=True, help="the qurl binary (a release build)")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps per run")
    parser.add_argument("--formats", nargs="+", choices=("f32", "bf16"), default=["f32", "bf16"])
    parser.add_argument("--compiled", action="store_true", help="also PyTorch through torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")

    entrants = list(contenders(options))
    for number in range(options.rounds):
        for contender in entrants if number % 2 == 0 else reversed(entrants):
            speed = contender.run()
            print(f"round {number + 1}  {contender.name:32} {speed:8,.0f} tokens/s", file=sys.stderr)

    verdicts = [judge(entrants, f) for f in options.formats]
    if options.json:
        json.dump(
            {
                "machine": {"processor": processor(), "cores": os.cpu_count()},
                "rounds": options.rounds,
                "steps": options.steps,
                "results": [c.summary() for c in entrants],
                "verdicts": verdicts,
            },
            sys.stdout,
            indent=1,
        )
        print()
        return
    print(f"{'':32} {'tokens/s':>9} {'lowest':>8} {'highest':>8} {'peak MB':>8}")
    for contender in entrants:
        s = contender.summary()
        print(
            f"{s['name']:32} {s['tokens_per_s']:9,.0f} {min(contender.speeds):8,.0f} "
            f"{max(contender.speeds):8,.0f} {s['peak_rss_mb']:8,.0f}"
        )
    for v in verdicts:
        print(
            f"{v['format']}: {v['speed_ratio']:.2f} x the speed and {v['memory_ratio']:.2f} x the memory "
            f"of {v['best_peer']}, PyTorch's fastest"
        )


if __name__ == "__main__":
    main()
