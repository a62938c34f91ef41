// Where the time of a step goes: one bar a run, made of its phases.

const PHASES = ["quantize", "rollout", "score", "update", "measure", "evaluate", "checkpoint", "log"];

/** Seconds of each phase over a whole run, the known ones first and in the order of a step. */
function phaseSums(run) {
  const names = Object.keys(run.series).filter((key) => key.startsWith("timing.") && key !== "timing.total").map((key) => key.slice(7));
  const rank = (name) => (PHASES.includes(name) ? PHASES.indexOf(name) : PHASES.length);
  return names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b))
    .map((name) => ({ name, seconds: run.series[`timing.${name}`].reduce((a, b) => a + (b || 0), 0) }))
    .filter((phase) => phase.seconds > 0);
}

function phaseBars() {
  const key = h("span", { class: "key" });
  const plot = svg("svg", { role: "img", "aria-label": "Shares of the phases of a step" });
  const node = h("figure", { class: "card phases", id: "plot-phases", style: { "margin-top": "16px" } },
    h("figcaption", {}, h("span", { class: "title" }, "Where the time goes"), key), plot);
  const draw = () => {
    const rows = shown().map(({ run }) => ({ run, phases: phaseSums(run) })).filter((row) => row.phases.length);
    node.dataset.points = rows.reduce((sum, row) => sum + row.phases.length, 0);
    node.hidden = !rows.length;
    if (node.hidden) return;
    const width = plot.clientWidth || 340;
    const rowHeight = several() ? 46 : 30;
    const height = rows.length * rowHeight;
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    plot.style.height = `${height}px`;
    plot.replaceChildren();
    const names = [...new Set(rows.flatMap((row) => row.phases.map((p) => p.name)))];
    key.replaceChildren(...names.map((name, i) => h("span", {}, h("span", { class: "swatch", style: { "border-color": colour(i) } }), name)));
    rows.forEach(({ run, phases }, row) => {
      const top = row * rowHeight + (several() ? 18 : 2);
      const sum = phases.reduce((a, p) => a + p.seconds, 0);
      const steps = run.series.step.length;
      if (several()) plot.append(svg("text", { x: 0, y: top - 5 }, `${run.label} `, svg("tspan", { class: "soft" }, `${duration(sum / steps)} a step`)));
      let x = 0;
      for (const phase of phases) {
        const span = (phase.seconds / sum) * width;
        const text = `${phase.name} ${percent(phase.seconds / sum, 0)}`;
        plot.append(svg("rect", { x, y: top, width: Math.max(0, span - 1.5), height: 24, rx: 3, style: { fill: colour(names.indexOf(phase.name)), opacity: 0.85 } },
          svg("title", {}, `${text}, ${duration(phase.seconds / steps)} a step`)));
        if (span > text.length * 7.4) plot.append(svg("text", { x: x + 7, y: top + 16.5, style: { fill: "var(--card)", "font-weight": 600 } }, text));
        x += span;
      }
    });
  };
  return { node, draw };
}
