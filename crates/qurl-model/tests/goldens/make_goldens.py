"""Makes the golden files of this folder with PyTorch and transformers.

    python make_goldens.py            # rewrites every case
    python make_goldens.py qwen3      # rewrites one
    python make_goldens.py softer     # rewrites what the softer models of all cases give
    python make_goldens.py lora       # rewrites the adapters beside cases (needs peft)

Each case is a tiny random model saved by transformers itself, and beside it what
transformers and autograd compute with it in float32 on one CPU thread: the numbers
that the Rust code has to reproduce. Everything is also computed in float64, and the
script stops where float32 noise would come near the tolerances of the tests; the
distances are printed. Sequences are scored one at a time, without padding, so that a
packed batch on our side is compared with sequences that cannot see each other.

The layout of the files is described in README.md.
"""

import copy
import json
import math
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

HERE = Path(__file__).resolve().parent

# How far float32 may lie from float64 in a golden: a tenth of what the tests allow.
LOGPROB_NOISE = 1e-5
GRADIENT_NOISE = 1e-5
# The best token must win by this much, or its index would hang on rounding.
ARGMAX_MARGIN = 1e-4


@dataclass
class Scoring:
    """One loss over the sequences: sum(g_t * logp_t) + sum(e_t * H_t) at a temperature."""

    suffix: str = ""
    temperature: float = 1.0
    entropy_bonus: bool = False


@dataclass
class Case:
    """One tiny model, the lengths of its sequences and the losses to differentiate."""

    name: str
    seed: int
    config: object
    lengths: tuple = (7, 19)
    critic: bool = False
    scorings: tuple = (Scoring(),)
    # What config_old.json says in place of the new keys; None: no such file.
    old_spelling: dict | None = None
    old_drops: tuple = field(default=("rope_parameters", "dtype", "layer_types", "transformers_version"))


def qwen2(**changes):
    sizes = dict(
        vocab_size=61, hidden_size=32, intermediate_size=52, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return Qwen2Config(**{**sizes, **changes})


def llama(**changes):
    sizes = dict(
        vocab_size=67, hidden_size=40, intermediate_size=56, num_hidden_layers=2,
        num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=256,
        rms_norm_eps=1e-5, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return LlamaConfig(**{**sizes, **changes})


# Wavelengths of an 8-pair head at this base: 6, 32 and 167 positions and beyond. With 64
# original positions the first is kept, the second blended and the others divided, so that
# each branch of the rule is taken.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}


def llama3(**changes):
    return llama(**{**dict(
        vocab_size=83, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, rope_parameters=dict(LLAMA3_ROPE),
    ), **changes})


def old_llama3():
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}
    return {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "float32"}


def cases():
    return [
        Case(
            "qwen2", 1, qwen2(),
            scorings=(Scoring(), Scoring("_temperature", temperature=0.7)),
            old_spelling={"rope_theta": 1e6, "torch_dtype": "float32"},
        ),
        Case("qwen2-untied", 2, qwen2(
            vocab_size=71, hidden_size=40, num_attention_heads=5, num_key_value_heads=1,
            intermediate_size=44, tie_word_embeddings=False,
        )),
        Case(
            "qwen3", 3,
            Qwen3Config(
                vocab_size=73, hidden_size=36, intermediate_size=60, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=True,
                use_sliding_window=False, attention_bias=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            ),
            scorings=(Scoring(), Scoring("_entropy", entropy_bonus=True)),
        ),
        Case(
            "llama2", 4, llama(),
            scorings=(Scoring(), Scoring("_both", temperature=1.3, entropy_bonus=True)),
        ),
        Case("llama3", 5, llama3(), old_spelling=old_llama3()),
        Case("llama3-long", 6, llama3(vocab_size=97, num_key_value_heads=2), lengths=(150, 33)),
        Case(
            "llama-linear", 7,
            llama(
                vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
                rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            ),
            # The oldest files say `type` where later ones say `rope_type`, and leave the base out.
            old_spelling={"rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "float32"},
        ),
        Case(
            "mistral", 8,
            MistralConfig(
                vocab_size=79, hidden_size=48, intermediate_size=40, num_hidden_layers=2,
                num_attention_heads=6, num_key_value_heads=2, head_dim=8,
                max_position_embeddings=256, rms_norm_eps=1e-5, sliding_window=None,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            ),
            # A sequence of one token predicts nothing; it must not disturb its neighbours.
            lengths=(11, 1, 17),
        ),
        Case(
            "deepseek-r1-distill", 9,
            qwen2(
                vocab_size=97, hidden_size=48, intermediate_size=72, num_attention_heads=6,
                num_key_value_heads=1, tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            # As published: a window that is written down but switched off.
            old_spelling={
                "rope_theta": 10000, "torch_dtype": "float32", "use_mrope": False,
                "sliding_window": 4096, "max_window_layers": 21, "use_sliding_window": False,
            },
        ),
        Case("critic", 10, qwen2(num_labels=1), critic=True),
        Case(
            "mistral-window", 11,
            MistralConfig(
                vocab_size=59, hidden_size=32, intermediate_size=36, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                max_position_embeddings=256, rms_norm_eps=1e-5, sliding_window=20,
                tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            # Longer than two tiles of keys: whole tiles are out of the window.
            lengths=(150, 9),
        ),
        Case(
            "qwen3-window", 12,
            Qwen3Config(
                vocab_size=53, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                max_position_embeddings=256, rms_norm_eps=1e-6, tie_word_embeddings=True,
                use_sliding_window=True, sliding_window=5, attention_bias=False,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            ),
            lengths=(80, 3),
        ),
    ]


# ---------------------------------------------------------------- models


def random_model(case):
    """A model whose every parameter matters: no bias is zero, no norm gain is one."""
    factory = AutoModelForTokenClassification if case.critic else AutoModelForCausalLM
    model = factory.from_config(case.config, attn_implementation="eager", dtype=torch.float32)
    draw = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if "norm" in name:
                parameter.copy_(1.0 + 0.25 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.4 * noise)
            elif "embed_tokens" in name or name == "lm_head.weight":
                parameter.copy_(0.4 * noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model.eval()


def save_model(case, model, folder):
    model.save_pretrained(folder)
    if case.old_spelling is None:
        return
    config = json.loads((folder / "config.json").read_text())
    for key in case.old_drops:
        config.pop(key, None)
    config.update(case.old_spelling)
    (folder / "config_old.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    check_old_spelling(case, model, folder)


def check_old_spelling(case, model, folder):
    """transformers must read both spellings as the same model, to the last bit."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / "model.safetensors", scratch)
        shutil.copy(folder / "config_old.json", Path(scratch) / "config.json")
        old = AutoConfig.from_pretrained(scratch).rope_parameters
        new = AutoConfig.from_pretrained(folder).rope_parameters
        strip = lambda rope: {k: v for k, v in rope.items() if k != "type"}
        assert strip(old) == strip(new), f"{case.name}: {old} is not {new}"
        twin = AutoModelForCausalLM.from_pretrained(scratch, attn_implementation="eager")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(twin(ids).logits, model(ids).logits), f"{case.name}: config_old.json differs"


# ---------------------------------------------------------------- scoring


def draw_sequences(case):
    draw = np.random.default_rng(1000 + case.seed)
    return [draw.integers(0, case.config.vocab_size, n).tolist() for n in case.lengths]


def draw_coefficients(case, salt, lengths, prompt_share):
    """One coefficient per token; the first tokens of each sequence play the prompt and get 0."""
    draw = np.random.default_rng(salt + case.seed)
    rows = []
    for n in lengths:
        row = draw.normal(size=n).astype(np.float32)
        row[: max(1, round(prompt_share * n))] = 0.0
        if n > 6:
            row[n - 3] = 0.0  # a masked token in the middle of a response
        rows.append(row.tolist())
    return rows


def token_facts(model, ids, temperature):
    """Log-prob, entropy, argmax and lead of the argmax of every token after the first."""
    ids = torch.tensor(ids)
    logits = model(ids[None]).logits[0, :-1] / temperature
    logp_all = torch.log_softmax(logits, dim=-1)
    logp = logp_all.gather(1, ids[1:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(-1)
    top = logits.topk(2, dim=-1)
    return logp, entropy, top.indices[:, 0], top.values[:, 0] - top.values[:, 1]


def score(model, sequences, g, e, temperature):
    """Facts per sequence, the loss, and the gradient of every parameter under its HF name."""
    model.zero_grad(set_to_none=True)
    loss, facts = 0.0, []
    for ids, g_row, e_row in zip(sequences, g, e):
        logp, entropy, best, lead = token_facts(model, ids, temperature)
        weigh = lambda row: torch.tensor(row[1:], dtype=logp.dtype)
        loss = loss + (weigh(g_row) * logp).sum() + (weigh(e_row) * entropy).sum()
        facts.append((logp.detach(), entropy.detach(), best, lead.detach()))
    loss.backward()
    return facts, loss.item(), gradients(model)


def gradients(model):
    """Those of all parameters that are trained; of adapters under the names that PEFT saves them with."""
    return {
        name.replace(".default", ""): p.grad.detach().clone().contiguous()
        for name, p in model.named_parameters() if p.requires_grad
    }


def gradient_noise(single, double):
    """The worst distance of a float32 gradient from its float64 twin, relative to the tensor's norm."""
    return max(
        ((single[n].double() - double[n]).norm() / double[n].norm()).item() for n in double
    )


def run_scoring(case, scoring, model, twin, sequences, folder):
    lengths = case.lengths
    g = draw_coefficients(case, 2000, lengths, 0.3)
    e = (
        draw_coefficients(case, 3000, lengths, 0.2)
        if scoring.entropy_bonus
        else [[0.0] * n for n in lengths]
    )
    facts, loss, grads = score(model, sequences, g, e, scoring.temperature)
    facts64, _, grads64 = score(twin, sequences, g, e, scoring.temperature)

    far = max(
        (a[k].double() - b[k]).abs().max().item()
        for a, b in zip(facts, facts64) for k in (0, 1) if len(a[0])
    )
    noise = gradient_noise(grads, grads64)
    lead = min(f[3].min().item() for f in facts if len(f[3]))
    label = case.name + scoring.suffix
    print(f"{label:28} log-prob noise {far:.1e}  gradient noise {noise:.1e}  argmax lead {lead:.1e}")
    assert far < LOGPROB_NOISE and noise < GRADIENT_NOISE and lead > ARGMAX_MARGIN, label

    file = f"grads{scoring.suffix}.safetensors"
    save_file(grads, folder / file)
    return {
        "temperature": scoring.temperature,
        "loss": short(loss),
        "gradients": file,
        "sequences": [
            {
                "g": floats(g_row),
                "e": floats(e_row),
                "logprobs": [None] + floats(logp),
                "entropies": [None] + floats(entropy),
                "argmax": [None] + best.tolist(),
            }
            for g_row, e_row, (logp, entropy, best, _) in zip(g, e, facts)
        ],
    }


def run_critic(case, model, twin, sequences, folder):
    """Values of every token (the first too), and the gradient of sum(c_t * v_t)."""
    c = draw_coefficients(case, 4000, case.lengths, 0.2)

    def values(model):
        model.zero_grad(set_to_none=True)
        rows = [model(torch.tensor(ids)[None]).logits[0, :, 0] for ids in sequences]
        loss = sum((torch.tensor(k, dtype=v.dtype) * v).sum() for k, v in zip(c, rows))
        loss.backward()
        return [v.detach() for v in rows], loss.item(), gradients(model)

    rows, loss, grads = values(model)
    rows64, _, grads64 = values(twin)
    far = max((a.double() - b).abs().max().item() for a, b in zip(rows, rows64))
    noise = gradient_noise(grads, grads64)
    print(f"{case.name:28} value noise    {far:.1e}  gradient noise {noise:.1e}")
    assert far < LOGPROB_NOISE and noise < GRADIENT_NOISE, case.name

    save_file(grads, folder / "grads.safetensors")
    return {
        "loss": short(loss),
        "gradients": "grads.safetensors",
        "sequences": [{"c": floats(k), "values": floats(v)} for k, v in zip(c, rows)],
    }


def make_case(case):
    folder = HERE / case.name
    shutil.rmtree(folder, ignore_errors=True)
    model = random_model(case)
    save_model(case, model, folder)
    twin = copy.deepcopy(model).double()
    sequences = draw_sequences(case)
    golden = {"case": case.name, "ids": sequences}
    if case.critic:
        golden["critic"] = run_critic(case, model, twin, sequences, folder)
    else:
        golden["scorings"] = [
            run_scoring(case, s, model, twin, sequences, folder) for s in case.scorings
        ]
    write_json(folder / "golden.json", golden)
    if not case.critic:
        make_softer(case)
    if case.name == "qwen2":
        write_json(HERE / "training.json", training_trace(case, sequences))


def make_softer(case):
    """The same scorings of a saved model with 0.7 of its weights, rounded to numbers that bf16 has."""
    folder = HERE / case.name
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((0.7 * parameter).bfloat16().float())
    twin = copy.deepcopy(model).double()
    sequences = draw_sequences(case)
    scorings = [replace(s, suffix="_softer" + s.suffix) for s in case.scorings]
    golden = [run_scoring(case, s, model, twin, sequences, folder) for s in scorings]
    write_json(folder / "softer.json", {"case": case.name, "ids": sequences, "scorings": golden})


# ---------------------------------------------------------------- adapters


# Adapters beside a case: rank, alpha, rsLoRA and the modules, PEFT's words.
ADAPTERS = {
    "qwen2": dict(r=3, lora_alpha=5, use_rslora=True, target_modules="all-linear"),
    "qwen3": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]),
    "llama3": dict(r=8, lora_alpha=8, target_modules=["k_proj", "o_proj"]),
}


def make_lora(case):
    """The case's scorings with random adapters of PEFT beside its frozen weights: gradients of A and B alone."""
    from peft import LoraConfig, get_peft_model

    folder = HERE / case.name / "lora"
    shutil.rmtree(folder, ignore_errors=True)
    base = random_model(case)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[case.name])).eval()
    draw = torch.Generator().manual_seed(5100 + case.seed)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(0.7 * torch.randn(parameter.shape, generator=draw) * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    twin = copy.deepcopy(model).double()
    sequences = draw_sequences(case)
    golden = [run_scoring(case, s, model, twin, sequences, folder) for s in case.scorings]
    write_json(folder / "golden.json", {"case": case.name, "ids": sequences, "scorings": golden})


# ---------------------------------------------------------------- training


def training_trace(case, sequences, steps=10):
    """Ten AdamW steps of the case's model on its own sequences."""
    settings = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)

    def train(dtype):
        model = random_model(case).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **settings)
        losses, norms = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            nll = torch.cat([-token_facts(model, ids, 1.0)[0] for ids in sequences])
            loss = nll.mean()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            final = [token_facts(model, ids, 1.0)[0] for ids in sequences]
        return losses, norms, final

    losses, norms, final = train(torch.float32)
    losses64, norms64, final64 = train(torch.float64)
    far = np.abs(np.array(losses) - losses64).max()
    far_norm = (np.abs(np.array(norms) - norms64) / norms64).max()
    far_final = max((a.double() - b).abs().max().item() for a, b in zip(final, final64))
    print(f"{'training':28} loss noise     {far:.1e}  norm noise {far_norm:.1e}  final log-prob noise {far_final:.1e}")
    assert max(far, far_norm) < GRADIENT_NOISE and far_final < 1e-4
    return {
        "model": case.name,
        "ids": sequences,
        "optimizer": {**settings, "clip_norm": 1.0},
        "losses": floats(losses),
        "gradient_norms": floats(norms),
        "final_logprobs": [[None] + floats(row) for row in final],
    }


def adamw_run(weight_decay, dtype, steps=20, warmup=5, peak=0.05):
    """Twenty AdamW steps on fixed gradients; some are below the clipping norm, most above."""
    draw = torch.Generator().manual_seed(77)
    shapes = {"matrix": (3, 5), "vector": (7,), "scalar": (1,)}
    first = {n: torch.randn(s, generator=draw) for n, s in shapes.items()}
    parameters = {n: torch.nn.Parameter(v.clone().to(dtype)) for n, v in first.items()}
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=peak, betas=(0.9, 0.999), eps=1e-8,
        weight_decay=weight_decay, foreach=False,
    )

    def schedule(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    trace = []
    for step in range(steps):
        scale = (0.05, 0.4, 3.0)[step % 3]
        raw = {n: scale * torch.randn(s, generator=draw) for n, s in shapes.items()}
        for name, parameter in parameters.items():
            parameter.grad = raw[name].clone().to(dtype)
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item()
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        trace.append({
            "lr": lr,
            "gradients": {n: v.flatten() for n, v in raw.items()},
            "norm": norm,
            "parameters": {n: p.detach().flatten().clone() for n, p in parameters.items()},
        })
    return {
        "weight_decay": weight_decay,
        "schedule": {"kind": "cosine", "peak": peak, "warmup": warmup, "steps": steps},
        "initial": {n: v.flatten() for n, v in first.items()},
        "trace": trace,
    }


def make_adamw():
    runs = []
    for weight_decay in (0.1, 0.0):
        run, twin = adamw_run(weight_decay, torch.float32), adamw_run(weight_decay, torch.float64)
        far = max(
            (a["parameters"][n].double() - b["parameters"][n]).abs().max().item()
            for a, b in zip(run["trace"], twin["trace"]) for n in a["parameters"]
        )
        clipped = sum(entry["norm"] > 1.0 for entry in run["trace"])
        print(f"{f'adamw, decay {weight_decay}':28} parameter noise {far:.1e}  clipped {clipped} of {len(run['trace'])} steps")
        assert far < 2e-6 and 0 < clipped < len(run["trace"])
        values = lambda group: {n: floats(v) for n, v in group.items()}
        run["initial"] = values(run["initial"])
        for entry in run["trace"]:
            entry["gradients"] = values(entry["gradients"])
            entry["parameters"] = values(entry["parameters"])
            entry["norm"] = short(entry["norm"])
        runs.append(run)
    golden = {"betas": [0.9, 0.999], "eps": 1e-8, "clip_norm": 1.0, "runs": runs}
    write_json(HERE / "adamw.json", golden)


# ---------------------------------------------------------------- writing


def short(value):
    """The shortest decimal that reads back as the same float32."""
    return float(str(np.float32(value)))


def floats(values):
    return [short(v) for v in (values.tolist() if torch.is_tensor(values) else values)]


def write_json(path, value):
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


def main():
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    wanted = sys.argv[1:]
    known = [case.name for case in cases()] + ["softer", "lora", "adamw"]
    for name in wanted:
        if name not in known:
            sys.exit(f"no case {name!r}; there are {', '.join(known)}")
    for case in cases():
        if not wanted or case.name in wanted:
            make_case(case)
        elif "softer" in wanted and not case.critic:
            make_softer(case)
        if case.name in ADAPTERS and (not wanted or case.name in wanted or "lora" in wanted):
            make_lora(case)
    if not wanted or "adamw" in wanted:
        make_adamw()
    size = sum(f.stat().st_size for f in HERE.rglob("*") if f.is_file())
    print(f"{size / 1e6:.2f} MB in all")


if __name__ == "__main__":
    main()
