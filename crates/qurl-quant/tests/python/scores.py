"""Makes tests/goldens/scores.json: log-probs of small models in int8 and fp8, emulated in float64 PyTorch.

    python tests/python/scores.py                                    (from the crate's directory)
    python tests/python/scores.py --compare QURL MODEL...            (prints how far `qurl score` is, and why)

The emulation is transformers' own model (every family of ../qurl-model/tests/goldens) with what
docs/formats.md says of a quantized run, and nothing else:
- linear layers of the blocks: weights rounded per output channel, activations per token, each with scale =
  absmax / largest code; the matmul of the codes is exact in float64, then both scales;
- keys (rotated) and values rounded to bf16, since that is how they are stored;
- the output head in bf16: its weights and its input. All else is float64, where the runtime has f32. So what
  remains between the two is the rounding of sums, except where that takes a number across the middle between
  two codes: then the code changes by a whole step (a sixteenth of the number in fp8), and so does all that
  follows. The ids of the golden are drawn until no number is that near to a middle (MARGIN, in steps);
  --compare shows what it does elsewhere.
"""

import argparse
import json
import subprocess
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

CASES = ["qwen2", "qwen2-untied", "qwen3", "llama2", "llama3", "mistral"]
MODELS = Path("../qurl-model/tests/goldens")
LENGTH = 16
MARGIN = {"codes": 1e-4, "bf16": 3e-4}
# What --compare leaves out, one at a time.
PARTS = {"kv": True, "head": True}
near = {}


def watch(kind, steps):
    """Notes how near numbers, in steps of their format, came to the middle between two codes."""
    distance = ((steps - steps.floor()) - 0.5).abs().min().item()
    near[kind] = min(near.get(kind, 1.0), distance)


def bf16(x):
    power = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-126))) - 7)
    watch("bf16", x.double() / power.double())
    return x.to(torch.bfloat16).to(x.dtype)


def codes(x, form):
    """The nearest codes of scaled numbers, as numbers."""
    if form == "int8":
        watch("codes", x)
        return x.round().clamp(-127, 127)
    power = torch.exp2(torch.floor(torch.log2(x.abs().clamp(min=2.0**-6))) - 3)
    watch("codes", x / power)
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)


def largest_code(form):
    return 127.0 if form == "int8" else 448.0


def fnv(data):
    """A number that tells bytes from others (FNV-1a)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


class Quantized(torch.nn.Module):
    def __init__(self, linear, form):
        super().__init__()
        weight = linear.weight.detach().float()
        self.form, self.bias = form, linear.bias
        self.scale = weight.abs().amax(1) / largest_code(form)  # in f32, as it is stored
        scaled = weight * (1.0 / self.scale)[:, None]
        stored = (
            scaled.round().to(torch.int8)
            if form == "int8"
            else scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
        )
        self.bytes = bytes(stored.view(torch.uint8).flatten().tolist())
        self.stored = stored.float()

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True) / largest_code(self.form)
        sums = codes(x / scale, self.form) @ self.stored.to(x.dtype).T
        out = sums * (scale * self.scale.to(x.dtype))
        return out if self.bias is None else out + self.bias


class Head(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight.detach()

    def forward(self, x):
        if not PARTS["head"]:
            return x @ self.weight.T
        return bf16(x) @ self.weight.to(torch.bfloat16).to(x.dtype).T


def attention(module, query, key, value, mask, scaling, dropout=0.0, **more):
    if PARTS["kv"]:
        key, value = bf16(key), bf16(value)
    return eager_attention_forward(module, query, key, value, mask, scaling, dropout, **more)


ALL_ATTENTION_FUNCTIONS.register("stored_in_bf16", attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("stored_in_bf16", eager_mask)


def emulated(folder, form, dtype=torch.float64):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="stored_in_bf16"
    ).eval()
    tensors = {}
    for name, linear in list(model.named_modules()):
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            parent, _, own = name.rpartition(".")
            quantized = Quantized(linear, form)
            setattr(model.get_submodule(parent), own, quantized)
            scales = quantized.scale.numpy().astype("<f4").tobytes()
            tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = fnv(quantized.bytes), fnv(scales)
    model.lm_head = Head(model.lm_head.weight)
    return model, tensors


@torch.no_grad()
def score(model, ids):
    rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [rows[i, ids[i + 1]].item() for i in range(len(ids) - 1)]


def make():
    golden = []
    for name in CASES:
        for form in ("int8", "fp8"):
            model, tensors = emulated(MODELS / name, form)
            draw = torch.Generator().manual_seed(1)
            for tries in range(1, 2000):
                ids = torch.randint(0, model.config.vocab_size, (LENGTH,), generator=draw).tolist()
                near.clear()
                logprobs = score(model, ids)
                if all(near[kind] > margin for kind, margin in MARGIN.items()):
                    break
            else:
                raise SystemExit(f"{name} {form}: no ids with these margins")
            print(name, form, "found after", tries, near)
            golden.append(
                {"model": name, "format": form, "ids": ids, "logprobs": logprobs, "tensors": tensors}
            )
    Path("tests/goldens/scores.json").write_text(json.dumps(golden) + "\n")


def ours(qurl, model, form, sequences):
    lines = "\n".join(json.dumps({"ids": ids}) for ids in sequences)
    command = [qurl, "score", "--device", "cpu", "--model", model, "--format", form]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    return [x for line in done.stdout.splitlines() for x in json.loads(line)["logprobs"][1:]]


def apart(a, b):
    off = sorted(abs(x - y) for x, y in zip(a, b))
    return f"median {off[len(off) // 2]:.0e}, mean {sum(off) / len(off):.0e}, largest {off[-1]:.0e}"


def compare(qurl, models, tokens):
    for folder in models:
        full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        torch.manual_seed(1)
        start = torch.full((8, 1), full.config.bos_token_id or 1)
        given = dict(attention_mask=torch.ones_like(start), pad_token_id=0, do_sample=True)
        sequences = full.generate(
            start, min_new_tokens=tokens - 1, max_new_tokens=tokens - 1, **given
        ).tolist()
        all_of = lambda model: [x for ids in sequences for x in score(model, ids)]
        exact = all_of(full)
        for form in ("int8", "fp8"):
            model, wide = emulated(folder, form)[0], {}
            runtime = ours(qurl, folder, form, sequences)
            print(f"{folder} {form}, {len(runtime)} tokens")
            print("  runtime, unquantized model:            ", apart(runtime, exact))
            for kv, head in ((True, True), (False, True), (True, False), (False, False)):
                PARTS.update(kv=kv, head=head)
                wide[kv, head] = all_of(model)
                print(
                    f"  runtime, emulation (kv {'bf16' if kv else 'full'}, "
                    f"head {'bf16' if head else 'full'}):  ",
                    apart(runtime, wide[kv, head]),
                )
            PARTS.update(kv=True, head=True)
            narrow = all_of(emulated(folder, form, torch.float32)[0])
            print("  emulation in float32, in float64:      ", apart(narrow, wide[True, True]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--compare", nargs="+", metavar=("QURL", "MODEL"))
    parser.add_argument("--tokens", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    compare(given.compare[0], given.compare[1:], given.tokens) if given.compare else make()


if __name__ == "__main__":
    main()
