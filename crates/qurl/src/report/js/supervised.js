// Supervised training in the page: the plots and figures of a run of it, and the warm start of a run.

const isSupervised = (run) => run.kind === "sft";
const warmSteps = (run) => (run.warm ? run.warm.step.length : 0);

/** A column of supervised runs only: others have a loss, too, but it is another one. */
const learned = (key) => {
  drawn.add(key);
  return (run) => (isSupervised(run) ? points(run, key) : []);
};
/** A column of the warm start. */
const warmed = (key) => (run) => (warmSteps(run) ? points({ series: run.warm }, key) : []);

/** Validation loss, with the one taken before the first step. */
drawn.add("validation_loss");
function validated(run) {
  if (!isSupervised(run)) return [];
  const before = run.figures.supervised && run.figures.supervised.validation_loss_before;
  return (missing(before) ? [] : [[0, before, 0]]).concat(points(run, "validation_loss"));
}

const lossPlot = (id, loss, validation, more) => ({
  id, title: "Loss", format: short, exact: number, ...more,
  lines: [{ name: "training", of: loss }, { name: "validation", of: validation, sparse: true }],
});

const SUPERVISED = [
  {
    id: "sft-learning",
    title: "Learning",
    lead: "Mean negative log-probability of the learned tokens: of each batch before its update, and of " +
      "the validation examples, which are never trained on.",
    plots: [
      lossPlot("sft-loss", learned("loss"), validated),
      { id: "sft-grad-norm", title: "Gradient norm", format: short, exact: number, log: true,
        lines: [{ name: "gradient norm", of: learned("grad_norm") }] },
      { id: "sft-lr", title: "Learning rate", format: short, exact: number, zero: true,
        lines: [{ name: "learning rate", of: learned("lr") }] },
    ],
  },
  {
    id: "sft-speed",
    title: "Speed",
    lead: "Tokens per second of updating the weights, prompts included.",
    phases: { id: "plot-sft-phases", of: isSupervised },
    plots: [
      { id: "sft-speed", title: "Training, tokens/s", format: count, zero: true,
        lines: [{ name: "training, tokens/s", of: learned("training_tokens_per_s") }] },
      { id: "sft-seconds", title: "Seconds of a step", format: number, zero: true,
        lines: [{ name: "seconds of a step", of: learned("timing.total") }] },
    ],
  },
];

const WARM_START = {
  title: "Warm start",
  lead: "Supervised training before the first step of reinforcement learning, over steps of its own.",
  plots: [
    lossPlot("warm-loss", warmed("loss"), warmed("validation_loss"), { x: "warm" }),
    { id: "warm-lr", title: "Learning rate", format: short, exact: number, zero: true, x: "warm",
      lines: [{ name: "learning rate", of: warmed("lr") }] },
  ],
};

/** All sections; those that the runs have nothing to say in are hidden. */
function allSections() {
  const [first, ...rest] = SECTIONS;
  const reinforced = [first, WARM_START, ...rest];
  return state.runs.some(isSupervised) ? [...SUPERVISED, ...reinforced] : [...reinforced, ...SUPERVISED];
}

const fromTo = (before, after) => [h("span", { class: "from" }, `${number(before)} → `), number(after)];

/** The top of the page of a supervised run. */
function supervisedHero(run) {
  const f = run.figures.supervised;
  const validated = !missing(f.validation_loss_after);
  const before = validated ? f.validation_loss_before : f.loss_first;
  const after = validated ? f.validation_loss_after : f.loss_last;
  const best = validated && f.validation_loss_best < after ? `best ${number(f.validation_loss_best)}` : "";
  const planned = run.total_steps && run.total_steps !== f.steps ? ` of ${run.total_steps}` : "";
  return h("div", { class: "hero card" },
    h("div", { class: "headline" }, h("div", { class: "name" }, validated ? "Validation loss" : "Loss"),
      h("div", { class: "figure", id: "headline" }, missing(after) ? number(before) : fromTo(before, after)),
      h("div", { class: "name" }, best)),
    h("div", { class: "tiles" },
      tile("Loss", number(f.loss_last), `${number(f.loss_first)} at first`),
      missing(f.accuracy) ? null : tile("Held-out accuracy", percent(f.accuracy), "greedy, at the end"),
      missing(f.epochs) ? null : tile("Epochs", number(f.epochs), "of the examples"),
      tile("Training", count(f.tokens_per_s), "tokens/s"),
      tile("Time", duration(f.seconds), `${f.steps}${planned} steps`),
      tile("Updates", number(f.updates, 6), `${f.skipped_updates || "none"} skipped`)));
}

/** The warm start among the figures of a run of reinforcement learning. */
function warmTile(run) {
  const f = run.figures.warm_start;
  return f ? tile("Warm start", number(f.loss_last), `loss, ${number(f.loss_first)} at first`) : null;
}

/** What a comparison of supervised runs says of each. */
const SUPERVISED_OVERVIEW = [
  ["validation loss before", (f) => f.validation_loss_before, number],
  ["after", (f) => f.validation_loss_after, number],
  ["best", (f) => f.validation_loss_best, number],
  ["first loss", (f) => f.loss_first, number],
  ["last loss", (f) => f.loss_last, number],
  ["training tok/s", (f) => f.tokens_per_s, count],
  ["time", (f) => f.seconds, duration],
  ["steps", (f) => f.steps, (v) => number(v, 6)],
].map(([name, of, format]) => [name, (figures) => of(figures.supervised), format]);

/** Where a live run is before its first step. */
function beforeFirstStep(run) {
  const [done, planned] = [warmSteps(run), new Map(run.settings).get("sft.steps")];
  return done ? `live, warm start, step ${done} of ${planned}` : "live, before the first step";
}
