// The choices that hold for all plots, and the way to each part of the page.

/** A button of the legend: shows or hides a run or a group. */
function chip({ name, index }, redraw) {
  const pressed = () => String(!state.hidden.has(name));
  const button = h("button", { type: "button", class: "chip", "aria-pressed": pressed() },
      swatch(colour(index), 0), name);
  button.addEventListener("click", () => {
    if (!state.hidden.delete(name)) state.hidden.add(name);
    button.setAttribute("aria-pressed", pressed());
    redraw();
  });
  return button;
}

/** Some buttons of which one is pressed: `key` of the state is one of `values`, each as [value, name]. */
function choice(label, key, values, changed) {
  const press = () => buttons.forEach((button) =>
      button.setAttribute("aria-pressed", String(button.dataset[key] === state[key])));
  const buttons = values.map(([value, name]) =>
    h("button", { type: "button", [`data-${key}`]: value,
        onclick: () => { state[key] = value; press(); changed(); } }, name));
  press();
  return h("span", { class: "choice", role: "group", "aria-label": label }, buttons);
}

/** Where the parts of the page are; one that is folded opens when it is chosen. */
function contents(parts) {
  const link = (part) => h("a", { href: `#${part.node.id}`,
      onclick: () => { part.details.open = true; } }, part.title);
  const links = parts.map((part) => ({ part, node: link(part) }));
  const update = () => links.forEach(({ part, node }) => { node.hidden = part.node.hidden; });
  return { node: h("nav", { class: "contents", "aria-label": "Contents" },
      links.map(({ node }) => node)), update };
}

function toolbarPart(parts, redraw) {
  const smooth = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, "aria-label": "Smoothing" });
  const value = h("output", { id: "smoothing" });
  const reset = h("button", { type: "button", id: "reset-zoom", onclick: () => zoom(null) }, "Reset zoom");
  const legend = h("div", { class: "row", id: "legend" });
  const seeds = choice("Seeds", "seeds", [["band", "Mean and band"], ["each", "Each seed"]], redraw.all);
  const axis = choice("Horizontal axis", "x", [["step", "Steps"], ["time", "Time"]],
      () => { state.zoom = null; redraw.plots(); });
  const toc = contents(parts);
  smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); redraw.plots(); });
  const node = h("div", { class: "toolbar" }, toc.node, h("div", { class: "row between" }, legend,
    h("div", { class: "row" }, reset, seeds,
      h("label", { title: "Weight of the exponential mean; held-out accuracy is never smoothed" },
        "Smoothing", smooth, value), axis)));
  const update = () => {
    toc.update();
    const names = several() ? families().map((family) => family.name) : [];
    if (names.join("\n") !== legend.dataset.names) { // a chip that is there keeps the focus
      legend.replaceChildren(...(several() ? families().map((family) => chip(family, redraw.plots)) : []));
      legend.dataset.names = names.join("\n");
    }
    seeds.hidden = !grouped();
    reset.hidden = !state.zoom;
    smooth.value = smoothing();
    value.textContent = smoothing().toFixed(2);
    node.classList.toggle("many", several());
  };
  document.addEventListener("zoomed", update);
  return { node, update };
}
