// Elements and the text of figures. Text only ever enters the page through `textContent`, so nothing that a model wrote
// can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, v] of Object.entries(value)) node.style.setProperty(key, v);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const missing = (v) => v === null || v === undefined || !Number.isFinite(v);

/** Up to `digits` significant digits, without an exponent where a reader needs none. */
function number(v, digits = 3) {
  if (missing(v)) return "–";
  const size = Math.abs(v);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return v.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  return String(Number(v.toPrecision(digits)));
}
const percent = (v, digits = 1) => (missing(v) ? "–" : `${(100 * v).toFixed(digits)}%`);
/** A share with as many digits as it needs: clip fractions are far below one percent. */
const share = (v) => (missing(v) ? "–" : `${number(100 * v)}%`);
function count(v) {
  if (missing(v)) return "–";
  if (v >= 1e6) return `${number(v / 1e6)}M`;
  return v >= 1e3 ? `${number(v / 1e3)}k` : number(v);
}
function duration(seconds) {
  if (missing(seconds)) return "–";
  if (seconds < 10) return `${number(seconds, 2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
