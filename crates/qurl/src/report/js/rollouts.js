// Sampled responses, token by token: coloured by ρ (what quantization did to the token's probability) or by advantage (what
// the update makes of it).

const paints = {
  rho: {
    name: "ρ",
    low: "ρ ≤ ½: less likely in full precision",
    high: "ρ ≥ 2: more likely",
    of: (sample, i) => (missing(sample.rho[i]) ? null : Math.log2(sample.rho[i])),
  },
  advantage: {
    name: "Advantage",
    low: "−2: made less likely",
    high: "+2: made more likely",
    of: (sample, i) => (sample.advantages.length ? sample.advantages[i] : sample.advantage) / 2,
  },
};

/** Blue below 0, orange above, nothing at 0; full strength at ±1. */
function tint(level) {
  if (missing(level) || Math.abs(level) < 0.02) return "transparent";
  const strength = Math.round(70 * Math.min(1, Math.abs(level)) ** 0.7);
  return `color-mix(in srgb, var(${level < 0 ? "--rho-low" : "--rho-high"}) ${strength}%, transparent)`;
}

function rolloutsPart() {
  const choice = { run: 0, step: null, paint: "rho" };
  const select = (label, key) => {
    const node = h("select", { "aria-label": label, onchange: () => { choice[key] = Number(node.value); update(); } });
    return node;
  };
  const runSelect = select("Run", "run");
  const stepSelect = select("Step", "step");
  const buttons = Object.entries(paints).map(([key, paint]) =>
    h("button", { type: "button", "data-paint": key, onclick: () => { choice.paint = key; update(); } }, paint.name));
  const scale = h("span", { class: "scale" });
  const list = h("div", { class: "samples" });
  const part = fold("rollouts", "Sampled responses",
    "Every token as it was sampled. Point at one for its figures.",
    h("div", { class: "row" }, runSelect, stepSelect,
      h("span", { class: "choice", role: "group", "aria-label": "Colour" }, buttons), scale),
    list);
  const { node } = part;
  const update = () => {
    const withSamples = state.runs.map((run, index) => ({ run, index })).filter(({ run }) => run.rollouts.length);
    node.hidden = !withSamples.length;
    if (node.hidden) return;
    if (!withSamples.some(({ index }) => index === choice.run)) choice.run = withSamples[0].index;
    const { rollouts } = state.runs[choice.run];
    const current = rollouts.find((r) => r.step === choice.step) || rollouts[rollouts.length - 1];
    const option = (value, selected, text) => h("option", { value, selected }, text);
    runSelect.hidden = !several();
    runSelect.replaceChildren(...withSamples.map(({ run, index }) => option(index, index === choice.run, run.label)));
    stepSelect.replaceChildren(...rollouts.map((r) => option(r.step, r === current, `step ${r.step}`)));
    buttons.forEach((button) => button.setAttribute("aria-pressed", button.dataset.paint === choice.paint));
    scale.replaceChildren(paints[choice.paint].low, h("i", { class: choice.paint }), paints[choice.paint].high);
    list.replaceChildren(...current.samples.map((sample) => sampleCard(sample, paints[choice.paint])));
  };
  return { ...part, update };
}

function sampleCard(sample, paint) {
  const figures = { reward: sample.reward, ...sample.reward_parts, advantage: sample.advantage };
  const facts = [["answer", { true: "right", false: "wrong" }[sample.correct]]];
  facts.push(...Object.entries(figures).map(([name, value]) => [name, number(value)]));
  facts.push(["largest ρ", number(sample.rho.reduce((a, b) => Math.max(a, b || 0), 0))], ["tokens", sample.length]);
  facts.push(["end", sample.finish], ["wanted", sample.answer], ["found", sample.extracted]);
  const known = facts.filter(([, value]) => ![null, undefined, "", "–"].includes(value));
  const tokens = sample.tokens.map((text, i) => {
    const probability = (logp) => (missing(logp) ? "–" : number(Math.exp(logp)));
    const title = `ρ ${number(sample.rho[i], 4)}, behav ${probability(sample.behav[i])}, prox ${probability(sample.prox[i])}`;
    return h("span", { title, style: { background: tint(paint.of(sample, i)) } }, text === "\n" ? "⏎\n" : text);
  });
  const rest = sample.length > sample.tokens.length ? `… ${sample.length - sample.tokens.length} more tokens` : null;
  return h("article", { class: "sample card" },
    h("div", { class: "about" }, known.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, String(value)))),
      h("span", {}, sample.problem)),
    h("p", { class: "prompt" }, sample.prompt),
    h("p", { class: "tokens" }, tokens, rest));
}
