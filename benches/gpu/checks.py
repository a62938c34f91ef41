"""What the scripts beside it hold their JSON to: prints the figures of steps, and ends with status 1 where
one is not as it should be.

    python3 checks.py same OUT NAME...      ranks: one checksum of weights, bytes by the model, memory by plan
    python3 checks.py shards OUT MOST       what eight shards cost beside one: MOST of a step, 0.03
    python3 checks.py big NAME              a step, its checkpoint and its memory (NAME.json, NAME.used)
    python3 checks.py summary FILE          summary.json: memory planned within 5% of what was allocated
    python3 checks.py on-policy NAME FILE   metrics.jsonl of a run in which rho has to be 1
    python3 checks.py score FILE RATIO      rates of scoring by format; int8 at RATIO of bf16 at least
"""

import json
import os
import sys


def row(file):
    """The first result of a document, which other lines may surround; None where there is none."""
    if not os.path.exists(file):
        return None
    with open(file) as lines:
        found = [line for line in lines if line.startswith("{")]
    return json.loads(found[-1])["results"][0] if found else None


def mib(size):
    return int(size) >> 20


def planned(plan, peak):
    """Memory as a text, and whether the plan is right."""
    if peak == 0:
        return f"{mib(plan)} MiB planned", True  # a CPU
    share = plan / peak
    text = f"{mib(plan)} MiB planned, {mib(peak)} allocated at most: {share:.3f} (0.95 to 1.05)"
    return text, 0.95 <= share <= 1.05


def same(out, *names):
    sums, good = set(), True
    for name in names:
        found = row(f"{out}/{name}.json")
        if found is None:
            print(f"   {name}: nothing came out")
            good = False
            continue
        shared = found["ranks"]
        sums.add(shared["checksum"])
        stage = f"{shared['shards']} shards, ZeRO-{shared['zero_stage']}"
        print(f"   {name}: weights {shared['checksum']}, {stage}")
        for rank, of in enumerate(shared["ranks"]):
            exact = all(of[what] == of[f"{what}_by_model"] for what in ("gradients", "weights"))
            memory, fits = planned(of["planned_bytes"], of["peak_bytes"])
            good &= exact
            # A small model's workspace is more than its share; what must not happen is more than planned.
            good &= fits or of["planned_bytes"] > of["peak_bytes"]
            print(f"     rank {rank}: gradients {of['gradients']} (model {of['gradients_by_model']}), weights"
                  f" {of['weights']} (model {of['weights_by_model']}), host {of['host']};"
                  f" {memory}{'' if exact else ' OTHER BYTES'}")
    if len(sums) > 1:
        print(f"   the weights differ: {sorted(sums)}")
    return good and len(sums) == 1


def shards(out, most):
    seconds = {}
    for count in (1, 8):
        for turn in (1, 2):
            found = row(f"{out}/shards-{count}-{turn}.json")
            if found is None:
                print(f"   shards-{count}-{turn}: nothing came out")
                return False
            update, rank = found["phases"]["update"]["seconds"], found["ranks"]["ranks"][0]
            seconds.setdefault(count, []).append((found["seconds"], update))
            print(f"   {count} shards: step {found['seconds']:.3f} s, update {update:.3f} s,"
                  f" {planned(rank['planned_bytes'], rank['peak_bytes'])[0]}")
    best = {count: [min(of) for of in zip(*rows)] for count, rows in seconds.items()}
    step, update = (best[8][i] / best[1][i] - 1 for i in (0, 1))
    print(f"   eight shards cost {100 * step:.2f}% of a step (at most {100 * float(most):g}),"
          f" {100 * update:.2f}% of an update")
    return step <= float(most)


def big(name):
    found = row(f"{name}.json")
    if found is None:
        print("   nothing came out")
        return False
    for phase, of in found["phases"].items():
        limit = f" of {of['limit_s']:.2f} s at least" if of["limit_s"] else ""
        print(f"   {phase:9} {of['seconds']:8.2f} s{limit}")
    tokens, seconds = found["response_tokens"], found["seconds"]
    print(f"   step      {seconds:8.2f} s, {tokens} tokens, {tokens / seconds:.0f} tokens/s;"
          f" rollout {found['rollout']['tokens_per_s']:.0f} tokens/s")
    of, resumed = found["ranks"]["ranks"][0], found["resumed"]
    peak = of["peak_bytes"]
    if resumed:
        peak = resumed["peak_bytes"]
        print(f"   evaluate  {resumed['evaluation_s']:8.2f} s")
        print(f"   save      {resumed['save_s']:8.2f} s, {mib(resumed['checkpoint_bytes'])} MiB")
        print(f"   resume    {resumed['resume_s']:8.2f} s, then the same weights: {resumed['checksum']}")
    text, good = planned(of["planned_bytes"], peak)
    if os.path.exists(f"{name}.used"):
        used = [int(line) for line in open(f"{name}.used") if line.strip().isdigit()]
        text += f"; {max(used, default=0)} MiB used on the whole device"
    print(f"   memory: {text}")
    return good


def summary(file):
    if not os.path.exists(file):
        print("   no summary")
        return False
    with open(file) as text:
        memory = json.load(text).get("memory", {"planned": 0, "peak": 0})  # a CPU has none
    text, good = planned(memory["planned"], memory["peak"])
    print(f"   memory: {text}")
    return good


def on_policy(name, file):
    if not os.path.exists(file):
        print(f"   {name}: no metrics")
        return False
    lines = [json.loads(line) for line in open(file)]
    of = lambda key: [line["mismatch"][key] for line in lines]
    tokens, updates = sum(of("tokens")), sum(line["updates"] for line in lines)
    kl, rho = (min(of("kl")), max(of("kl"))), (min(of("rho_min")), max(of("rho_max")))
    moved = max(line["grad_norm"] for line in lines)
    print(f"   {name}: {len(lines)} steps, {updates} updates, {tokens} tokens: kl {kl}, rho {rho},"
          f" probabilities differ by at most {max(of('probs_diff_max'))}; gradients up to {moved:.2g}")
    # Without gradients the weights are those that sampled, whatever their forward pass.
    return moved > 0 and kl == (0, 0) and rho == (1, 1)


def score(file, ratio):
    if row(file) is None:
        print("   nothing came out")
        return False
    with open(file) as text:
        rows = json.load(text)["results"]
    rates = {of["format"]: of["tokens_per_s"] for of in rows}
    for name, rate in rates.items():
        print(f"   {name}: {rate:.0f} tokens/s, {rate / rates['bf16']:.2f} times bf16")
    return rates["int8"] >= float(ratio) * rates["bf16"]


WAYS = {
    "same": same,
    "shards": shards,
    "big": big,
    "summary": summary,
    "on-policy": on_policy,
    "score": score,
}

if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in WAYS:
        sys.exit(__doc__)
    sys.exit(not WAYS[sys.argv[1]](*sys.argv[2:]))
