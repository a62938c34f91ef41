// From values to places, and where the ticks stand.

const lowest = (values) => values.reduce((a, b) => Math.min(a, b));
const highest = (values) => values.reduce((a, b) => Math.max(a, b));

function niceTicks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const decades = [];
  const every = Math.ceil((last - first + 1) / 6);
  for (let e = first; e <= last; e += Math.max(1, every)) decades.push(10 ** e);
  if (decades.length > 2) return decades;
  const fine = [];
  for (let e = first - 1; e <= last + 1; e++) {
    for (const m of [1, 2, 5]) if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) fine.push(m * 10 ** e);
  }
  return fine.length > 1 ? fine : niceTicks(low, high, 4).filter((t) => t > 0);
}

/** A scale from [low, high] to pixels [from, to]. */
function linear(low, high, from, to, wanted) {
  const place = (v) => from + ((v - low) / (high - low)) * (to - from);
  return { place, value: (p) => low + ((p - from) / (to - from)) * (high - low), ticks: niceTicks(low, high, wanted) };
}

/** Logarithmic; what is not positive stands on the lower edge. */
function logarithmic(low, high, from, to) {
  const [a, b] = [Math.log(low), Math.log(high)];
  const place = (v) => from + ((Math.log(Math.max(v, low)) - a) / (b - a)) * (to - from);
  return { place, ticks: logTicks(low, high), log: true };
}

/** The y scale of some values. */
function yScale(values, spec, from, to) {
  const positive = values.filter((v) => v > 0);
  if (spec.log && positive.length) {
    const [low, high] = [lowest(positive), highest(positive)];
    const margin = Math.max(1.12, (high / low) ** 0.06);
    return logarithmic(low / margin, high * margin, from, to);
  }
  let low = lowest(values);
  let high = highest(values);
  if (spec.zero) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { // equal, but for the rounding of a mean
    const around = Math.abs(low) * 0.1 || 1;
    [low, high] = spec.zero && low === 0 ? [0, 1] : [low - around, high + around];
  }
  const margin = (high - low) * 0.06;
  const bottom = spec.zero && low === 0 ? 0 : low - margin;
  const top = spec.whole !== undefined && high <= spec.whole ? Math.min(spec.whole, high + margin) : high + margin;
  return linear(bottom, top, from, to, 4);
}
