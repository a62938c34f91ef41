// What the page knows: the runs as columns of figures, which of them are shown, and how.

// `smooth` is the reader's choice, null until there is one; `zoom` is the stretch of the x axis that all
// plots over steps show; `seeds` is how runs that differ in their seed alone are drawn: as mean and band, or
// each by itself.
const state = { runs: [], hidden: new Set(), x: "step",
  smooth: null, zoom: null, seeds: "band", live: false };

const several = () => state.runs.length > 1;
const grouped = () => state.runs.some((run) => run.group);

/** What is drawn in one colour: a run, or the runs of a group. `name` is what `state.hidden` goes by. */
function families() {
  const found = [];
  for (const run of state.runs) {
    const name = state.seeds === "band" && run.group ? run.group : run.label;
    const family = found.find((f) => f.name === name);
    if (family) family.runs.push(run);
    else found.push({ name, runs: [run], index: found.length });
  }
  return found;
}
const shown = () => families().filter((family) => !state.hidden.has(family.name));
const colour = (index) => `var(--c${index % 8})`;

/** The weight of the exponential mean: by itself, one that averages a twentieth of the longest run. */
function smoothing() {
  if (state.smooth !== null) return state.smooth;
  const window = Math.max(0, ...state.runs.map((run) => run.series.step.length)) / 20;
  return window <= 1 ? 0 : Math.min(0.9, Math.round(20 * (1 - 2 / (window + 1))) / 20);
}

/** The x of each step: its number, or the minutes of training up to its end. */
function positions(run) {
  if (state.x === "step") return run.series.step;
  let sum = 0;
  return (run.series["timing.total"] || run.series.step.map(() => 0)).map((seconds) => (sum += (seconds || 0) / 60));
}

/** The points of one column, each as [x, y, step]; steps without a value are left out. */
function points(run, key) {
  const values = run.series[key];
  if (!values) return [];
  const xs = positions(run);
  const found = [];
  values.forEach((y, i) => missing(y) || found.push([xs[i], y, run.series.step[i]]));
  return found;
}

/** Held-out accuracy, with the one measured before the first step. */
function heldOut(run, key, before) {
  const start = missing(run.figures[before]) ? [] : [[0, run.figures[before], 0]];
  return start.concat(points(run, key));
}

/** The mean over all measurements of a figure, layer by layer. */
function layerMeans(run, key) {
  const rows = run.layers[key] || [];
  if (!rows.length) return [];
  return rows[0].map((_, layer) => {
    const values = rows.map((row) => row[layer]).filter((v) => !missing(v));
    return [layer, values.reduce((a, b) => a + b, 0) / values.length, layer];
  }).filter(([, y]) => !missing(y));
}

/**
 * Mean of several lines, step by step, over those that have a value there; with them the sample standard
 * deviation and the number of values: points are [x, mean, step, deviation, count].
 */
function averaged(lines) {
  const at = new Map();
  for (const point of lines.flat()) {
    if (!at.has(point[2])) at.set(point[2], []);
    at.get(point[2]).push(point);
  }
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  return [...at].sort((a, b) => a[0] - b[0]).map(([step, found]) => {
    const y = mean(found.map((p) => p[1]));
    const squares = found.reduce((sum, p) => sum + (p[1] - y) ** 2, 0);
    const deviation = found.length > 1 ? Math.sqrt(squares / (found.length - 1)) : 0;
    return [mean(found.map((p) => p[0])), y, step, deviation, found.length];
  });
}

/** An exponential mean that does not lean towards its first value; a deviation is smoothed as its line is. */
function smoothed(line, weight) {
  let [sum, spread, mass] = [0, 0, 0];
  return line.map(([x, y, step, deviation = 0, count = 1]) => {
    sum = weight * sum + (1 - weight) * y;
    spread = weight * spread + (1 - weight) * deviation;
    mass = weight * mass + (1 - weight);
    return [x, sum / mass, step, spread / mass, count];
  });
}

/** No more points than can be told apart: the lowest and the highest of each stretch. */
function thinned(line, most = 800) {
  if (line.length <= most) return line;
  const size = Math.ceil((2 * line.length) / most);
  const kept = [];
  for (let at = 0; at < line.length; at += size) {
    const stretch = line.slice(at, at + size);
    let low = stretch[0];
    let high = stretch[0];
    for (const p of stretch) {
      if (p[1] < low[1]) low = p;
      if (p[1] > high[1]) high = p;
    }
    kept.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
  }
  return kept;
}

/** The figures of new steps take the place of everything from step number `from` on. */
function extend(run, more) {
  for (const key of new Set([...Object.keys(run.series), ...Object.keys(more.series)])) {
    const old = run.series[key] || new Array(more.from).fill(null);
    const fresh = more.series[key] || new Array(more.series.step.length).fill(null);
    run.series[key] = old.slice(0, more.from).concat(fresh);
  }
  const whole = ["figures", "finished", "facts", "alarms", "warnings", "layers", "rollouts"];
  for (const key of whole) if (key in more) run[key] = more[key];
}
