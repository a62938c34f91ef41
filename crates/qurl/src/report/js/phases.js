// Where the time of a step goes: one bar a run, made of its phases.

const PHASES = ["quantize", "rollout", "verify", "score", "update", "measure", "test", "checkpoint", "log"];

/** Seconds of each phase over whole runs, the known ones first and in the order of a step. */
function phaseSums(runs) {
  const keys = new Set(runs.flatMap((run) => Object.keys(run.series)));
  const timed = [...keys].filter((key) => key.startsWith("timing.") && key !== "timing.total");
  const sum = (key) => runs.flatMap((run) => run.series[key] || []).reduce((a, b) => a + (b || 0), 0);
  const rank = ({ name }) => (PHASES.includes(name) ? PHASES.indexOf(name) : PHASES.length);
  return timed.map((key) => ({ name: key.slice(7), seconds: sum(key) }))
    .filter((phase) => phase.seconds > 0)
    .sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
}

function phaseBars({ id, of }) {
  const key = h("span", { class: "key" });
  const plot = svg("svg", { role: "img", "aria-label": "Shares of the phases of a step" });
  const node = h("figure", { class: "card phases", id },
    h("figcaption", {}, h("span", { class: "title" }, "Where the time goes"), key), plot);
  const draw = () => {
    const steps = (runs) => runs.reduce((sum, run) => sum + run.series.step.length, 0);
    const rows = shown().map(({ name, runs }) => ({ name, runs: runs.filter(of) }))
      .map(({ name, runs }) => ({ name, steps: steps(runs), phases: phaseSums(runs) }))
      .filter((row) => row.phases.length);
    node.dataset.points = rows.reduce((sum, row) => sum + row.phases.length, 0);
    node.hidden = !rows.length;
    if (node.hidden) return;
    const width = plot.clientWidth || 340;
    const rowHeight = several() ? 46 : 30;
    plot.setAttribute("viewBox", `0 0 ${width} ${rows.length * rowHeight}`);
    plot.style.height = `${rows.length * rowHeight}px`;
    plot.replaceChildren();
    const found = new Set(rows.flatMap((row) => row.phases.map((phase) => phase.name)));
    const names = [...PHASES.filter((name) => found.has(name)), ...[...found].filter((name) => !PHASES.includes(name))];
    key.replaceChildren(...names.map((name, i) => h("span", {}, swatch(colour(i), 0), name)));
    rows.forEach(({ name, steps, phases }, row) => {
      const top = row * rowHeight + (several() ? 18 : 2);
      if (several()) {
        const seconds = phases.reduce((a, p) => a + p.seconds, 0) / steps;
        plot.append(svg("text", { x: 0, y: top - 5 }, `${name} `,
          svg("tspan", { class: "soft" }, `${duration(seconds)} a step`)));
      }
      plot.append(...bar(phases, names, steps, top, width));
    });
  };
  return { node, draw };
}

/** The pieces of one bar, with their names where they fit. */
function bar(phases, names, steps, top, width) {
  const sum = phases.reduce((a, p) => a + p.seconds, 0);
  let x = 0;
  return phases.flatMap((phase) => {
    const span = (phase.seconds / sum) * width;
    const text = `${phase.name} ${percent(phase.seconds / sum, 0)}`;
    const fill = colour(names.indexOf(phase.name));
    const pieces = [svg("rect", { x, y: top, width: Math.max(0, span - 1.5), height: 24, rx: 3, style: { fill } },
      svg("title", {}, `${text}, ${duration(phase.seconds / steps)} a step`))];
    if (span > text.length * 7.4) pieces.push(svg("text", { class: "inside", x: x + 7, y: top + 16.5 }, text));
    x += span;
    return pieces;
  });
}
