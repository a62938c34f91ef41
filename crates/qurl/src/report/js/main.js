// Puts the page together.

/** A button of the legend: shows or hides a run. */
function chip(run, index, redraw) {
  const button = h("button", { type: "button", class: "chip", "aria-pressed": "true" }, swatch(colour(index), 0), run.label);
  button.addEventListener("click", () => {
    if (!state.hidden.delete(index)) state.hidden.add(index);
    button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
    redraw();
  });
  return button;
}

/** The choice between steps and time. */
function axisChoice(redraw) {
  const press = () => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.x === state.x)));
  const buttons = [["step", "Steps"], ["time", "Time"]].map(([key, name]) =>
    h("button", { type: "button", "data-x": key, onclick: () => { state.x = key; press(); redraw(); } }, name));
  press();
  return h("span", { class: "choice", role: "group", "aria-label": "Horizontal axis" }, buttons);
}

function toolbar(redraw) {
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth, "aria-label": "Smoothing" });
  smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); redraw(); });
  const legend = several() ? state.runs.map((run, index) => chip(run, index, redraw)) : [];
  return h("div", { class: several() ? "toolbar row many" : "toolbar row" },
    h("div", { class: "row", id: "legend" }, legend),
    h("div", { class: "row" }, h("label", {}, "Smoothing", smooth), axisChoice(redraw)));
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  state.runs = data.runs;
  state.live = data.live;
  const summary = summaryPart();
  const sections = sectionsPart();
  const rollouts = rolloutsPart();
  const settings = settingsPart();
  const plots = () => sections.update();
  const figures = () => { summary.update(); plots(); };
  const all = () => { figures(); rollouts.update(); settings.update(); };
  document.getElementById("page").append(summary.node, toolbar(plots), sections.node,
    rollouts.node, settings.node, h("footer", {}, `Written by qurl ${data.version}. This page loads nothing from elsewhere.`));
  all();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) requestAnimationFrame(plots);
    width = innerWidth;
  });
  if (state.live) follow({ summary, rollouts, figures, all });
  document.documentElement.dataset.ready = "yes";
}

start();
