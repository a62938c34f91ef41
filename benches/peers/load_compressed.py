"""Whether others read what `qurl quantize` writes: loads int8 and fp8 directories with transformers and
compressed-tensors.

`python3 load_compressed.py --qurl target/release/qurl --model DIR` checks that every matrix, as they read it,
is the model's within the rounding of the format, and prints how far their log-probs are from those of
`qurl score` in the same format. They keep keys, values and the head in f32, and int8 activations have other
scales there, so the two are about as far apart as either is from the model in full;
crates/qurl-quant/tests/python/scores.py tells the reasons apart.
"""

import argparse
import json
import subprocess
import tempfile

import torch
from transformers import AutoModelForCausalLM


def ours(qurl, model, form, ids):
    given = json.dumps({"ids": ids})
    done = subprocess.run(
        [qurl, "score", "--device", "cpu", "--model", model, "--format", form],
        input=given,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])["logprobs"][1:]


def rounding(full, read, form):
    """The largest error of a matrix in units of what the format may round."""
    scale, stored = read.weight_scale.reshape(-1, 1), read.weight.float()
    step = (
        torch.ones_like(stored)
        if form == "int8"
        else torch.exp2(torch.floor(torch.log2(stored.abs().clamp(min=2.0**-6))) - 3)
    )
    return ((full.weight - stored * scale).abs() / (step * scale / 2)).max().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--qurl", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    for form, kind in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run(
                [given.qurl, "quantize", "--model", given.model, "--format", form, f"{directory}/out"],
                check=True,
                capture_output=True,
            )
            model = AutoModelForCausalLM.from_pretrained(f"{directory}/out", dtype=torch.float32)
            full = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
            pairs = [
                (m, full.get_submodule(n))
                for n, m in model.named_modules()
                if isinstance(m, torch.nn.Linear) and n != "lm_head"
            ]
            assert {read.weight.dtype for read, _ in pairs} == {kind}
            worst = max(rounding(m, read, form) for read, m in pairs)
            # Scales are rounded, too, so that the largest number of a row may be a little off.
            assert worst < 1.01, worst
            torch.manual_seed(1)
            # Text that the model finds likely: sampled from it.
            ids = model.generate(
                torch.tensor([[model.config.bos_token_id or 1]]),
                do_sample=True,
                min_new_tokens=given.tokens - 1,
                max_new_tokens=given.tokens - 1,
            )[0].tolist()
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            theirs = [rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
            exact = ours(given.qurl, given.model, "f32", ids)
            off = [abs(a - b) for a, b in zip(ours(given.qurl, given.model, form, ids), theirs)]
            change = [abs(a - b) for a, b in zip(exact, theirs)]
            print(
                f"{form}: {len(pairs)} matrices, {worst:.3f} of what may be rounded; "
                f"{len(off)} tokens, ours and theirs {max(off):.1e} apart, "
                f"{sum(off) / len(off):.1e} in the mean; "
                f"theirs and f32 {max(change):.1e}, {sum(change) / len(change):.1e}"
            )


if __name__ == "__main__":
    main()
