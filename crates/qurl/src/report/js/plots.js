// Which plots there are, in the order in which they tell the story of a run.

const over = (key) => (run) => points(run, key);
const accuracyTick = (v) => percent(v, 0);
const power = (v) => number(v, 2);

const SECTIONS = [
  { title: "Learning", lead: "Mean reward of the sampled responses, and greedy accuracy in full precision on problems that are never trained on.", plots: [
    { id: "accuracy", title: "Held-out accuracy", format: accuracyTick, exact: percent, zero: true, whole: 1, lines: [{ name: "accuracy", of: heldOut, sparse: true }] },
    { id: "reward", title: "Reward", format: number, zero: true, lines: [{ name: "reward", of: over("reward") }] },
  ] },
  { title: "Mismatch", lead: "How far the quantized policy that samples (behav) is from the full-precision policy that is trained (prox); ρ = prox / behav of each sampled token.", plots: [
    { id: "mismatch-kl", title: "KL(behav ‖ prox)", format: power, exact: number, log: true, lines: [
      { name: "k3 estimator", of: over("mismatch.k3_kl") }, { name: "mean log ratio", of: over("mismatch.kl") }] },
    { id: "rho", title: "Largest ρ", format: power, exact: (v) => number(v, 4), log: true, lines: [
      { name: "largest", of: over("mismatch.rho_max") }, { name: "1 in 1000", of: over("mismatch.rho_p999") }] },
    { id: "probs-diff", title: "Mean |behav − prox| of probabilities", format: power, exact: number, zero: true, lines: [{ name: "difference", of: over("mismatch.probs_diff_mean") }] },
  ] },
  { title: "Clipping", lead: "Share of tokens whose update the objective cut off, at its upper and its lower bound, and how far the policy moved within a step.", plots: [
    { id: "clip", title: "Clipped tokens", format: share, zero: true, lines: [
      { name: "upper bound", of: over("clip_fraction_upper") }, { name: "lower bound", of: over("clip_fraction_lower") }] },
    { id: "ratio", title: "Largest ratio to the proximal policy", format: power, exact: number, log: true, lines: [{ name: "ratio", of: over("ratio_max") }] },
  ] },
  { title: "Weights and their codes", lead: "The update of the weights between two measurements beside the error of their quantized copy (both normalized), and the share of integer codes that changed: a code that does not change hides the update from the rollout.", plots: [
    { id: "update", title: "Weight update and quantization error", format: power, exact: number, log: true, lines: [
      { name: "update", of: over("weight_update.total"), sparse: true }, { name: "quantization error", of: over("quantization_error.total"), sparse: true }] },
    { id: "flipped", title: "Flipped codes", format: share, zero: true, lines: [{ name: "flipped", of: over("flipped_codes.total"), sparse: true }] },
    { id: "update-layers", title: "The same per block", x: "layer", format: power, exact: number, log: true, lines: [
      { name: "update", of: (run) => layerMeans(run, "weight_update") }, { name: "quantization error", of: (run) => layerMeans(run, "quantization_error") }] },
    { id: "flipped-layers", title: "Flipped codes per block", x: "layer", format: share, zero: true, lines: [{ name: "flipped", of: (run) => layerMeans(run, "flipped_codes") }] },
  ] },
  { title: "Speed", lead: "Response tokens per second of sampling, and of updating the weights.", plots: [
    { id: "rollout-speed", title: "Rollout, tokens/s", format: count, zero: true, lines: [{ name: "tokens/s", of: over("rollout_tokens_per_s") }] },
    { id: "training-speed", title: "Training, tokens/s", format: count, zero: true, lines: [{ name: "tokens/s", of: over("training_tokens_per_s") }] },
    { id: "seconds", title: "Seconds of a step", format: number, zero: true, lines: [{ name: "seconds", of: over("timing.total") }] },
  ], phases: true },
  { title: "Responses and policy", lead: "Length of the responses, entropy of the distributions that tokens were drawn from, and size of the gradients.", plots: [
    { id: "length", title: "Tokens of a response", format: number, zero: true, lines: [{ name: "mean", of: over("response_length") }] },
    { id: "truncated", title: "Responses that were cut off", format: share, zero: true, lines: [{ name: "cut off", of: over("truncated") }] },
    { id: "entropy", title: "Entropy", format: number, zero: true, lines: [
      { name: "rollout", of: over("rollout_entropy") }, { name: "actor", of: over("entropy") }] },
    { id: "grad-norm", title: "Gradient norm", format: power, exact: number, log: true, lines: [{ name: "norm", of: over("grad_norm") }] },
    { id: "loss", title: "Loss", format: power, exact: number, lines: [{ name: "loss", of: over("loss") }] },
    { id: "lr", title: "Learning rate", format: power, exact: number, zero: true, lines: [{ name: "rate", of: over("lr") }] },
    { id: "reference-kl", optional: true, title: "KL to the reference model", format: power, exact: number, zero: true, lines: [{ name: "KL", of: over("reference_kl") }] },
    { id: "value-loss", optional: true, title: "Loss of the critic", format: power, exact: number, zero: true, lines: [{ name: "loss", of: over("value_loss") }] },
  ] },
];

function plotSection(section) {
  const made = section.plots.map(lineChart);
  const columns = section.plots.length % 3 === 0 || section.plots.length > 4 ? "plots" : "plots two";
  const absent = h("p", { class: "absent", hidden: true });
  const bars = section.phases ? phaseBars() : null;
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
