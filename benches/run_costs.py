"""What checkpoints and logs cost a training run.

    python run_costs.py --qurl target/release/qurl [--recipe FILE] [--steps 30] [--rounds 3]

Two figures for each, because a stall and a slow-down are different things:

* the share of the steps' time that the run itself waited, read off the timings in `metrics.jsonl`
  (phases `checkpoint` and `log`; the held-out tests are left out of the whole);
* what the run loses altogether, the work of the thread that writes included: the same steps with
  and without checkpoints (or rollouts), in alternating rounds, medians compared.

The second needs a quiet machine; the rounds are printed so that noise can be judged. Needs only
the standard library.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

VARIANTS = {
    "as it is": [],
    "no checkpoints": ["--set", "trainer.save_freq=0"],
    "no rollouts": ["--set", "run.rollout_log_freq=0"],
}


def run(arguments, extra, directory):
    """Seconds of the steps after the first, and of their phases."""
    command = [arguments.qurl, "train", *([arguments.recipe] if arguments.recipe else [])]
    command += ["--steps", str(arguments.steps), "--run", str(directory), "--quiet", "--json", *extra]
    command += [word for setting in arguments.set for word in ("--set", setting)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"exit {done.returncode} from {' '.join(command)}")
    phases = {}
    # The first step has memory to touch for the first time; every variant pays for that alike.
    for line in (directory / "metrics.jsonl").read_text().splitlines()[1:]:
        for phase, seconds in json.loads(line)["timing"].items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    phases["steps"] = phases["total"] - phases.get("test", 0.0)
    return phases


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qurl", required=True, help="the command")
    parser.add_argument("--recipe", help="a recipe; the embedded default without")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--set", action="append", default=[], help="as for `qurl train`, such as a shorter warm start"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON document")
    arguments = parser.parse_args()
    results = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        for round_number in range(arguments.rounds):
            order = list(VARIANTS.items())
            for name, extra in order if round_number % 2 == 0 else reversed(order):
                directory = Path(scratch) / f"{name.replace(' ', '-')}-{round_number}"
                results[name].append(run(arguments, extra, directory))
                print(f"{name}: {results[name][-1]['steps']:.2f} s", file=sys.stderr)
    waited = {
        phase: statistics.median(r.get(phase, 0.0) / r["steps"] for r in results["as it is"])
        for phase in ("checkpoint", "log")
    }
    whole = {name: statistics.median(r["steps"] for r in rounds) for name, rounds in results.items()}
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "waited": waited, "seconds": whole, "rounds": results}))
        return
    seconds_per_step = whole["as it is"] / (arguments.steps - 1)
    print(f"a step takes {seconds_per_step:.3f} s")
    for phase, share in waited.items():
        print(f"waited for {phase}: {100 * share:.3f}% of the steps")
    for name in ("no checkpoints", "no rollouts"):
        lost = whole["as it is"] / whole[name] - 1
        print(f"against {name}: {100 * lost:+.2f}%")
    for name, rounds in results.items():
        print(f"{name}: {', '.join(format(r['steps'], '.2f') for r in rounds)} s")


if __name__ == "__main__":
    main()
