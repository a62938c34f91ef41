"""Our speed on a CPU beside llama.cpp's and TRL's, measured in one alternating run.

    python compare_cpu.py --qurl target/release/qurl --python venv/bin/python --dir /tmp/peers

Decoding and prompts of Qwen2.5-0.5B's shape beside llama.cpp, whole GRPO steps beside TRL. Each round runs
every contender once, each in a process of its own; every other round goes backwards, so that a machine that
slows down or speeds up meanwhile treats all alike. Printed are medians over the rounds and our speed against
the peer's fastest variant in the same number format or a wider one. llama.cpp is measured with and without
flash attention, and at batch 1, where f16 weights may beat bf16 and one thread two, in these ways, too.

Needs only the standard library; `--python` names the interpreter that has the peers, `--dir` a place for
their files. `benches/peers/cpu.sh` runs it and keeps what it prints.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from compare_train import processor

HERE = Path(__file__).resolve().parent


class Sizes(NamedTuple):
    """What is measured."""

    # Contexts in tokens with their batches, and tokens that are decoded.
    contexts: dict[int, tuple[int, ...]]
    new: int
    # Tokens of the prompt whose speed is measured.
    prompt: int
    # Shape, prompts, responses to each, tokens of a prompt and of a response, timed steps.
    steps: tuple[tuple[str, int, int, int, int, int], ...]


FULL = Sizes(
    contexts={128: (1, 8, 32), 8192: (1, 8)},
    new=16,
    prompt=512,
    steps=(("default", 32, 16, 16, 48, 3), ("qwen2.5-0.5b", 2, 4, 64, 64, 1)),
)
# Enough to see that everything runs, on a busy machine, too.
DRY = Sizes(
    contexts={32: (1, 2), 64: (1,)},
    new=2,
    prompt=32,
    steps=(("default", 2, 2, 8, 8, 1), ("qwen2.5-0.5b", 1, 2, 8, 8, 1)),
)
# Our number formats, from wide to narrow.
FORMATS = ["f32", "bf16", "int8", "int8, cache too"]
# Which of them llama.cpp's weights and cache are compared with.
LLAMA_FORMATS = {
    ("bf16", "f16"): "bf16",
    ("f16", "f16"): "bf16",
    ("q8_0", "f16"): "int8",
    ("q8_0", "q8_0"): "int8, cache too",
}


class Contender:
    """A command and how to read figures from what it prints: (work, format, variant, tokens/s, note)."""

    def __init__(self, name, ours, command, read):
        self.name, self.ours, self.command, self.read = name, ours, command, read

    def run(self):
        """All figures, and the document they are from."""
        command = [str(word) for word in self.command]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        except OSError as error:
            sys.exit(f"{self.name}: cannot start {command[0]}: {error.strerror}")
        if done.returncode != 0:
            sys.exit(f"{self.name}: exit {done.returncode} from {' '.join(command)}")
        try:
            document = json.loads(done.stdout)
            return [figure for row in document["results"] for figure in self.read(row)], document
        except (ValueError, KeyError) as error:
            sys.exit(f"{self.name}: no result ({error}) in what it printed:\n{done.stdout}")


def decode_work(batch, context):
    return f"decode 0.5B, batch {batch}, context {context}"


def our_rollout(row):
    kind = "int8, cache too" if row["kv_format"] == "int8" else row["format"]
    if "prompt" in row:
        note = f"{row['prefill_tokens_per_s'] / row['prefill_limit_tokens_per_s']:.0%} of the FLOPs"
        yield f"prompt 0.5B, {row['prompt']} tokens", kind, "", row["prefill_tokens_per_s"], note
    else:
        note = f"{row['gb_per_s']:.1f} of {row['peak_gb_per_s']:.1f} GB/s, {row['share']:.0%} of the limit"
        yield decode_work(row["batch"], row["context"]), kind, "", row["tokens_per_s"], note


def llama(row):
    kind = LLAMA_FORMATS[row["weights"], row["cache"]]
    variant = f"{row['weights']}, flash {row['flash']}, {row['threads']} threads"
    if row["case"] == "prompt":
        yield f"prompt 0.5B, {row['prompt']} tokens", kind, variant, row["tokens_per_s"], ""
    else:
        note = f"{row['gb_per_s']:.1f} GB/s"
        yield decode_work(row["batch"], row["context"]), kind, variant, row["tokens_per_s"], note


def step_work(shape, prompts, n, length):
    return f"GRPO step, {shape}, {prompts} x {n} responses of {length}"


def our_step(row):
    phases = {name: phase["seconds"] for name, phase in row["phases"].items()}
    note = f"{row['kv_format']} cache, {row['seconds']:.3f} s: " + ", ".join(
        f"{name} {phases[name]:.3f}" for name in phases
    )
    work = step_work(row["shape"], row["prompts"], row["n"], row["length"])
    yield work, row["format"], "", row["response_tokens"] / row["seconds"], note


def trl_step(row):
    note = f"{row['seconds']:.3f} s: rollout {row['rollout_s']:.3f}, rest {row['rest_s']:.3f}"
    work = step_work(row["shape"], row["prompts"], row["n"], row["length"])
    kind = row["variant"].split("-")[0]
    yield work, kind, row["variant"], row["response_tokens_per_s"], note


def rollout_contenders(options, sizes, first):
    ours = [options.qurl, "bench", "rollout", "--device", "cpu", "--quantize-head", "--rounds", 1, "--json"]
    theirs = [options.python, HERE / "decode_llama_cpp.py", "--dir", options.dir, "--json"]
    theirs += ["--new", sizes.new, "--flash", "on", "off"]

    def our(name, formats, *rest):
        return Contender(f"qurl {name}", True, [*ours, "--formats", formats, *rest], our_rollout)

    def their(weights, threads, *rest):
        name = f"llama.cpp {weights}, {threads} threads"
        return Contender(name, False, [*theirs, "--weights", weights, "--threads", threads, *rest], llama)

    yield our("prompt", "bf16,int8", "--kv", "bf16", "--prompt", sizes.prompt, "--new", 2, "--batch", 1)
    for weights in ("bf16", "q8_0"):
        yield their(weights, options.threads, "--prompt", sizes.prompt, "--batch", "--context")
    for context, batches in sizes.contexts.items():
        at = ["--context", context, "--new", sizes.new, "--batch", ",".join(map(str, batches))]
        yield our(f"at {context}", "bf16,int8", "--kv", "bf16", *at)
        yield our(f"at {context}, int8 cache", "int8", "--kv", "int8", *at)
        at = ["--context", context, "--sequences", max(batches), "--batch"]
        yield their("bf16", options.threads, *at, *batches)
        yield their("q8_0", options.threads, *at, *batches, "--cache", "f16", "q8_0")
        yield their("f16", options.threads, *at, 1)
        if first:
            yield their("f16", 1, *at, 1)
            yield their("q8_0", 1, *at, 1)


def step_contenders(options, sizes):
    for shape, prompts, n, prompt, length, steps in sizes.steps:
        same = ["--shape", shape, "--prompts", prompts, "--n", n, "--prompt", prompt, "--length", length]
        same += ["--steps", steps, "--json"]
        # A large model in f32 takes minutes and is nobody's choice where there is bf16.
        for kind in ("f32", "bf16", "int8") if shape == "default" else ("bf16", "int8"):
            # Training in f32 goes with rollouts in f32, in bf16 with all others.
            compute = f"trainer.compute=\"{'f32' if kind == 'f32' else 'bf16'}\""
            ours = [options.qurl, "bench", "step", "--device", "cpu", "--format", kind, "--set", compute]
            ours += ["--mini-batches", 1, "--max-num-seqs", prompts * n]
            yield Contender(f"qurl step {shape} {kind}", True, [*ours, *same], our_step)
        for variant in options.variants:
            command = [
                options.python,
                HERE / "step_trl.py",
                "--variant",
                variant,
                "--threads",
                options.threads,
            ]
            yield Contender(f"TRL step {shape} {variant}", False, [*command, *same], trl_step)


class Table:
    """Every figure of every round."""

    def __init__(self):
        # work -> (ours, format, variant) -> [(tokens/s, note)]
        self.works = defaultdict(lambda: defaultdict(list))

    def add(self, ours, figure):
        work, kind, variant, speed, note = figure
        self.works[work][ours, kind, variant].append((speed, note))

    def median(self, work, key):
        """The middle figure with its note (the lower middle of an even count)."""
        figures = sorted(self.works[work][key])
        return figures[(len(figures) - 1) // 2]

    def pairs(self, work):
        """Our formats beside the peer's fastest in that format or a wider one: format, tokens/s of both, and
        the peer's variant."""
        entries = self.works[work]
        for key in sorted((k for k in entries if k[0]), key=lambda k: FORMATS.index(k[1])):
            wide = FORMATS[: FORMATS.index(key[1]) + 1]
            peers = [k for k in entries if not k[0] and k[1] in wide]
            if peers:
                best = max(peers, key=lambda k: self.median(work, k)[0])
                yield key[1], self.median(work, key)[0], self.median(work, best)[0], best[2]

    def print(self):
        for work in self.works:
            print(f"\n{work}")
            for (ours, kind, variant), figures in self.works[work].items():
                speeds = [speed for speed, _ in figures]
                speed, note = self.median(work, (ours, kind, variant))
                name = f"QuRL {kind}" if ours else f"  peer {kind}: {variant}"
                print(
                    f"  {name:52} {speed:9,.1f} tokens/s  {min(speeds):9,.1f} to {max(speeds):9,.1f} "
                    f"({len(speeds)})  {note}"
                )
        print("\n| work | format | QuRL tokens/s | peer tokens/s | ratio | the peer's fastest |")
        print("|---|---|---|---|---|---|")
        for work in self.works:
            for kind, ours, theirs, variant in self.pairs(work):
                print(f"| {work} | {kind} | {ours:,.1f} | {theirs:,.1f} | {ours / theirs:.2f} | {variant} |")


def run_rounds(table, rounds, contenders, log):
    for number in range(rounds):
        entrants = list(contenders(number == 0))
        for contender in entrants if number % 2 == 0 else reversed(entrants):
            start = time.perf_counter()
            figures, document = contender.run()
            if log:
                json.dump({"round": number + 1, "contender": contender.name, **document}, log)
                log.write("\n")
                log.flush()
            seconds = time.perf_counter() - start
            print(f"round {number + 1}  {contender.name:32} {seconds:5.1f} s", file=sys.stderr)
            for figure in figures:
                table.add(contender.ours, figure)


def main():
    parser = argparse.ArgumentParser(description="our speed on a CPU beside llama.cpp's and TRL's")
    parser.add_argument("--qurl", required=True, help="the qurl binary (a release build)")
    parser.add_argument("--python", default=sys.executable, help="a Python that has llama-cpp-python and trl")
    parser.add_argument("--dir", type=Path, required=True, help="for llama.cpp's model files and contexts")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of decoding and prompts; 0 leaves them out"
    )
    parser.add_argument("--step-rounds", type=int, default=1, help="rounds of GRPO steps; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--variants", nargs="+", default=["f32", "bf16-autocast", "bf16-pure"], help="TRL's")
    parser.add_argument("--dry", action="store_true", help="sizes that only show whether everything runs")
    parser.add_argument("--log", type=Path, help="file for everything that every run printed, as JSON lines")
    options = parser.parse_args()
    if min(options.rounds, options.step_rounds) < 0 or options.threads < 1:
        parser.error("--rounds and --step-rounds must not be negative, --threads at least 1")

    sizes = DRY if options.dry else FULL
    table = Table()
    log = options.log.open("w") if options.log else None
    run_rounds(table, options.rounds, lambda first: rollout_contenders(options, sizes, first), log)
    run_rounds(table, options.step_rounds, lambda _: step_contenders(options, sizes), log)
    rounds = f"{options.rounds} rounds of decoding and prompts, {options.step_rounds} of steps"
    print(f"{processor()}, {options.threads} threads; {rounds}; medians, lowest to highest (rounds)")
    table.print()


if __name__ == "__main__":
    main()
