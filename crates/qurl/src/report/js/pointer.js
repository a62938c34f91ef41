// What a reader does with a plot: points at it for values, drags to zoom, double-clicks to see everything
// again.

/** A drag of fewer pixels is a click. */
const DRAG = 8;

function listen(chart) {
  const { plot } = chart;
  const at = (event) => event.clientX - plot.getBoundingClientRect().left;
  let from = null;
  plot.addEventListener("pointerdown", (event) => {
    if (!chart.scaleX || chart.spec.x || event.button > 0) return;
    from = at(event);
    try { plot.setPointerCapture(event.pointerId); } catch {
    /* a pointer that is gone already, or none at all */ }
  });
  plot.addEventListener("pointermove", (event) => {
    if (!chart.scaleX) return;
    if (from !== null && Math.abs(at(event) - from) >= DRAG) select(chart, from, at(event));
    else hover(chart, chart.scaleX.value(at(event)));
  });
  plot.addEventListener("pointerup", (event) => {
    const [begin, end] = [from, at(event)];
    from = null;
    if (begin === null || Math.abs(end - begin) < DRAG || !chart.scaleX) return;
    const clamp = (p) => Math.min(plot.clientWidth - MARGIN.right, Math.max(MARGIN.left, p));
    const [a, b] = [clamp(begin), clamp(end)].map(chart.scaleX.value).sort((x, y) => x - y);
    if (b > a) zoom([a, b]);
  });
  plot.addEventListener("pointercancel", () => { from = null; hover(chart, null); });
  plot.addEventListener("dblclick", () => zoom(null));
  plot.addEventListener("pointerleave", () => hover(chart, null));
  plot.addEventListener("blur", () => hover(chart, null));
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && state.zoom) return zoom(null);
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !chart.lines.length) return undefined;
    event.preventDefault();
    const xs = [...new Set(chart.lines.flatMap((line) => visible(line.points, chart.spec).map((p) => p[0])))]
          .sort((a, b) => a - b);
    const index = chart.at === undefined ? xs.length : xs.findIndex((x) => x >= chart.at);
    return hover(chart, xs[Math.min(xs.length - 1, Math.max(0, index + move))]);
  });
}

/** Shows a stretch of the x axis in all plots over steps; everything with null. */
function zoom(stretch) {
  state.zoom = stretch;
  for (const chart of charts) if (!chart.spec.x) chart.draw();
  document.dispatchEvent(new Event("zoomed"));
}

/** The stretch that is being dragged over. */
function select(chart, from, to) {
  hover(chart, null);
  const [left, right] = [Math.min(from, to), Math.max(from, to)];
  chart.overlay.replaceChildren(svg("rect", { class: "selection", x: left, width: right - left, y: MARGIN.top,
    height: HEIGHT - MARGIN.top - MARGIN.bottom }));
}

/**
 * The reader points at `x` in `chart`: its values are shown, and the same place is marked in all plots over
 * steps.
 */
function hover(chart, x) {
  const linked = charts.filter((other) => other.spec.x === chart.spec.x);
  for (const other of linked) other.cross(x);
  chart.at = x === null ? undefined : x;
  chart.tip.hidden = x === null || !chart.lines.length;
  if (chart.tip.hidden) return;
  const found = nearest(chart, x);
  chart.at = found[0].point[0];
  const smooth = found.some((f) => f.line.smooth) ? `, smoothed by ${smoothing()}` : "";
  chart.tip.replaceChildren(h("div", { class: "at" }, `${unit(chart.spec)} ${number(chart.at, 6)}${smooth}`),
    ...found.slice(0, 14).map((f) => tipRow(chart, f)));
  const [figure, plot] = [chart.figure.getBoundingClientRect(), chart.plot.getBoundingClientRect()];
  const place = plot.left - figure.left + chart.scaleX.place(chart.at);
  const side = place + 14 + chart.tip.offsetWidth > figure.width
      ? place - 14 - chart.tip.offsetWidth : place + 14;
  chart.tip.style.left = `${Math.max(8, Math.min(figure.width - chart.tip.offsetWidth - 8, side))}px`;
  chart.tip.style.top = `${plot.top - figure.top + 6}px`;
}

/** The value as it is drawn; beside it the one that was measured, or the spread over seeds. */
function tipRow(chart, { line, point, raw }) {
  const exact = chart.spec.exact || chart.spec.format;
  const count = line.band && raw[4] < line.seeds ? ` (${raw[4]} of ${line.seeds} seeds)` : "";
  const beside = line.band && raw[4] > 1 ? ` ± ${exact(point[3])}` : line.smooth ? ` (${exact(raw[1])})` : "";
  return h("div", {}, swatch(line.colour, line.kind), h("span", {}, `${line.name}${count}`),
    h("b", {}, exact(point[1]), h("i", {}, beside)));
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
    const spacing = (line.points[line.points.length - 1][0] - line.points[0][0])
        / Math.max(1, line.points.length - 1);
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
  if (place < MARGIN.left - 1 || place > chart.plot.clientWidth - MARGIN.right + 1) return;
  chart.overlay.append(svg("line", { class: "cross", x1: place, x2: place,
      y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
    ...found.map(({ line, point }) => spot(chart, line, point, 4)));
}
