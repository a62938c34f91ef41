// Which plots there are, in the order in which they tell the story of a run.

const over = (key) => (run) => points(run, key);
const perBlock = (key) => (run) => layerMeans(run, key);
const accuracyTick = (v) => percent(v, 0);
const short = (v) => number(v, 2);

/** A plot with one line, from one column. */
const single = (id, title, key, more) =>
  ({ id, title, format: number, zero: true, lines: [{ name: title.toLowerCase(), of: over(key) }], ...more });

const SECTIONS = [
  {
    title: "Learning",
    lead: "Greedy accuracy in full precision on problems that are never trained on, and the mean reward of the responses " +
      "with its parts (before their weights). Accuracy is the share of right responses, whatever they are rewarded with.",
    plots: [
      { id: "accuracy", title: "Held-out accuracy", format: accuracyTick, exact: percent, zero: true, whole: 1,
        lines: [{ name: "accuracy", of: heldOut, sparse: true }] },
      single("reward", "Reward", "reward"),
      rewardParts,
      { id: "test-reward", title: "Held-out reward", format: number, zero: true, optional: true,
        lines: [{ name: "held-out reward", of: over("test_reward"), sparse: true }] },
    ],
  },
  {
    title: "Mismatch",
    lead: "How far the quantized policy that samples (behav) is from the full-precision policy that is trained (prox); " +
      "ρ = prox / behav of each sampled token.",
    plots: [
      { id: "mismatch-kl", title: "KL(behav ‖ prox)", format: short, exact: number, log: true, lines: [
        { name: "k3", of: over("mismatch.k3_kl") },
        { name: "mean log ratio", of: over("mismatch.kl"), detail: true },
        { name: "whole vocabulary", of: over("full_kl"), detail: true },
      ] },
      { id: "rho", title: "Largest ρ", format: short, exact: (v) => number(v, 4), log: true, lines: [
        { name: "largest", of: over("mismatch.rho_max") },
        { name: "1 in 1000", of: over("mismatch.rho_p999"), detail: true },
      ] },
      single("probs-diff", "Mean |behav − prox|", "mismatch.probs_diff_mean", { format: short, exact: number }),
    ],
  },
  {
    title: "Clipping",
    lead: "Share of tokens whose update the objective cut off, at its upper and its lower bound, and how far the policy " +
      "moved within a step.",
    plots: [
      { id: "clip", title: "Clipped tokens", format: share, zero: true, lines: [
        { name: "upper bound", of: over("clip_fraction_upper") },
        { name: "lower bound", of: over("clip_fraction_lower") },
      ] },
      single("ratio", "Largest ratio to the proximal policy", "ratio_max", { format: short, exact: number, log: true }),
    ],
  },
  {
    title: "Weights and their codes",
    lead: "The update of the weights between two measurements beside the error of their quantized copy (both normalized), " +
      "and the share of integer codes that changed: a code that does not change hides the update from the rollout.",
    plots: [
      { id: "update", title: "Weight update and quantization error", format: short, exact: number, log: true, lines: [
        { name: "update", of: over("weight_update.total"), sparse: true },
        { name: "quantization error", of: over("quantization_error.total"), sparse: true },
      ] },
      { id: "flipped", title: "Flipped codes", format: share, zero: true,
        lines: [{ name: "flipped", of: over("flipped_codes.total"), sparse: true }] },
      { id: "update-layers", title: "The same per block", x: "layer", format: short, exact: number, log: true, lines: [
        { name: "update", of: perBlock("weight_update") },
        { name: "quantization error", of: perBlock("quantization_error") },
      ] },
      { id: "flipped-layers", title: "Flipped codes per block", x: "layer", format: share, zero: true,
        lines: [{ name: "flipped", of: perBlock("flipped_codes") }] },
    ],
  },
  {
    title: "Speed",
    lead: "Response tokens per second of sampling, and of updating the weights.",
    phases: true,
    plots: [
      single("rollout-speed", "Rollout, tokens/s", "rollout_tokens_per_s", { format: count }),
      single("training-speed", "Training, tokens/s", "training_tokens_per_s", { format: count }),
      single("seconds", "Seconds of a step", "timing.total"),
    ],
  },
  {
    title: "Responses and policy",
    lead: "Length of the responses, entropy of the distributions that tokens were drawn from, and size of the gradients.",
    plots: [
      single("length", "Tokens of a response", "response_length"),
      single("truncated", "Responses that were cut off", "truncated", { format: share }),
      { id: "entropy", title: "Entropy", format: number, zero: true, lines: [
        { name: "rollout", of: over("rollout_entropy") },
        { name: "actor", of: over("entropy") },
      ] },
      single("grad-norm", "Gradient norm", "grad_norm", { format: short, exact: number, log: true }),
      single("loss", "Loss", "loss", { format: short, exact: number, zero: false }),
      single("lr", "Learning rate", "lr", { format: short, exact: number }),
      single("reference-kl", "KL to the reference model", "reference_kl", { optional: true }),
      single("value-loss", "Loss of the critic", "value_loss", { optional: true }),
    ],
  },
];

function plotSection(section) {
  const made = section.plots.map(lineChart);
  const columns = section.plots.length % 3 === 0 || section.plots.length > 4 ? "plots" : "plots two";
  const absent = h("p", { class: "absent", hidden: true });
  const bars = section.phases ? phaseBars() : null;
  if (bars && section.phases !== true) bars.node.id = section.phases;
  const node = h("section", {}, h("h2", {}, section.title), h("p", { class: "lead" }, section.lead),
    h("div", { class: columns }, made.map((chart) => chart.figure)), absent, bars && bars.node);
  const update = () => {
    made.forEach((chart) => chart.draw());
    if (bars) bars.draw();
    const hidden = made.filter((chart) => chart.figure.hidden && !chart.spec.optional).map((chart) => chart.spec.title);
    absent.hidden = !hidden.length;
    absent.textContent = `Not measured: ${hidden.join(", ")}.`;
  };
  return { node, update };
}
