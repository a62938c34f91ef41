// One plot of lines: an SVG drawn anew whenever data, size or choices change. All plots over steps share the cross-hair.

const MARGIN = { left: 50, right: 14, top: 8, bottom: 24 };
const HEIGHT = 216;
const DASHES = ["", "6 4", "1.5 4"];
const charts = [];

/**
 * A chart of `spec`: { id, title, lines: [{ name, of(run), sparse, detail }], format, exact, log, zero, whole, x, optional }.
 * An optional one belongs to some algorithms only, so that its absence says nothing; a line that is a detail is left out
 * while several runs are shown; a sparse one is never smoothed.
 */
function lineChart(spec) {
  const key = h("span", { class: "key" });
  const plot = svg("svg", { class: "plot", tabindex: "0", role: "img" });
  const tip = h("div", { class: "tip", hidden: true });
  const figure = h("figure", { class: "card", id: `plot-${spec.id}` },
    h("figcaption", {}, h("span", { class: "title" }, spec.title), key), plot, tip);
  const chart = { spec, figure, plot, tip, key, lines: [], draw: () => draw(chart), cross: (x) => cross(chart, x) };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    if (chart.scaleX) hover(chart, chart.scaleX.value(event.clientX - box.left));
  });
  plot.addEventListener("pointerleave", () => hover(chart, null));
  plot.addEventListener("blur", () => hover(chart, null));
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !chart.lines.length) return;
    event.preventDefault();
    const xs = [...new Set(chart.lines.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
    const at = chart.at === undefined ? xs.length : xs.findIndex((x) => x >= chart.at);
    hover(chart, xs[Math.min(xs.length - 1, Math.max(0, at + move))]);
  });
  charts.push(chart);
  return chart;
}

function collect(spec) {
  const lines = [];
  for (const { run, index } of shown()) {
    spec.lines.forEach((line, kind) => {
      const raw = line.detail && shown().length > 1 ? [] : line.of(run);
      if (!raw.length) return;
      const smooth = state.smooth > 0 && spec.x !== "layer" && !line.sparse;
      const names = [several() && run.label, (spec.lines.length > 1 || !several()) && line.name];
      lines.push({
        name: names.filter(Boolean).join(", "), kind, dash: DASHES[Math.min(kind, 2)], colour: colour(several() ? index : kind),
        raw, points: smooth ? smoothed(raw, state.smooth) : raw, smooth,
      });
    });
  }
  return lines;
}

function draw(chart) {
  const { spec, figure, plot, key } = chart;
  const lines = (chart.lines = collect(spec));
  const total = lines.reduce((sum, line) => sum + line.raw.length, 0);
  figure.dataset.points = total;
  const awaited = state.live && !spec.optional && !state.runs.every((run) => run.finished);
  figure.hidden = total === 0 && !awaited;
  plot.replaceChildren();
  const kinds = spec.lines.filter((line, kind) => lines.some((l) => l.kind === kind));
  key.replaceChildren(...(kinds.length > 1 ? spec.lines.map((line, kind) => kinds.includes(line) &&
    h("span", {}, swatch(several() ? "var(--soft)" : colour(kind), kind), line.name)).filter(Boolean) : []));
  if (figure.hidden) return;
  const width = plot.clientWidth || 340;
  plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  if (total === 0) {
    plot.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing measured yet"));
    chart.scaleX = null;
    return;
  }
  const [left, right, top, bottom] = [MARGIN.left, width - MARGIN.right, MARGIN.top, HEIGHT - MARGIN.bottom];
  const xs = lines.flatMap((line) => line.points.map((p) => p[0]));
  let [low, high] = [lowest(xs), highest(xs)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const scaleX = (chart.scaleX = linear(low, high, left, right, Math.max(2, Math.floor((right - left) / 56))));
  const scaleY = (chart.scaleY = yScale(lines.flatMap((line) => line.points.map((p) => p[1])), spec, bottom, top));
  for (const tick of scaleY.ticks) {
    const y = Math.round(scaleY.place(tick)) + 0.5;
    plot.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
      svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, spec.format(tick)));
  }
  const whole = spec.x === "layer" || state.x === "step";
  const last = `${number(high, 4)} ${spec.x === "layer" ? "block" : state.x === "step" ? "step" : "min"}`;
  for (const tick of scaleX.ticks.filter((t) => !whole || Number.isInteger(t))) {
    const x = scaleX.place(tick);
    if (x < right - 6.5 * last.length - 14) plot.append(svg("text", { x, y: HEIGHT - 6, "text-anchor": "middle" }, number(tick, 6)));
  }
  plot.append(svg("text", { x: right, y: HEIGHT - 6, "text-anchor": "end" }, last));
  const path = (line) => segments(line, scaleY).map((part) =>
    "M" + thinned(part).map(([x, y]) => `${scaleX.place(x).toFixed(1)},${scaleY.place(y).toFixed(1)}`).join("L")).join("");
  for (const line of lines) {
    const paint = { class: "line", style: { stroke: line.colour }, "stroke-dasharray": line.dash };
    if (line.smooth) plot.append(svg("path", { ...paint, class: "line raw", d: path(line.raw) }));
    plot.append(svg("path", { ...paint, d: path(line.points) }));
    if (line.points.length <= 24) plot.append(...line.points.map((p) => spot(chart, line, p, 2.6)));
  }
  const ends = lines.map((line) => `${line.name || spec.title} ${spec.format(line.raw[line.raw.length - 1][1])}`);
  plot.setAttribute("aria-label", `${spec.title}; last values: ${ends.join("; ")}`);
  chart.overlay = svg("g", {});
  plot.append(chart.overlay);
}

/** On a logarithmic axis a line has gaps where it is negative; zeros stand on the lower edge. */
function segments(line, scale) {
  if (!scale.log) return [line];
  const parts = [[]];
  for (const point of line) {
    if (point[1] >= 0) parts[parts.length - 1].push(point);
    else if (parts[parts.length - 1].length) parts.push([]);
  }
  return parts.filter((part) => part.length);
}

function swatch(paint, kind) {
  return h("span", { class: `swatch d${Math.min(kind, 2)}`, style: { "border-color": paint } });
}

function spot(chart, line, [x, y], r) {
  return svg("circle", { class: "spot", cx: chart.scaleX.place(x), cy: chart.scaleY.place(y), r, style: { fill: line.colour } });
}

/** The reader points at `x` in `chart`: its values are shown, and the same place is marked in all plots over steps. */
function hover(chart, x) {
  const linked = charts.filter((other) => other.spec.x === chart.spec.x);
  for (const other of linked) other.cross(x);
  chart.at = x === null ? undefined : x;
  chart.tip.hidden = x === null || !chart.lines.length;
  if (chart.tip.hidden) return;
  const found = nearest(chart, x);
  const unit = chart.spec.x === "layer" ? "block" : state.x === "step" ? "step" : "minute";
  chart.at = found[0].point[0];
  const exact = chart.spec.exact || chart.spec.format;
  chart.tip.replaceChildren(h("div", { class: "at" }, `${unit} ${number(chart.at, 6)}`), ...found.slice(0, 14).map((f) =>
    h("div", {}, swatch(f.line.colour, f.line.kind), h("span", {}, f.line.name), h("b", {}, exact(f.raw[1])))));
  const [figure, plot] = [chart.figure.getBoundingClientRect(), chart.plot.getBoundingClientRect()];
  const place = plot.left - figure.left + chart.scaleX.place(chart.at);
  const side = place + 14 + chart.tip.offsetWidth > figure.width ? place - 14 - chart.tip.offsetWidth : place + 14;
  chart.tip.style.left = `${Math.max(8, Math.min(figure.width - chart.tip.offsetWidth - 8, side))}px`;
  chart.tip.style.top = `${plot.top - figure.top + 6}px`;
}

/** The point nearest to `x` of each line that has one about there; the nearest of all comes first. */
function nearest(chart, x) {
  const found = chart.lines.map((line) => {
    let [a, b] = [0, line.points.length - 1];
    while (b - a > 1) {
      const middle = (a + b) >> 1;
      if (line.points[middle][0] <= x) a = middle;
      else b = middle;
    }
    const at = Math.abs(line.points[a][0] - x) <= Math.abs(line.points[b][0] - x) ? a : b;
    const distance = Math.abs(line.points[at][0] - x);
    const spacing = (line.points[line.points.length - 1][0] - line.points[0][0]) / Math.max(1, line.points.length - 1);
    return { line, point: line.points[at], raw: line.raw[at], distance, spacing };
  });
  const best = lowest(found.map((f) => f.distance));
  const about = found.filter((f) => f.distance <= Math.max(best, f.spacing));
  return about.filter((f) => f.distance === best).concat(about.filter((f) => f.distance > best));
}

function cross(chart, x) {
  if (!chart.overlay || !chart.scaleX) return;
  chart.overlay.replaceChildren();
  if (x === null || !chart.lines.length) return;
  const found = nearest(chart, x);
  const place = chart.scaleX.place(found[0].point[0]);
  chart.overlay.append(svg("line", { class: "cross", x1: place, x2: place, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
    ...found.map(({ line, point }) => spot(chart, line, point, 4)));
}
