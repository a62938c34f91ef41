// Puts the page together.

function toolbar(redraw) {
  const chips = h("div", { class: "row", id: "legend" }, !several() ? [] : state.runs.map((run, index) =>
    h("button", { type: "button", class: "chip", "aria-pressed": "true", onclick: (event) => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      event.currentTarget.setAttribute("aria-pressed", String(!state.hidden.has(index)));
      redraw();
    } }, swatch(colour(index), 0), run.label)));
  const axes = [["step", "Steps"], ["time", "Time"]].map(([key, name]) => h("button", { type: "button", "data-x": key, "aria-pressed": String(state.x === key), onclick: () => {
    state.x = key;
    axes.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.x === key)));
    redraw();
  } }, name));
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smooth, "aria-label": "Smoothing", oninput: () => {
    state.smooth = Number(smooth.value);
    redraw();
  } });
  return h("div", { class: several() ? "toolbar row many" : "toolbar row" }, chips,
    h("div", { class: "row" }, h("label", {}, "Smoothing", smooth), h("span", { class: "choice", role: "group", "aria-label": "Horizontal axis" }, axes)));
}

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  state.runs = data.runs;
  state.live = data.live;
  const summary = summaryPart();
  const sections = SECTIONS.map(plotSection);
  const rollouts = rolloutsPart();
  const settings = settingsPart();
  const plots = () => sections.forEach((section) => section.update());
  const figures = () => { summary.update(); plots(); };
  const all = () => { figures(); rollouts.update(); settings.update(); };
  document.getElementById("page").append(summary.node, toolbar(plots), ...sections.map((section) => section.node), rollouts.node, settings.node,
    h("footer", {}, `Written by qurl ${data.version}. This page loads nothing from elsewhere.`));
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
