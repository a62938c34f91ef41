"""Makes goldens.json: losses and gradients by PyTorch autograd in float64, advantages and metrics by plain loops.

Everything is written on padded [sequence, time] tensors, as RL libraries in PyTorch do, and shares no structure
with the flat slices of the crate. Run: python make_goldens.py > goldens.json
"""

import json

import numpy as np
import torch

torch.set_default_dtype(torch.float64)
rng = np.random.default_rng(20250731)

LENGTHS = [5, 7, 1, 4, 6, 3]
GROUPS = [0, 0, 3, 1, 1, 1]
B, T = len(LENGTHS), max(LENGTHS)


def padded(draw):
    x = np.zeros((B, T))
    for i, n in enumerate(LENGTHS):
        x[i, :n] = draw(n)
    return x


def flat(x):
    return [float(x[i, t]) for i, n in enumerate(LENGTHS) for t in range(n)]


prox = padded(lambda n: -rng.exponential(1.2, n) - 0.05)
behav = prox - padded(lambda n: rng.normal(0, 0.8, n))
theta = prox + padded(lambda n: rng.normal(0, 0.5, n))
# A few tokens in the corners: truncated and beyond the plain clip, beyond the widened clip, dual clip.
behav[0, 0], theta[0, 0] = prox[0, 0] - 2.0, prox[0, 0] + 0.6
behav[1, 0], theta[1, 0] = prox[1, 0] - 1.0, prox[1, 0] + 2.5
behav[3, 0], theta[3, 0] = prox[3, 0] - 1.5, prox[3, 0] + 2.0
adv = padded(lambda n: rng.normal(0, 1, n))
adv[0, 0], adv[1, 0], adv[3, 0] = 1.3, 0.7, -1.1
mask = padded(lambda n: np.ones(n))
mask[0, 2] = mask[1, 6] = mask[4, 1] = mask[4, 2] = 0
mask[5, :] = 0  # a fully masked sequence

t_prox, t_behav, t_adv, t_mask = (torch.tensor(x) for x in (prox, behav, adv, mask))


def agg(loss, m, mode, factor):
    seq_tokens = m.sum(-1)
    seqs = (seq_tokens > 0).double()
    if mode == "token-mean":
        return (loss * m).sum() / m.sum()
    if mode == "token-sum":
        return (loss * m).sum()
    per_seq = (loss * m).sum(-1)
    if mode == "seq-mean-token-mean":
        per_seq = per_seq / (seq_tokens + 1e-8)
    out = (per_seq * seqs).sum() / seqs.sum()
    if mode == "seq-mean-token-sum-norm":
        out = out / (factor or m.shape[-1])
    return out


def weights_of(correction, m):
    log_rho = t_prox - t_behav
    kind = correction["type"]
    if kind == "none":
        return torch.ones_like(log_rho), m
    if kind == "token-is":
        return log_rho.clamp(-20, 20).exp(), m
    if kind == "token-tis":
        return log_rho.clamp(-20, 20).exp().clamp(max=correction["c"]), m
    total = (log_rho * m).sum(-1, keepdim=True)
    if kind == "sequence-tis":
        return total.clamp(-20, 20).exp().clamp(max=correction["c"]).expand_as(log_rho), m
    if kind == "icepop":
        w = log_rho.clamp(-20, 20).exp()
        keep = (w >= correction["low"]) & (w <= correction["high"])
        return torch.where(keep, w, torch.zeros_like(w)), m
    if kind == "geo-mask":
        geo = (total / m.sum(-1, keepdim=True).clamp(min=1)).exp()
        keep = (geo >= correction["low"]) & (geo <= correction["high"])
        return torch.ones_like(log_rho), m * keep.double()
    if kind == "kpop":
        p, q = (x.exp().clamp(1e-6, 1 - 1e-6) for x in (t_prox, t_behav))
        keep = (binary_kl(p, q) <= correction["phi"]) & (binary_kl(q, p) <= correction["phi"])
        return torch.where(keep, log_rho.clamp(-20, 20).exp(), torch.zeros_like(log_rho)), m
    if kind == "sequence-mis":
        w = total.clamp(-20, 20).exp()
        return torch.where(w <= correction["c"], w, torch.zeros_like(w)).expand_as(log_rho), m
    raise ValueError(kind)


def binary_kl(a, b):
    return a * (a / b).log() + (1 - a) * ((1 - a) / (1 - b)).log()


def keep_tokens(o, x):
    """1 where a token is kept for where theta is: the off-policy mask and M2PO. Dropped ones stay in the mean."""
    keep = torch.ones_like(x)
    tau = o.get("tau") if o["type"] == "off-policy-mask" else o.get("off_policy_mask")
    if tau is not None:
        mean = ((t_behav - x) * t_mask).sum(-1, keepdim=True) / t_mask.sum(-1, keepdim=True).clamp(min=1)
        keep = keep * (~((mean > tau) & (t_adv < 0))).double()
    if o["type"] == "m2po":
        squares = ((x - (t_behav if o.get("ratio") == "behav" else t_prox)) ** 2)[t_mask > 0]
        left = list(squares.sort().values)
        while left and sum(left) / len(left) > o["tau"]:
            left.pop()
        bound = left[-1] if left else -1.0
        far = (x - (t_behav if o.get("ratio") == "behav" else t_prox)) ** 2 > bound
        keep = keep * (~far).double()
    return keep


class TruncatedRatio(torch.autograd.Function):
    """r whose derivative by log r is min(r, most)."""

    @staticmethod
    def forward(ctx, log_ratio, most):
        ctx.save_for_backward(log_ratio.exp().clamp(max=most))
        r = log_ratio.exp()
        return torch.where(r > most, most + most * (log_ratio - np.log(most)), r)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


def dppo_loss(o, x):
    """The ratio to the policy that sampled, without tokens too far from it: loss and the sides of the mask."""
    moved = x.detach().exp() - t_behav.exp()
    if o.get("divergence", "tv") == "tv":
        distance = moved.abs()
    else:
        a, b = (v.exp().clamp(1e-6, 1 - 1e-6) for v in (t_behav, x.detach()))
        distance = binary_kl(a, b)
    upper = (t_adv > 0) & (moved > 0) & (distance > o.get("delta_high", 0.2))
    lower = (t_adv < 0) & (moved < 0) & (distance > o.get("delta_low", 0.2))
    ratio = TruncatedRatio.apply(x - t_behav, o.get("ratio_max", 20.0))
    sides = {"upper": upper, "lower": lower, "dual": torch.zeros_like(upper)}
    return torch.where(upper | lower, torch.zeros_like(ratio), -ratio * t_adv), sides


def objective_case(o, mode, factor=None):
    o = dict(o)
    kind = o["type"]
    lo, hi = o.get("clip_ratio_low", 0.2), o.get("clip_ratio_high", 0.2)
    dual, c = o.get("clip_ratio_c"), o.get("c", 2.0)
    correction = {
        "naive": {"type": "none"},
        "quantized-is": {"type": "none"},
        "decoupled": {"type": "token-is"},
        "tis": {"type": "token-tis", "c": c},
        "acr": {"type": "token-tis", "c": c},
        "sequence-tis": {"type": "sequence-tis", "c": c},
        "icepop": {"type": "icepop", "low": o.get("low", 0.5), "high": o.get("high", 5.0)},
        "geo-mask": {"type": "geo-mask", "low": o.get("low", 0.999), "high": o.get("high", 1.001)},
        "kpop": {"type": "kpop", "phi": o.get("phi", 0.1)},
        "sequence-mis": {"type": "sequence-mis", "c": c},
    }.get(kind) or o.get("correction", {"type": "none"})
    w, m = weights_of(correction, t_mask)
    x = torch.tensor(theta, requires_grad=True)
    upper = torch.full_like(x, 1 + hi)
    if kind == "acr":
        # r = behaviour probability over the truncated one, literally Eq. 6
        pi_behav, pi_prox = t_behav.exp(), t_prox.exp()
        upper = (1 + hi) / (pi_behav / torch.maximum(pi_behav, pi_prox / c))
    if kind == "gspo":
        mode = "seq-mean-token-mean"
        mean = ((x - t_prox) * m).sum(-1) / m.sum(-1).clamp(min=1)
        log_ratio = (x - x.detach() + mean.detach().unsqueeze(-1)).clamp(max=10.0)
    else:
        behav_ratio = kind == "quantized-is" or (kind == "m2po" and o.get("ratio") == "behav")
        log_ratio = (x - (t_behav if behav_ratio else t_prox)).clamp(-20, 20)
    ratio = log_ratio.exp()
    clipped = torch.minimum(torch.maximum(ratio, torch.tensor(1 - lo)), upper)
    sides = {}
    if kind == "dppo":
        loss, sides = dppo_loss(o, x)
    elif kind == "m2po":
        loss = -ratio * t_adv
        sides = {side: torch.zeros_like(ratio) > 1 for side in ("upper", "lower", "dual")}
    elif kind == "cispo":
        loss = -clipped.detach() * t_adv * x
        sides["upper"], sides["lower"] = (ratio > upper), (ratio < 1 - lo)
        sides["dual"] = torch.zeros_like(sides["upper"])
    else:
        l1, l2 = -t_adv * ratio, -t_adv * clipped
        loss = torch.maximum(l1, l2)
        clip = l2 > l1
        sides["upper"], sides["lower"] = clip & (t_adv > 0), clip & (t_adv < 0)
        sides["dual"] = torch.zeros_like(clip)
        if dual is not None:
            l3 = -t_adv * dual
            sides["dual"] = (loss > l3) & (t_adv < 0)
            loss = torch.where(t_adv < 0, torch.minimum(loss, l3), loss)
    total = agg(loss * w.detach() * keep_tokens(o, x.detach()), m, mode, factor)
    total.backward()
    share = {k: float((v.double() * m).sum() / m.sum().clamp(min=1)) for k, v in sides.items()}
    case = {"objective": o, "loss_agg_mode": mode, "loss": total.item(), "dlogp": flat(x.grad.numpy())}
    if factor:
        case["loss_scale_factor"] = factor
    return {**case, **share}


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
wide = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
objectives = [objective_case({"type": "acr", "c": 2.0, **wide}, mode) for mode in MODES]
objectives.append(objective_case({"type": "tis"}, MODES[4], factor=50))
for o in [
    {"type": "naive"},
    {"type": "naive", "clip_ratio_c": 3.0, **wide},
    {"type": "quantized-is"},
    {"type": "decoupled"},
    {"type": "tis", "c": 2.0, **wide},
    {"type": "tis", "c": 5.0, "clip_ratio_c": 3.0},
    {"type": "acr", "c": 1.5, "clip_ratio_c": 3.0},
    {"type": "sequence-tis", "c": 3.0},
    {"type": "icepop"},
    {"type": "geo-mask", "low": 0.6, "high": 1.7},
    {"type": "gspo", **wide},
    {"type": "gspo", "clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "correction": {"type": "token-tis", "c": 2.0}},
    {"type": "cispo"},
    {"type": "cispo", **wide, "correction": {"type": "icepop", "low": 0.5, "high": 5.0}},
    {"type": "kpop"},
    {"type": "kpop", "phi": 0.02, **wide, "clip_ratio_c": 3.0},
    {"type": "dppo"},
    {"type": "dppo", "delta_low": 0.05, "delta_high": 0.1, "ratio_max": 2.0},
    {"type": "dppo", "divergence": "kl", "delta_low": 0.05, "delta_high": 0.05, "ratio_max": 3.0},
    {"type": "sequence-mis"},
    {"type": "sequence-mis", "c": 6.0, **wide},
    {"type": "off-policy-mask", "tau": 0.1},
    {"type": "off-policy-mask", "tau": 0.3, **wide, "correction": {"type": "kpop", "phi": 0.05}},
    {"type": "acr", "c": 1.5, "off_policy_mask": 0.2},
    {"type": "dppo", "off_policy_mask": 0.1},
    {"type": "gspo", **wide, "off_policy_mask": 0.1},
    {"type": "m2po", "tau": 0.04},
    {"type": "m2po", "tau": 0.3, "ratio": "behav"},
    {"type": "m2po", "tau": 0.2, "off_policy_mask": 0.1},
]:
    objectives.append(objective_case(o, "token-mean"))

# ---- advantages: loops over padded rows, score on the last token that counts
rewards = padded(lambda n: rng.normal(0, 0.1, n)) * mask
values = padded(lambda n: rng.normal(0.3, 0.3, n))
GAMMA, LAM = 0.97, 0.9


def whiten(x, m):
    vals = x[m > 0]
    mu = vals.mean()
    var = ((vals - mu) ** 2).mean() * len(vals) / (len(vals) - 1)
    return (x - mu) / np.sqrt(var + 1e-8) * m


def gae():
    a, ret = np.zeros((B, T)), np.zeros((B, T))
    next_v, last = np.zeros(B), np.zeros(B)
    for t in reversed(range(T)):
        delta = rewards[:, t] + GAMMA * next_v - values[:, t]
        now = delta + GAMMA * LAM * last
        next_v = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_v
        last = now * mask[:, t] + (1 - mask[:, t]) * last
        a[:, t] = last
    ret = (a + values) * mask
    return a * mask, ret


def grouped(fn):
    scores = (rewards * mask).sum(-1)
    out = np.zeros(B)
    for i in range(B):
        mates = [scores[j] for j in range(B) if GROUPS[j] == GROUPS[i]]
        out[i] = fn(scores[i], np.array(mates))
    return out[:, None] * mask


def grpo(s, mates):
    if len(mates) == 1:
        return s / (1 + 1e-6)
    return (s - mates.mean()) / (mates.std(ddof=1) + 1e-6)


def centred(s, mates):
    return s if len(mates) == 1 else s - mates.mean()


def rloo(s, mates):
    n = len(mates)
    return s if n == 1 else s * n / (n - 1) - mates.mean() * n / (n - 1)


def reinforce_pp():
    ret, run = np.zeros((B, T)), np.zeros(B)
    for t in reversed(range(T)):
        run = rewards[:, t] + GAMMA * run
        ret[:, t] = run
        run = run * mask[:, t]
    return ret * mask


gae_adv, gae_ret = gae()
rpp = reinforce_pp()
advantages = {
    "rewards": flat(rewards),
    "values": flat(values),
    "groups": GROUPS,
    "gamma": GAMMA,
    "lam": LAM,
    "gae_raw": flat(gae_adv),
    "gae": flat(whiten(gae_adv, mask)),
    "gae_returns": flat(gae_ret),
    "grpo": flat(grouped(grpo)),
    "dr-grpo": flat(grouped(centred)),
    "rloo": flat(grouped(rloo)),
    "reinforce-plus-plus": flat(whiten(rpp, mask)),
    "reinforce-plus-plus-returns": flat(rpp),
    "reinforce-plus-plus-baseline": flat(whiten(grouped(centred), mask)),
}

# ---- KL to a reference
ref = theta - padded(lambda n: rng.normal(0, 0.7, n))
ref[0, 1] = theta[0, 1] + 4.0  # k3 beyond its limit


def kl_value(kind, x, r):
    base = {"k1": x - r, "abs": (x - r).abs(), "k2": 0.5 * (x - r) ** 2}
    d = (r - x).clamp(-20, 20)
    base["k3"] = (d.exp() - d - 1).clamp(-10, 10)
    value = base[kind.rstrip("+")]
    return value if not kind.endswith("+") else value.detach() - base["k2"].detach() + base["k2"]


kl = {"reference": flat(ref), "coefficient": 0.05, "cases": []}
for kind in ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"]:
    x = torch.tensor(theta, requires_grad=True)
    v = kl_value(kind, x, torch.tensor(ref))
    total = 0.05 * agg(v, t_mask, "seq-mean-token-mean", None)
    total.backward()
    vn = v.detach().numpy() * mask
    per_seq = [vn[i].sum() / mask[i].sum() for i in range(B) if mask[i].sum() > 0]
    kl["cases"].append(
        {
            "type": kind,
            "loss": total.item(),
            "dlogp": flat(x.grad.numpy()),
            "rewards": flat(rewards - 0.05 * vn),
            "mean_kl": float(np.mean(per_seq)),
        }
    )

# ---- the critic's loss
new_values = values + padded(lambda n: rng.normal(0, 0.6, n))
value_cases = []
for clip in [0.5, 0.2, None]:
    v = torch.tensor(new_values, requires_grad=True)
    old, ret = torch.tensor(values), torch.tensor(gae_ret)
    l1 = (v - ret) ** 2
    held = v if clip is None else torch.minimum(torch.maximum(v, old - clip), old + clip)
    l2 = (held - ret) ** 2
    total = 0.5 * agg(torch.maximum(l1, l2), t_mask, "token-mean", None)
    total.backward()
    clipped = float(((l2 > l1).double() * t_mask).sum())
    value_cases.append({"cliprange_value": clip, "loss": total.item(), "dvalue": flat(v.grad.numpy()), "clipped": clipped})
r, v = gae_ret[mask > 0], new_values[mask > 0]
value = {"values": flat(new_values), "cases": value_cases, "explained_variance": float(1 - (r - v).var() / r.var())}

# ---- mismatch of behaviour and proximal policy
sel = mask > 0
log_rho = (prox - behav)[sel]
rho = np.exp(np.clip(log_rho, -20, 20))
pb, pp = np.exp(behav[sel]), np.exp(prox[sel])
rows = [i for i in range(B) if mask[i].sum() > 0]
mean_b = np.array([(behav[i] * mask[i]).sum() / mask[i].sum() for i in rows])
mean_p = np.array([(prox[i] * mask[i]).sum() / mask[i].sum() for i in rows])
sum_log_rho = np.array([((prox[i] - behav[i]) * mask[i]).sum() for i in rows])
mismatch = {
    "kl": float(-log_rho.mean()),
    "k3_kl": float((rho - 1 - np.clip(log_rho, -20, 20)).mean()),
    "rho_max": float(rho.max()),
    "rho_min": float(rho.min()),
    "rho_mean": float(rho.mean()),
    "rho_p50": float(np.quantile(rho, 0.5, method="inverted_cdf")),
    "rho_p99": float(np.quantile(rho, 0.99, method="inverted_cdf")),
    "ess": float(1 / np.mean((rho / rho.mean()) ** 2)),
    "probs_diff_mean": float(np.abs(pb - pp).mean()),
    "probs_diff_max": float(np.abs(pb - pp).max()),
    "probs_diff_std": float(np.abs(pb - pp).std(ddof=1)),
    "probs_pearson_corr": float(np.corrcoef(pb, pp)[0, 1]),
    "training_ppl": float(np.exp(-mean_p).mean()),
    "rollout_ppl": float(np.exp(-mean_b).mean()),
    "log_ppl_diff": float((mean_b - mean_p).mean()),
    "log_ppl_abs_diff": float(np.abs(mean_b - mean_p).mean()),
    "ppl_ratio": float(np.exp(mean_b - mean_p).mean()),
    "chi2_token": float((rho**2).mean() - 1),
    "chi2_seq": float(np.exp(2 * np.clip(sum_log_rho, -20, 20)).mean() - 1),
}

seq = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
tokens = {"theta": theta, "prox": prox, "behav": behav, "adv": adv}
print(
    json.dumps(
        {
            "tokens": {**{k: flat(x) for k, x in tokens.items()}, "mask": [int(m) for m in flat(mask)], "seq": seq},
            "objectives": objectives,
            "advantages": advantages,
            "kl": kl,
            "value": value,
            "mismatch": mismatch,
        },
        separators=(",", ":"),
    ).replace('{"objective"', '\n{"objective"')
)
