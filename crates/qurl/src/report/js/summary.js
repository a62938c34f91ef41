// The top of the page: what ran, what came of it. And the table of settings at its end.

const arrow = (before, after, format) => [h("span", { class: "from" }, `${format(before)} → `), format(after)];

function tile(name, figure, more) {
  return h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "figure" }, figure), h("div", { class: "more" }, more || "\u00a0"));
}

function hero(run) {
  const f = run.figures;
  const gain = missing(f.accuracy_before) || missing(f.accuracy_after) ? null : 100 * (f.accuracy_after - f.accuracy_before);
  const points_ = gain === null ? "not measured yet" : `${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(1)} points` +
    (missing(f.accuracy_best) || f.accuracy_best <= f.accuracy_after ? "" : `, best ${percent(f.accuracy_best)}`);
  const figure = missing(f.accuracy_after) ? percent(f.accuracy_before) : missing(f.accuracy_before) ? percent(f.accuracy_after)
    : arrow(f.accuracy_before, f.accuracy_after, percent);
  const steps = run.total_steps && run.total_steps !== f.steps ? `${f.steps} of ${run.total_steps} steps` : `${f.steps} steps`;
  return h("div", { class: "hero card" },
    h("div", { class: "headline" }, h("div", { class: "name" }, "Held-out accuracy"), h("div", { class: "figure", id: "headline" }, figure), h("div", { class: "name" }, points_)),
    h("div", { class: "tiles" },
      tile("Reward", number(f.reward_last), `${number(f.reward_first)} at first`),
      tile("Mismatch KL", number(f.mismatch_kl, 2), "mean of all steps"),
      tile("Largest ρ", number(f.rho_max), "of all tokens"),
      tile("Clipped", share(f.clipped), "of the tokens"),
      tile("Rollout", count(f.rollout_tokens_per_s), "tokens/s"),
      tile("Training", count(f.training_tokens_per_s), "tokens/s"),
      tile("Time", duration(f.seconds), steps),
      tile("Updates", number(f.updates, 6), f.skipped_updates ? `${f.skipped_updates} skipped` : "none skipped")));
}

function overview() {
  const heads = ["run", "held-out accuracy", "best", "reward", "mismatch KL", "largest ρ", "clipped", "rollout tok/s", "training tok/s", "time", "steps"];
  const rows = state.runs.map((run, index) => {
    const f = run.figures;
    const cells = [`${percent(f.accuracy_before)} → ${percent(f.accuracy_after)}`, percent(f.accuracy_best), number(f.reward_last), number(f.mismatch_kl, 2),
      number(f.rho_max), share(f.clipped), count(f.rollout_tokens_per_s), count(f.training_tokens_per_s), duration(f.seconds), f.steps];
    return h("tr", {}, h("th", { scope: "row" }, h("span", { class: "row" }, swatch(colour(index), 0), run.label)), cells.map((cell) => h("td", {}, String(cell))));
  });
  return h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows)));
}

function summaryPart() {
  const title = h("h1", {});
  const facts = h("ul", { class: "facts" });
  const status = h("span", { class: "status", id: "status", hidden: true });
  const body = h("div", { id: "summary" });
  const warnings = h("ul", { class: "warnings" });
  const node = h("div", {}, h("header", {}, h("div", {}, h("div", { class: "brand" }, "QuRL"), title, facts), h("div", { class: "side" }, status, themeButton())), body, warnings);
  const update = () => {
    const one = state.runs[0];
    title.textContent = several() ? `${state.runs.length} runs compared` : one.label;
    const shared = state.runs.map((run) => run.facts).reduce((kept, next) => kept.filter((fact) => next.includes(fact)));
    facts.replaceChildren(...shared.map((fact) => h("li", {}, fact)));
    body.replaceChildren(several() ? overview() : hero(one));
    warnings.replaceChildren(...state.runs.flatMap((run) => run.warnings).map((text) => h("li", {}, text)));
    warnings.hidden = !warnings.children.length;
  };
  return { node, update, status };
}

function themeButton() {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("qurl-theme"); } catch { return null; } };
  const store = (value) => { try { localStorage.setItem("qurl-theme", value); } catch { /* a file may have no storage: the choice lasts as long as the page */ } };
  const set = (theme) => { if (theme === "light" || theme === "dark") root.dataset.theme = theme; };
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  set(stored());
  const button = h("button", { type: "button", id: "theme" });
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; button.title = `Switch to ${dark() ? "light" : "dark"} colours`; };
  button.addEventListener("click", () => { set(dark() ? "light" : "dark"); store(root.dataset.theme); name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();
  return button;
}

/** The keys of a recipe by their section, in the order of the keys. */
function bySection(keys) {
  const sections = new Map();
  for (const key of keys) {
    const cut = key.lastIndexOf(".");
    const name = cut < 0 ? "" : key.slice(0, cut);
    if (!sections.has(name)) sections.set(name, []);
    sections.get(name).push({ key, name: key.slice(cut + 1) });
  }
  return sections;
}

function settingsOfOne(run) {
  const values = new Map(run.settings);
  if (!values.size) return h("div", { class: "card settings-columns" }, "No recipe.toml was found.");
  return h("div", { class: "card settings-columns" }, [...bySection(values.keys())].map(([section, keys]) =>
    h("table", { class: "settings" }, h("caption", {}, section), h("tbody", {}, keys.map(({ key, name }) =>
      h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, values.get(key))))))));
}

function settingsOfSeveral(onlyDifferences) {
  const maps = state.runs.map((run) => new Map(run.settings));
  const keys = [...new Set(state.runs.flatMap((run) => run.settings.map(([key]) => key)))];
  const differs = (key) => new Set(maps.map((map) => map.get(key))).size > 1;
  const rows = [...bySection(keys.filter((key) => !onlyDifferences || differs(key)))].flatMap(([section, found]) => [
    h("tr", { class: "section" }, h("th", { colspan: maps.length + 1 }, section)),
    ...found.map(({ key, name }) => h("tr", { class: differs(key) ? "differs" : null }, h("th", { scope: "row" }, name),
      maps.map((map) => h("td", {}, map.has(key) ? map.get(key) : "–")))),
  ]);
  if (!rows.length) rows.push(h("tr", {}, h("td", { colspan: maps.length + 1 }, "All settings are equal.")));
  const head = h("tr", {}, h("th", {}, "key"), state.runs.map((run) => h("th", {}, run.label)));
  return h("div", { class: "card scroll" }, h("table", { class: "settings" }, h("thead", {}, head), h("tbody", {}, rows)));
}

function settingsPart() {
  const only = h("input", { type: "checkbox", checked: true, onchange: () => update() });
  const body = h("div", {});
  const update = () => body.replaceChildren(several() ? settingsOfSeveral(only.checked) : settingsOfOne(state.runs[0]));
  const node = h("section", { id: "settings" }, h("h2", {}, "Settings"), h("p", { class: "lead" }, "The recipe with all defaults filled in."),
    several() ? h("div", { class: "row" }, h("label", {}, only, "differences only")) : null, body);
  return { node, update };
}
