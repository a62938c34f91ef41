"""One whole GRPO step of a tiny model in PyTorch, as a golden for the trainer.

    python make_grpo_step.py

Reads the committed model ../../../qurl-model/tests/goldens/qwen2 with transformers and writes grpo_step.json (rollouts,
advantages, losses, gradient norms) and grpo_step/ (the model after the step). Everything is done twice, in
float32 and float64, to show that what is compared is not rounding.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "qurl-model" / "tests" / "goldens" / "qwen2"

TEMPERATURE = 0.8
TRUNCATION, CLIP_LOW, CLIP_HIGH = 1.0, 0.1, 0.05
LR, DECAY, NORM, EPS = 1e-2, 0.01, 1.0, 1e-4
PROMPTS, SAMPLES, EPOCHS = 4, 3, 3
PROMPTS_PER_UPDATE = 2


def rollouts(vocabulary):
    draw = torch.Generator().manual_seed(11)
    ints = lambda high, n: torch.randint(1, high, (n,), generator=draw).tolist()
    groups = []
    for prompt in range(PROMPTS):
        question = ints(vocabulary, 3 + prompt)
        responses = [ints(vocabulary, 4 + (prompt + 2 * sample) % 5) for sample in range(SAMPLES)]
        rewards = [1.0, 0.0, 0.25 * prompt]
        groups.append({"prompt": question, "responses": responses, "rewards": rewards})
    groups[3]["rewards"] = [0.5, 0.5, 0.5]  # a group without a signal
    return groups


def logprobs(model, prompt, response):
    ids = torch.tensor([prompt + response])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def step(groups, noise, dtype):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=EPS, weight_decay=DECAY, foreach=False)
    with torch.no_grad():
        prox = [[logprobs(model, g["prompt"], r) for r in g["responses"]] for g in groups]
    behav = [[p + torch.tensor(e, dtype=dtype) for p, e in zip(ps, es)] for ps, es in zip(prox, noise)]
    advantages = []
    for g in groups:
        scores = torch.tensor(g["rewards"], dtype=dtype)
        advantages.append(((scores - scores.mean()) / (scores.std() + 1e-6)).tolist())
    losses, norms, widened = [], [], 0
    for _ in range(EPOCHS):
        for first in range(0, PROMPTS, PROMPTS_PER_UPDATE):
            mini = range(first, first + PROMPTS_PER_UPDATE)
            tokens = sum(len(r) for i in mini for r in groups[i]["responses"])
            loss = 0.0
            for i in mini:
                for k, response in enumerate(groups[i]["responses"]):
                    theta = logprobs(model, groups[i]["prompt"], response)
                    rho = (prox[i][k] - behav[i][k]).exp()
                    ratio = (theta - prox[i][k]).exp()
                    upper = (1 + CLIP_HIGH) * torch.clamp(rho / TRUNCATION, min=1.0)
                    clipped = torch.minimum(torch.clamp(ratio, min=1 - CLIP_LOW), upper)
                    a = advantages[i][k]
                    if a > 0:
                        widened += ((ratio > 1 + CLIP_HIGH) & (ratio < upper)).sum().item()
                    loss = loss - (rho.clamp(max=TRUNCATION) * torch.minimum(ratio * a, clipped * a)).sum() / tokens
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM).item())
            optimizer.step()
            losses.append(loss.item())
    print(f"{str(dtype):15} losses {losses} norms {norms} tokens between the clip bounds of TIS and ACR: {widened}")
    return model, prox, behav, advantages, losses, norms


def main():
    torch.manual_seed(0)
    groups = rollouts(json.loads((MODEL / "config.json").read_text())["vocab_size"])
    draw = torch.Generator().manual_seed(5)
    noise = [[(0.5 * torch.randn(len(r), generator=draw)).tolist() for r in g["responses"]] for g in groups]
    model, prox, behav, advantages, losses, norms = step(groups, noise, torch.float32)
    twin, *_, losses64, norms64 = step(groups, noise, torch.float64)
    far = max((a.double() - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters()))
    print(f"float32 against float64: losses {max(abs(a - b) for a, b in zip(losses, losses64)):.1e}, "
          f"norms {max(abs(a - b) for a, b in zip(norms, norms64)):.1e}, parameters {far:.1e}")
    golden = {
        "temperature": TEMPERATURE,
        "objective": {"type": "acr", "c": TRUNCATION, "clip_ratio_low": CLIP_LOW, "clip_ratio_high": CLIP_HIGH},
        "lr": LR, "weight_decay": DECAY, "clip_grad": NORM, "eps": EPS, "epochs": EPOCHS, "prompts_per_update": PROMPTS_PER_UPDATE,
        "groups": [
            {**g, "behav": [b.tolist() for b in bs], "prox": [p.tolist() for p in ps], "advantages": adv}
            for g, bs, ps, adv in zip(groups, behav, prox, advantages)
        ],
        "losses": losses, "gradient_norms": norms,
    }
    (HERE / "grpo_step.json").write_text(json.dumps(golden) + "\n")
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight" or not model.config.tie_word_embeddings}
    (HERE / "grpo_step").mkdir(exist_ok=True)
    save_file(state, HERE / "grpo_step" / "model.safetensors")
    shutil.copy(MODEL / "config.json", HERE / "grpo_step" / "config.json")


if __name__ == "__main__":
    main()
