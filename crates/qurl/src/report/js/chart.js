// One plot of lines: an SVG drawn anew whenever data, size or choices change. All plots over steps share the
// cross-hair and the stretch that is zoomed into.

const MARGIN = { left: 50, right: 14, top: 14, bottom: 24 };
const HEIGHT = 222;
const DASHES = ["", "6 4", "1.5 4"];
const charts = [];

/**
 * A chart of `spec`: { id, title, lines: [{ name, of(run), sparse, detail }], format, exact, log, zero,
 * whole, x, optional }. An optional one belongs to some algorithms only, so that its absence says nothing;
 * `lines` may be a getter that looks for them in the runs; a line that is a detail is left out while several
 * runs are shown; a sparse one is never smoothed. `log` is how the plot begins: the reader can switch.
 */
function lineChart(spec) {
  const key = h("span", { class: "key" });
  const plot = svg("svg", { class: "plot", tabindex: "0", role: "img" });
  const tip = h("div", { class: "tip", hidden: true });
  const log = h("button", { type: "button", class: "small log" }, "log");
  const tools = h("span", { class: "tools" }, log);
  const figure = h("figure", { class: "card", id: `plot-${spec.id}` },
    h("figcaption", {}, h("span", { class: "title" }, spec.title), tools, key), plot, tip);
  const chart = { spec, figure, plot, tip, key, lines: [], log: Boolean(spec.log), logButton: log,
    draw: () => draw(chart), cross: (x) => cross(chart, x) };
  log.addEventListener("click", () => { chart.log = !chart.log; chart.draw(); });
  tools.append(saveMenu(chart));
  listen(chart);
  charts.push(chart);
  return chart;
}

function collect(spec) {
  const [lines, many, weight] = [[], shown().length > 1, smoothing()];
  const kinds = spec.lines;
  for (const { name, runs, index } of shown()) {
    kinds.forEach((line, kind) => {
      const each = line.detail && many ? [] : runs.map(line.of).filter((found) => found.length);
      const raw = each.length > 1 ? averaged(each) : each[0];
      if (!raw) return;
      const smooth = weight > 0 && spec.x !== "layer" && !line.sparse && raw.length > 1;
      const names = [several() && name, (kinds.length > 1 || !several()) && line.name];
      lines.push({
        name: names.filter(Boolean).join(", "), kind, dash: DASHES[Math.min(kind, 2)], colour: colour(several() ? index : kind),
        raw, points: smooth ? smoothed(raw, weight) : raw, smooth, band: each.length > 1, seeds: runs.length,
      });
    });
  }
  return { lines, kinds };
}

/** The part of a line that is shown: what lies in the zoomed stretch, and one point on either side of it. */
function visible(line, spec) {
  if (!state.zoom || spec.x) return line;
  const [low, high] = state.zoom;
  const inside = line.map(([x]) => x >= low && x <= high);
  return line.filter((_, i) => inside[i] || inside[i - 1] || inside[i + 1]);
}

function draw(chart) {
  const { spec, figure, plot, key } = chart;
  const { lines, kinds } = collect(spec);
  chart.lines = lines;
  const total = lines.reduce((sum, line) => sum + line.raw.length, 0);
  figure.dataset.points = total;
  const awaited = state.live && !spec.optional && !state.runs.every((run) => run.finished);
  figure.hidden = total === 0 && !awaited;
  plot.replaceChildren();
  const there = kinds.map((_, kind) => lines.some((line) => line.kind === kind));
  key.replaceChildren(...(there.filter(Boolean).length > 1 ? kinds.map((line, kind) => there[kind] &&
    h("span", {}, swatch(several() ? "var(--soft)" : colour(kind), kind), line.name)).filter(Boolean) : []));
  if (figure.hidden) return;
  const width = plot.clientWidth || 340;
  plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  chart.scaleX = null;
  if (total === 0) {
    plot.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing measured yet"));
    return;
  }
  const box = { left: MARGIN.left, right: width - MARGIN.right,
      top: MARGIN.top, bottom: HEIGHT - MARGIN.bottom };
  const seen = lines.map((line) => ({ line, raw: visible(line.raw, spec),
      points: visible(line.points, spec) }));
  axes(chart, box, seen.flatMap(({ points }) => points));
  // A picture inside the picture cuts off what lies outside of the axes.
  const [x, inner] = [box.left - 4, box.right - box.left + 8];
  const drawn = svg("svg", { x, y: 0, width: inner, height: HEIGHT, viewBox: `${x} 0 ${inner} ${HEIGHT}` });
  seen.forEach(({ line, raw, points }) => drawn.append(...paths(chart, line, raw, points)));
  plot.append(drawn);
  const ends = lines.map((line) =>
      `${line.name || spec.title} ${spec.format(line.raw[line.raw.length - 1][1])}`);
  plot.setAttribute("aria-label", `${spec.title}; last values: ${ends.join("; ")}`);
  chart.overlay = svg("g", {});
  plot.append(chart.overlay);
}

/** What the horizontal axis of a plot counts; one with an `x` of its own takes no part in zooming. */
function unit(spec) {
  if (spec.x) return spec.x === "layer" ? "block" : "step";
  return state.x === "step" ? "step" : "min";
}

/** Scales, grid, ticks and the word "log" where the axis is. */
function axes(chart, { left, right, top, bottom }, seen) {
  const { spec, plot } = chart;
  const everything = seen.flatMap((point) => [point[1], ...edges(point, spec)]);
  const xs = state.zoom && !spec.x ? state.zoom
      : chart.lines.flatMap((line) => line.points.map((p) => p[0]));
  let [low, high] = [lowest(xs), highest(xs)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const scaleX = (chart.scaleX = linear(low, high, left, right, Math.max(2, Math.floor((right - left) / 56))));
  const values = everything.length ? everything : [0, 1];
  const scaleY = (chart.scaleY = yScale(values, { ...spec, log: chart.log }, bottom, top));
  chart.logButton.setAttribute("aria-pressed", String(Boolean(scaleY.log)));
  chart.logButton.disabled = !values.some((v) => v > 0);
  chart.logButton.title = scaleY.log ? "Logarithmic axis; switch to a linear one"
      : "Linear axis; switch to a logarithmic one";
  plot.dataset.axis = scaleY.log ? "log" : "linear";
  for (const tick of scaleY.ticks) {
    const y = Math.round(scaleY.place(tick)) + 0.5;
    plot.append(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
      svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, spec.format(tick)));
  }
  if (scaleY.log) plot.append(svg("text", { class: "axis", x: 2, y: 9 }, "log scale"));
  const whole = spec.x || state.x === "step";
  const last = `${number(high, 4)} ${unit(spec)}`;
  for (const tick of scaleX.ticks.filter((t) => !whole || Number.isInteger(t))) {
    const x = scaleX.place(tick);
    if (x < right - 6.5 * last.length - 14) plot.append(svg("text", { x, y: HEIGHT - 6, "text-anchor": "middle" }, number(tick, 6)));
  }
  plot.append(svg("text", { x: right, y: HEIGHT - 6, "text-anchor": "end" }, last));
}

/** Where a band ends below and above: a deviation from the mean, but no further than values can be. */
function edges([, y, , deviation = 0], spec) {
  const low = spec.zero && y >= 0 ? Math.max(0, y - deviation) : y - deviation;
  return [low, spec.whole !== undefined ? Math.min(spec.whole, y + deviation) : y + deviation];
}

/** The band, the raw and the smoothed line, and spots where there are few points. */
function paths(chart, line, raw, points) {
  const { scaleX, scaleY } = chart;
  const place = ([x, y]) => `${scaleX.place(x).toFixed(1)},${scaleY.place(y).toFixed(1)}`;
  const path = (part) =>
      segments(part, scaleY).map((piece) => "M" + thinned(piece).map(place).join("L")).join("");
  const paint = { class: "line", style: { stroke: line.colour }, "stroke-dasharray": line.dash };
  const made = [];
  if (line.band) {
    const upper = points.map((point) => [point[0], edges(point, chart.spec)[1]]);
    const lower = points.map((point) => [point[0], edges(point, chart.spec)[0]]).reverse();
    made.push(svg("path", { class: "band", style: { fill: line.colour },
        d: `M${upper.concat(lower).map(place).join("L")}Z` }));
  }
  if (line.smooth && !line.band) made.push(svg("path", { ...paint, class: "line raw", d: path(raw) }));
  made.push(svg("path", { ...paint, d: path(points) }));
  if (points.length <= 24) made.push(...points.map((p) => spot(chart, line, p, 2.6)));
  return made;
}

/** On a logarithmic axis a line has gaps where it is negative; zeros stand on the lower edge. */
function segments(line, scale) {
  if (!scale.log) return line.length ? [line] : [];
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
