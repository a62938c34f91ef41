// A plot to take away: as SVG, as PNG, and its figures as CSV. All of it is made here; nothing is sent
// anywhere.

/**
 * What a drawing needs to look the same outside of this page, as attributes: other programs read no style
 * sheet.
 */
const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin",
"stroke-linecap", "opacity",
  "fill-opacity", "font-size", "font-weight"];
const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

function saveMenu(chart) {
  const ways = { PNG: savePng, SVG: saveSvg, CSV: saveCsv };
  const menu = h("details", { class: "save" }, h("summary", { title: "Save this plot" }, "save"),
    h("span", { class: "ways" }, Object.entries(ways).map(([name, save]) =>
      h("button", { type: "button", class: "small", "data-save": name.toLowerCase(),
        onclick: () => { save(chart); menu.open = false; } }, name))));
  return menu;
}

function download(chart, ending, blob) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: `${chart.spec.id}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** The plot with title and legend as a document of its own. */
function drawing(chart) {
  const [width, page] = [chart.plot.clientWidth || 340, getComputedStyle(document.body)];
  const legend = chart.lines.length > 1 ? chart.lines : [];
  const top = 30 + 18 * legend.length;
  const copy = chart.plot.cloneNode(true);
  const [from, to] = [chart.plot, copy].map((node) => [...node.querySelectorAll("*")]);
  to.forEach((node, i) => {
    const looks = getComputedStyle(from[i]);
    for (const name of LOOKS) node.setAttribute(name, looks.getPropertyValue(name));
    node.removeAttribute("style");
    node.removeAttribute("class");
  });
  const card = getComputedStyle(chart.figure).backgroundColor;
  const text = (x, y, size, weight, content) =>
    svg("text", { x, y, "font-size": size, "font-weight": weight, fill: page.color }, content);
  const real = (paint) => {
    const probe = h("span", { style: { color: paint } });
    chart.figure.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  };
  return svg("svg", { xmlns: SVG, width, height: HEIGHT + top, viewBox: `0 0 ${width} ${HEIGHT + top}`,
      "font-family": FONT },
    svg("rect", { width, height: HEIGHT + top, fill: card }), text(10, 20, 14, 600, chart.spec.title),
    legend.flatMap((line, i) => [
      svg("line", { x1: 10, x2: 28, y1: 34 + 18 * i, y2: 34 + 18 * i, stroke: real(line.colour),
              "stroke-width": 3,
        "stroke-dasharray": line.dash }),
      text(36, 38 + 18 * i, 12, 400, line.name)]),
    svg("g", { transform: `translate(0 ${top})` }, [...copy.childNodes]));
}

const asText = (chart) => new XMLSerializer().serializeToString(drawing(chart));

function saveSvg(chart) {
  download(chart, "svg", new Blob([asText(chart)], { type: "image/svg+xml" }));
}

/** Twice as many pixels as the page has points, for print. */
function savePng(chart) {
  const picture = new Image();
  picture.onload = () => {
    const canvas = h("canvas", { width: 2 * picture.width, height: 2 * picture.height });
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.drawImage(picture, 0, 0);
    canvas.toBlob((blob) => download(chart, "png", blob), "image/png");
  };
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(asText(chart))}`;
}

/**
 * A row for each step with the values as measured, before any smoothing; of a group its mean and deviation.
 */
function csv(chart) {
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const title = (line) => line.name || chart.spec.title;
  const head = [chart.spec.x === "layer" ? "block" : "step",
    ...chart.lines.flatMap((line) => (line.band ? [title(line), `${title(line)} (deviation)`]
          : [title(line)]))];
  const columns = chart.lines.map((line) => new Map(line.raw.map((point) => [point[2], point])));
  const steps = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort((a, b) => a - b);
  const rows = steps.map((step) => [step, ...chart.lines.flatMap((line, i) => {
    const point = columns[i].get(step);
    const values = point ? [point[1], point[4] > 1 ? point[3] : ""] : ["", ""];
    return line.band ? values : values.slice(0, 1);
  })]);
  return [head.map(quote), ...rows].map((row) => row.join(",")).join("\n") + "\n";
}

function saveCsv(chart) {
  download(chart, "csv", new Blob([csv(chart)], { type: "text/csv" }));
}
