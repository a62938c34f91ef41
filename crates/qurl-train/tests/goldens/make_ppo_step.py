"""One whole PPO step of a tiny actor and a tiny critic in float64 PyTorch, as a golden for the trainer.

    python make_ppo_step.py

Written from the equations (docs/math.md, the papers, verl's definitions of whitening, value clip and dual clip), with
autograd for every derivative. It reads three committed models of one shape: the actor starts as
../../../qurl-model/tests/goldens/qwen2, the reference is grpo_step (so that the KL is not zero), and the critic is the
actor's start with the value head of ../../../qurl-model/tests/goldens/critic. It writes ppo_step.json (settings,
rollouts, advantages, returns, losses, norms, shares) and ppo_step/actor and ppo_step/critic (the models after the step,
still scaled by UAQ). The reference is scored without UAQ: the scaling must not change it.

The same step in float32 shows how far rounding alone goes. The script refuses to write a golden in which a branch is not
taken or a token stands so near a bound that rounding could take it to the other side.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

HERE = Path(__file__).resolve().parent
MODELS = HERE.parents[2] / "qurl-model" / "tests" / "goldens"

TEMPERATURE = 0.8
C, LOW, HIGH, DUAL = 2.0, 0.2, 0.2, 1.25
GAMMA, LAM = 0.97, 0.9
KL_COEF = 0.1
ENTROPY = 0.02
VALUE_CLIP = 0.2
UAQ = 1.5
EPOCHS = 2
ACTOR = {"lr": 6e-4, "prompts_per_update": 2, "clip_grad": 1.0, "weight_decay": 0.01, "eps": 1e-3}
CRITIC = {"lr": 5e-3, "prompts_per_update": 3, "clip_grad": 0.5, "weight_decay": 0.02, "eps": 1e-3}
PROMPTS, SAMPLES = 6, 2
MICRO_TOKENS = 26  # of the trainer; here every sequence is its own forward pass


def rollouts(vocabulary):
    draw = torch.Generator().manual_seed(23)
    ints = lambda n: torch.randint(1, vocabulary, (n,), generator=draw).tolist()
    groups = []
    for prompt in range(PROMPTS):
        question = ints(3 + prompt % 4)
        responses = [ints(4 + (2 * prompt + 3 * sample) % 7) for sample in range(SAMPLES)]
        rewards = [[1.0, 0.0], [0.0, 0.25], [1.0, 1.0], [0.0, 0.0], [0.5, 1.0], [-1.0, 1.0]][prompt]
        groups.append({"prompt": question, "responses": responses, "rewards": rewards})
    return groups


def scaled(model):
    """Eq. 11: what a norm feeds is divided by s, the norm's gain is multiplied by it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(f"{p}_proj.weight" in name for p in ("q", "k", "v", "gate", "up")):
                parameter.div_(UAQ)
            elif "input_layernorm" in name or "post_attention_layernorm" in name:
                parameter.mul_(UAQ)
    return model


class Critic(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.model = scaled(AutoModel.from_pretrained(MODELS / "qwen2", dtype=dtype, attn_implementation="eager"))
        self.score = torch.nn.Linear(self.model.config.hidden_size, 1, bias=False)
        with safe_open(MODELS / "critic" / "model.safetensors", "pt") as file:
            self.score.weight = torch.nn.Parameter(file.get_tensor("score.weight").to(dtype))

    def forward(self, prompt, response):
        """The value of the state before each response token."""
        hidden = self.model(torch.tensor([prompt + response])).last_hidden_state[0]
        return self.score(hidden)[len(prompt) - 1 : -1, 0]


def policy(model, prompt, response):
    """Log-probs of the response at the sampling temperature, and the entropies of the same distributions."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    every = torch.log_softmax(logits, -1)
    return every.gather(1, torch.tensor(response)[:, None])[:, 0], -(every.exp() * every).sum(-1)


def gae(rewards, values):
    advantages, after, next_value = [], 0.0, 0.0
    for reward, value in reversed(list(zip(rewards.tolist(), values.tolist()))):
        after = reward + GAMMA * next_value - value + GAMMA * LAM * after
        next_value = value
        advantages.insert(0, after)
    return torch.tensor(advantages, dtype=values.dtype)


def updates(settings):
    per = settings["prompts_per_update"]
    return [range(first * SAMPLES, (first + per) * SAMPLES) for _ in range(EPOCHS) for first in range(0, PROMPTS, per)]


def optimizer(module, settings):
    options = dict(lr=settings["lr"], betas=(0.9, 0.999), eps=settings["eps"], weight_decay=settings["weight_decay"])
    return torch.optim.AdamW(module.parameters(), foreach=False, **options)


class Counts:
    """Which branches were taken, and how near a token came to a bound at which the loss has a kink."""

    def __init__(self):
        self.tokens = self.upper = self.lower = self.dual = self.beyond_tis = self.truncated = self.value = 0
        self.margin, self.ratio_max = float("inf"), 0.0

    def near(self, distance):
        self.margin = min(self.margin, distance.abs().min().item())

    def policy(self, ratio, rho, a, upper):
        good, bad = a > 0, a < 0
        self.tokens += len(ratio)
        self.upper += (good & (ratio > upper)).sum().item()
        self.lower += (bad & (ratio < 1 - LOW)).sum().item()
        self.dual += (bad & (ratio > DUAL)).sum().item()
        self.beyond_tis += (good & (rho > C) & (ratio > 1 + HIGH) & (ratio < upper)).sum().item()
        self.truncated += (rho > C).sum().item()
        self.ratio_max = max(self.ratio_max, ratio.max().item())
        for bound in (upper, 1 - LOW, DUAL):
            self.near(ratio - bound)
        self.near(a)


def step(groups, noise, dtype, behav=None):
    load = lambda name: AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="eager")
    actor, critic, reference = scaled(load(MODELS / "qwen2")), Critic(dtype), load(HERE / "grpo_step")
    flat = [(g["prompt"], r) for g in groups for r in g["responses"]]
    scores = [score for g in groups for score in g["rewards"]]
    with torch.no_grad():
        prox = [policy(actor, *s)[0] for s in flat]
        ref = [policy(reference, *s)[0] for s in flat]
        old = [critic(*s) for s in flat]
    if behav is None:  # stored in f32, as rollouts are
        behav = [(p + torch.tensor(e, dtype=dtype)).float() for p, e in zip(prox, noise)]
    rho = [(p - b.to(dtype)).exp() for p, b in zip(prox, behav)]

    kl = [p - r for p, r in zip(prox, ref)]  # k1
    rewards = [-KL_COEF * k for k in kl]
    for tokens, score in zip(rewards, scores):
        tokens[-1] += score
    raw = [gae(r, v) for r, v in zip(rewards, old)]
    returns = [a + v for a, v in zip(raw, old)]
    every = torch.cat(raw)
    advantages = [(a - every.mean()) * torch.rsqrt(every.var() + 1e-8) for a in raw]

    counts, losses, norms, entropies, value_losses, value_norms = Counts(), [], [], [], [], []
    optim = optimizer(actor, ACTOR)
    for mini in updates(ACTOR):
        tokens, loss = sum(len(flat[i][1]) for i in mini), 0.0
        for i in mini:
            theta, entropy = policy(actor, *flat[i])
            ratio, a = (theta - prox[i]).exp(), advantages[i]
            r = torch.clamp(C / rho[i], max=1.0)
            upper = (1 + HIGH) / r  # Eq. 9
            clipped = torch.minimum(torch.clamp(ratio, min=1 - LOW), upper)
            token = torch.maximum(-a * ratio, -a * clipped)
            token = torch.where(a < 0, torch.minimum(token, -a * DUAL), token)
            token = token * torch.clamp(rho[i], max=C) - ENTROPY * entropy
            loss = loss + token.sum() / tokens
            counts.policy(ratio.detach(), rho[i], a, upper)
            entropies += entropy.tolist()
        optim.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(actor.parameters(), ACTOR["clip_grad"]).item())
        optim.step()
        losses.append(loss.item())
    optim = optimizer(critic, CRITIC)
    for mini in updates(CRITIC):
        tokens, loss = sum(len(flat[i][1]) for i in mini), 0.0
        for i in mini:
            value = critic(*flat[i])
            held = torch.minimum(torch.maximum(value, old[i] - VALUE_CLIP), old[i] + VALUE_CLIP)
            error, held_error = (value - returns[i]) ** 2, (held - returns[i]) ** 2
            loss = loss + 0.5 * torch.maximum(error, held_error).sum() / tokens
            counts.value += (held_error > error).sum().item()
            counts.near((value - old[i]).detach().abs() - VALUE_CLIP)
            outside = (value - old[i]).detach().abs() > VALUE_CLIP
            if outside.any():
                counts.near((error - held_error).detach()[outside])
        optim.zero_grad()
        loss.backward()
        value_norms.append(torch.nn.utils.clip_grad_norm_(critic.parameters(), CRITIC["clip_grad"]).item())
        optim.step()
        value_losses.append(loss.item())
    mean = lambda xs: sum(xs) / len(xs)
    golden = {
        "losses": losses, "gradient_norms": norms, "entropy": mean(entropies),
        "value_losses": value_losses, "value_gradient_norms": value_norms,
        "clip_fraction_upper": counts.upper / counts.tokens, "clip_fraction_lower": counts.lower / counts.tokens,
        "clip_fraction_dual": counts.dual / counts.tokens, "ratio_max": counts.ratio_max,
        # As verl's apply_kl_penalty reports it: the mean over sequences of the means over their tokens.
        "reference_kl": torch.stack([k.mean() for k in kl]).mean().item(),
        "rho_max": torch.cat(rho).max().item(),
        "advantages": [a.tolist() for a in advantages], "returns": [r.tolist() for r in returns],
    }
    print(dtype, {k: v for k, v in vars(counts).items()}, json.dumps({k: golden[k] for k in golden if "s" != k[-1]}))
    print("  losses", losses, "norms", norms, "value", value_losses, value_norms)
    return actor, critic, behav, golden, counts


def save(module, name, config):
    folder = HERE / "ppo_step" / name
    folder.mkdir(parents=True, exist_ok=True)
    tied = module.config.tie_word_embeddings if name == "actor" else False
    state = {k: v.float().contiguous() for k, v in module.state_dict().items() if not (tied and k == "lm_head.weight")}
    save_file(state, folder / "model.safetensors")
    shutil.copy(config / "config.json", folder / "config.json")


def main():
    groups = rollouts(json.loads((MODELS / "qwen2" / "config.json").read_text())["vocab_size"])
    draw = torch.Generator().manual_seed(11)
    noise = [(0.8 * torch.randn(len(r), generator=draw)).tolist() for g in groups for r in g["responses"]]
    actor, critic, behav, golden, counts = step(groups, noise, torch.float64)
    twin, critic_twin, _, golden32, _ = step(groups, noise, torch.float32, behav)
    far = max((a - b.double()).abs().max().item() for m, t in ((actor, twin), (critic, critic_twin))
              for a, b in zip(m.parameters(), t.parameters()))
    differences = {k: abs(golden[k] - golden32[k]) for k in golden if isinstance(golden[k], float)}
    print(f"float32 is off by {far:.1e} in the parameters,", {k: f"{v:.1e}" for k, v in differences.items()})
    for branch in ("upper", "lower", "dual", "beyond_tis", "truncated", "value"):
        assert getattr(counts, branch) > 0, f"no token for {branch}"
    assert counts.margin > 1e-5, f"a token is only {counts.margin} from a bound"
    held = iter(behav)
    settings = {
        "temperature": TEMPERATURE, "c": C, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL,
        "gamma": GAMMA, "lam": LAM, "kl_coef": KL_COEF, "entropy_coeff": ENTROPY, "cliprange_value": VALUE_CLIP,
        "uaq": UAQ, "epochs": EPOCHS, "micro_tokens": MICRO_TOKENS, "actor": ACTOR, "critic": CRITIC,
    }
    groups = [{**g, "behav": [next(held).tolist() for _ in g["responses"]]} for g in groups]
    (HERE / "ppo_step.json").write_text(json.dumps({"settings": settings, "groups": groups, **golden}) + "\n")
    save(actor, "actor", MODELS / "qwen2")
    save(critic, "critic", MODELS / "critic")


if __name__ == "__main__":
    main()
