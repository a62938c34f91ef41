"""Our speed on a CPU beside llama.cpp's and TRL's, measured in one alternating run.

    python compare_cpu.py --qurl target/release/qurl --python venv/bin/python --dir /tmp/peers

Decoding and prompts of Qwen2.5-0.5B's shape beside llama.cpp, whole GRPO steps beside TRL. Each round runs
every contender once, each in a process of its own; every other round goes backwards, so that a machine that
slows down or speeds up meanwhile treats all alike. Printed are medians over the rounds and our speed against
the peer's fastest variant in the same number format or a wider one. llama.cpp is measured with and without
flash attention, with weights in bf16 and f16, and in the first round also with one thread.

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

from compare_train import processor

HERE = Path(__file__).resolve().parent
SHORT, LONG, NEW = 128, 8192, 32
SHORT_BATCHES, LONG_BATCHES = (1, 8, 32), (1, 8)
PROMPT = 512
# Our number formats, from wide to narrow.
FORMATS = ["f32", "bf16", "int8", "int8, cache too"]
# Which of them llama.cpp's weights and cache are compared with.
LLAMA_FORMATS = {
    ("bf16", "f16"): "bf16",
    ("f16", "f16"): "bf16",
    ("q8_0", "f16"): "int8",
    ("q8_0", "q8_0"): "int8, cache too",
}
# shape, prompts, responses to each, tokens of a prompt and of a response
STEPS = {
    "default": ("default", 32, 16, 16, 48),
    "0.5b": ("qwen2.5-0.5b", 2, 4, 64, 64),
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
    note = f"{row['seconds']:.3f} s: " + ", ".join(f"{name} {phases[name]:.3f}" for name in phases)
    work = step_work(row["shape"], row["prompts"], row["n"], row["length"])
    yield work, row["format"], "", row["response_tokens"] / row["seconds"], note


def trl_step(row):
    note = f"{row['seconds']:.3f} s: rollout {row['rollout_s']:.3f}, rest {row['rest_s']:.3f}"
    work = step_work(row["shape"], row["prompts"], row["n"], row["length"])
    kind = row["variant"].split("-")[0]
    yield work, kind, row["variant"], row["response_tokens_per_s"], note


def rollout_contenders(options, first):
    ours = [options.qurl, "bench", "rollout", "--device", "cpu", "--quantize-head", "--rounds", "1", "--json"]
    batches = {SHORT: ",".join(map(str, SHORT_BATCHES)), LONG: ",".join(map(str, LONG_BATCHES))}
    theirs = [options.python, HERE / "decode_llama_cpp.py", "--dir", options.dir, "--json", "--new", NEW]
    theirs += ["--flash", "on", "off", "--threads", *([options.threads, 1] if first else [options.threads])]

    def our(name, *rest):
        return Contender(f"qurl {name}", True, [*ours, *rest], our_rollout)

    def their(weights, cache, *rest):
        command = [*theirs, "--weights", weights, "--cache", *cache, *rest]
        return Contender(f"llama.cpp {weights}", False, command, llama)

    short = ["--context", SHORT, "--batch", *SHORT_BATCHES, "--prompt", PROMPT]
    long = ["--context", LONG, "--batch", *LONG_BATCHES]
    yield our("prompts", "--formats", "bf16,int8", "--prompt", PROMPT, "--new", 2, "--batch", 1)
    yield our("short", "--formats", "bf16,int8", "--context", SHORT, "--new", NEW, "--batch", batches[SHORT])
    for weights in options.weights:
        yield their(weights, ["f16"], *short)
    yield our("long", "--formats", "bf16,int8", "--context", LONG, "--new", NEW, "--batch", batches[LONG])
    int8 = ["--formats", "int8", "--kv", "int8", "--new", NEW]
    yield our("long, int8 cache", *int8, "--context", LONG, "--batch", batches[LONG])
    for weights in options.weights:
        yield their(weights, ["f16", "q8_0"] if weights == "q8_0" else ["f16"], *long)


def step_contenders(options):
    for size in options.steps:
        shape, prompts, n, prompt, length = STEPS[size]
        lengths = ["--shape", shape, "--prompts", prompts, "--n", n, "--prompt", prompt, "--length", length]
        timed = ["--steps", 5 if size == "default" else 1, "--json"]
        for kind in ("f32", "bf16", "int8"):
            ours = [options.qurl, "bench", "step", "--device", "cpu", "--mini-batches", 1, "--format", kind]
            # Training in f32 goes with rollouts in f32, in bf16 with all others.
            ours += [
                "--set",
                f"trainer.compute=\"{'f32' if kind == 'f32' else 'bf16'}\"",
                "--max-num-seqs",
                512,
            ]
            yield Contender(f"qurl step {size} {kind}", True, [*ours, *lengths, *timed], our_step)
        for variant in options.variants:
            command = [
                options.python,
                HERE / "step_trl.py",
                "--variant",
                variant,
                "--threads",
                options.threads,
            ]
            yield Contender(f"TRL step {size} {variant}", False, [*command, *lengths, *timed], trl_step)


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
    parser.add_argument("--step-rounds", type=int, default=2, help="rounds of GRPO steps; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", nargs="+", default=["bf16", "f16", "q8_0"], help="llama.cpp's formats")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="sizes of GRPO steps")
    parser.add_argument("--variants", nargs="+", default=["f32", "bf16-autocast"], help="TRL's variants")
    parser.add_argument("--log", type=Path, help="file for everything that every run printed, as JSON lines")
    options = parser.parse_args()
    if min(options.rounds, options.step_rounds) < 0 or options.threads < 1:
        parser.error("--rounds and --step-rounds must not be negative, --threads at least 1")

    table = Table()
    log = options.log.open("w") if options.log else None
    run_rounds(table, options.rounds, lambda first: rollout_contenders(options, first), log)
    run_rounds(table, options.step_rounds, lambda first: step_contenders(options), log)
    rounds = f"{options.rounds} rounds of decoding and prompts, {options.step_rounds} of steps"
    print(f"{processor()}, {options.threads} threads; {rounds}; medians, lowest to highest (rounds)")
    table.print()


if __name__ == "__main__":
    main()
