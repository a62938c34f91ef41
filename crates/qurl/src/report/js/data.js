// What the page knows: the runs as columns of figures, which of them are shown, and how.

const state = { runs: [], hidden: new Set(), x: "step", smooth: 0, live: false };

const several = () => state.runs.length > 1;
const shown = () => state.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));
const colour = (index) => `var(--c${index % 8})`;

/** The x of each step: its number, or the minutes of training up to its end. */
function positions(run) {
  if (state.x === "step") return run.series.step;
  let sum = 0;
  return (run.series["timing.total"] || run.series.step.map(() => 0)).map((seconds) => (sum += (seconds || 0) / 60));
}

/** The points of one column; steps without a value are left out. */
function points(run, key) {
  const values = run.series[key];
  if (!values) return [];
  const xs = positions(run);
  const found = [];
  values.forEach((y, i) => missing(y) || found.push([xs[i], y]));
  return found;
}

/** Held-out accuracy, with the one measured before the first step. */
function heldOut(run) {
  const before = run.figures.accuracy_before;
  const start = missing(before) ? [] : [[0, before]];
  return start.concat(points(run, "test_accuracy"));
}

/** The mean over all measurements of a figure, layer by layer. */
function layerMeans(run, key) {
  const rows = run.layers[key] || [];
  if (!rows.length) return [];
  return rows[0].map((_, layer) => {
    const values = rows.map((row) => row[layer]).filter((v) => !missing(v));
    return [layer, values.reduce((a, b) => a + b, 0) / values.length];
  }).filter(([, y]) => !missing(y));
}

/** An exponential mean that does not lean towards its first value. */
function smoothed(line, weight) {
  let sum = 0;
  let mass = 0;
  return line.map(([x, y]) => {
    sum = weight * sum + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return [x, sum / mass];
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
  for (const key of ["figures", "finished", "facts", "warnings", "layers", "rollouts"]) if (key in more) run[key] = more[key];
}
