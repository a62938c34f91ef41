// Which plots there are, in the order in which they tell the story of a run.

/** Columns that some plot below draws; whatever else a run has is drawn after them. */
const drawn = new Set();
const over = (key) => {
  drawn.add(key);
  return (run) => (isSupervised(run) ? [] : points(run, key));
};
const tested = (key, before) => {
  drawn.add(key);
  return (run) => heldOut(run, key, before);
};
const filtered = (run) => run.settings.some(([key]) => key.startsWith("algorithm.filter_groups"));
const perBlock = (key) => (run) => layerMeans(run, key);
const accuracyTick = (v) => percent(v, 0);
const short = (v) => number(v, 2);

/** A plot with one line, from one column. */
const single = (id, title, key, more) =>
  ({ id, title, format: number, zero: true, lines: [{ name: title.toLowerCase(), of: over(key) }], ...more });

const batches = over("gen_batches");

/** A line for every column whose name matches. */
function linesUnder(pattern) {
  const keys = [...new Set(state.runs.flatMap((run) => Object.keys(run.series)))]
      .filter((key) => pattern.test(key)).sort();
  return keys.map((key) => ({ name: words(key.slice(key.indexOf(".") + 1)), of: over(key) }));
}
const words = (key) => key.replaceAll("_", " ").replaceAll(".", ", ");

const SECTIONS = [
  {
    title: "Learning",
    lead: "Greedy accuracy in full precision on problems that are never trained on, and the mean reward of the responses " +
      "with its parts (before their weights). Accuracy is the share of right responses, whatever they are rewarded with.",
    plots: [
      { id: "accuracy", title: "Held-out accuracy", format: accuracyTick, exact: percent, zero: true, whole: 1,
        lines: [
          { name: "greedy", of: tested("test_accuracy", "accuracy_before"), sparse: true },
          { name: "Avg@k", of: tested("test_avg_at_k", "avg_at_k_before"), sparse: true },
        ] },
      single("reward", "Reward", "reward"),
      { id: "reward-parts", title: "Parts of the reward", format: number, zero: true, optional: true,
        get lines() { return linesUnder(/^reward\w*\./); } },
      { id: "test-reward", title: "Held-out reward", format: number, zero: true, optional: true,
        lines: [{ name: "held-out reward", of: over("test_reward"), sparse: true }] },
    ],
  },
  {
    title: "Groups and rewards",
    lead: "What a batch had to learn from. A group whose rewards are all equal has no advantage; dynamic " +
      "sampling drops it and samples further batches of prompts.",
    plots: [
      { id: "groups", title: "Groups", format: number, zero: true, lines: [
        { name: "trained on", of: over("groups") },
        { name: "with different rewards", of: over("mixed_groups") },
        { name: "sampled", of: over("sampled_groups"), detail: true },
      ] },
      { id: "gen-batches", title: "Generation batches", format: number, zero: true, optional: true,
        lines: [{ name: "batches", of: (run) => (filtered(run) ? batches(run) : []) }] },
      { id: "reward-spread", title: "Spread of rewards", format: number, zero: true, lines: [
        { name: "within groups", of: over("reward_group_std") },
        { name: "of all", of: over("reward_std"), detail: true },
      ] },
      { id: "reward-range", title: "Smallest and largest reward", format: number, lines: [
        { name: "largest", of: over("reward_max") },
        { name: "smallest", of: over("reward_min") },
      ] },
      single("train-accuracy", "Right responses", "accuracy", { format: share }),
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
    title: "Weights and quantized values",
    lead: "The update of the weights between two measurements beside the error of their quantized copy (both normalized), " +
      "and the share of quantized values that changed: one that does not change hides the update from the rollout.",
    plots: [
      { id: "update", title: "Weight update and quantization error", format: short, exact: number, log: true, lines: [
        { name: "update", of: over("weight_update.total"), sparse: true },
        { name: "quantization error", of: over("quantization_error.total"), sparse: true },
      ] },
      { id: "flipped", title: "Flipped quantized values", format: share, zero: true,
        lines: [{ name: "flipped", of: over("flipped_codes.total"), sparse: true }] },
      { id: "update-layers", title: "The same per block", x: "layer", format: short, exact: number, log: true, lines: [
        { name: "update", of: perBlock("weight_update") },
        { name: "quantization error", of: perBlock("quantization_error") },
      ] },
      { id: "flipped-layers", title: "Flipped quantized values per block", x: "layer", format: share, zero: true,
        lines: [{ name: "flipped", of: perBlock("flipped_codes") }] },
    ],
  },
  {
    title: "Speed",
    lead: "Response tokens per second of sampling, and of updating the weights.",
    phases: { id: "plot-phases", of: (run) => !isSupervised(run) },
    plots: [
      single("rollout-speed", "Rollout, tokens/s", "rollout_tokens_per_s", { format: count }),
      single("training-speed", "Training, tokens/s", "training_tokens_per_s", { format: count }),
      single("seconds", "Seconds of a step", "timing.total"),
    ],
  },
  {
    title: "Responses and policy",
    lead: "Length of the responses, entropy of the distributions that tokens were sampled from, and size of the gradients.",
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

/** A part of the page that can be folded; on a phone all but the first begin folded. */
let folds = 0;
function fold(id, title, lead, ...children) {
  const open = folds++ === 0 || !matchMedia("(max-width: 620px)").matches;
  const details = h("details", { open }, h("summary", {}, h("h2", {}, title)),
      h("p", { class: "lead" }, lead), ...children);
  return { node: h("section", { id }, details), details, title };
}

const slug = (title) => title.toLowerCase().replaceAll(" ", "-");

function plotSection(section) {
  const made = section.plots.map(lineChart);
  const grid = h("div", { class: "plots" }, made.map((chart) => chart.figure));
  const absent = h("p", { class: "absent", hidden: true });
  const bars = section.phases ? phaseBars(section.phases) : null;
  const part = fold(section.id || slug(section.title), section.title, section.lead,
    grid, absent, bars && bars.node);
  const update = () => {
    made.forEach((chart) => chart.draw());
    const count = made.filter((chart) => !chart.figure.hidden).length;
    const two = count % 3 !== 0 && count <= 4;
    if (grid.classList.contains("two") !== two) {
      grid.classList.toggle("two", two);
      made.forEach((chart) => chart.draw()); // they have another width now
    }
    if (bars) bars.draw();
    const hidden = made.filter((chart) => chart.figure.hidden && !chart.spec.optional).map((chart) => chart.spec.title);
    absent.hidden = !hidden.length;
    absent.textContent = `Not measured: ${hidden.join(", ")}.`;
    part.node.hidden = made.every((chart) => chart.figure.hidden);
  };
  part.details.addEventListener("toggle", update); // what is folded has no width to draw for
  return { ...part, update };
}

/**
 * Whatever runs have written down that no plot above draws: figures of newer versions, of other kinds of
 * training.
 */
function moreSection() {
  const grid = h("div", { class: "plots" });
  const part = fold("more", "More figures", "Everything else in metrics.jsonl, by its name there.", grid);
  const made = new Map();
  const update = () => {
    for (const title of leftOver().keys()) {
      const id = `more-${title.replace(/[^\w]+/g, "-")}`;
      const spec = { id, title, format: short, exact: number, optional: true,
        get lines() { return leftOver().get(title) || []; } };
      if (!made.has(title)) made.set(title, lineChart(spec));
    }
    made.forEach((chart) => { if (!chart.figure.isConnected) grid.append(chart.figure); chart.draw(); });
    part.node.hidden = [...made.values()].every((chart) => chart.figure.hidden);
  };
  part.details.addEventListener("toggle", update);
  return { ...part, update };
}

/**
 * Plots of columns that are not drawn: those of an object that is nowhere drawn share one. As [title, lines].
 */
function leftOver() {
  const keys = [...new Set(state.runs.flatMap((run) => Object.keys(run.series)))].sort();
  const prefix = (key) => (key.includes(".") ? key.slice(0, key.indexOf(".")) : "");
  const known = new Set([...drawn].map(prefix));
  const plots = new Map();
  for (const key of keys.filter((k) => k !== "step" && !k.startsWith("timing.") && !drawn.has(k))) {
    const title = prefix(key) && !known.has(prefix(key)) ? words(prefix(key)) : words(key);
    const name = title === words(key) ? title : words(key.slice(key.indexOf(".") + 1));
    if (!plots.has(title)) plots.set(title, []);
    plots.get(title).push({ name, of: (run) => points(run, key) });
  }
  return plots;
}
