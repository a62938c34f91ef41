// The top of the page: what ran, what came of it. And the table of settings at its end.

function tile(name, figure, more) {
  return h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "figure" }, figure),
    h("div", { class: "more" }, more));
}

/** Held-out accuracy before and after, and what that is in points. */
function headline({ accuracy_before: before, accuracy_after: after, accuracy_best: best }) {
  const named = (figure, more) => h("div", { class: "headline" }, h("div", { class: "name" }, "Held-out accuracy"),
    h("div", { class: "figure", id: "headline" }, figure), h("div", { class: "name" }, more));
  if (missing(after)) return named(percent(before), missing(before) ? "not measured" : "before the first step");
  if (missing(before)) return named(percent(after), "after the last step");
  const gain = 100 * (after - before);
  const peak = missing(best) || best <= after ? "" : `, best ${percent(best)}`;
  return named([h("span", { class: "from" }, `${percent(before)} → `), percent(after)],
    `${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(1)} points${peak}`);
}

function hero(run) {
  const f = run.figures;
  const planned = run.total_steps && run.total_steps !== f.steps ? ` of ${run.total_steps}` : "";
  return h("div", { class: "hero card" }, headline(f), h("div", { class: "tiles" },
    tile("Reward", number(f.reward_last), `${number(f.reward_first)} at first`),
    tile("Mismatch KL", number(f.mismatch_kl, 2), "mean of all steps"),
    tile("Largest ρ", number(f.rho_max), "of all tokens"),
    tile("Clipped", share(f.clipped), "of the tokens"),
    tile("Rollout", count(f.rollout_tokens_per_s), missing(f.rollout_speedup) ? "tokens/s" : `tokens/s, ${number(f.rollout_speedup)}× bf16`),
    tile("Training", count(f.training_tokens_per_s), "tokens/s"),
    tile("Time", duration(f.seconds), `${f.steps}${planned} steps`),
    tile("Updates", number(f.updates, 6), f.skipped_updates ? `${f.skipped_updates} skipped` : "none skipped"),
    warmTile(run)));
}

const OVERVIEW = [
  ["held-out accuracy", (f) => `${percent(f.accuracy_before)} → ${percent(f.accuracy_after)}`],
  ["best", (f) => percent(f.accuracy_best)],
  ["reward", (f) => number(f.reward_last)],
  ["mismatch KL", (f) => number(f.mismatch_kl, 2)],
  ["largest ρ", (f) => number(f.rho_max)],
  ["clipped", (f) => share(f.clipped)],
  ["rollout tok/s", (f) => count(f.rollout_tokens_per_s)],
  ["training tok/s", (f) => count(f.training_tokens_per_s)],
  ["time", (f) => duration(f.seconds)],
  ["steps", (f) => String(f.steps)],
];

function overview() {
  const columns = state.runs.every(isSupervised) ? SUPERVISED_OVERVIEW : OVERVIEW;
  const rows = state.runs.map((run, index) => h("tr", {},
    h("th", { scope: "row" }, h("span", { class: "row" }, swatch(colour(index), 0), run.label)),
    columns.map(([, cell]) => h("td", {}, cell(run.figures)))));
  const heads = ["run", ...columns.map(([name]) => name)].map((name) => h("th", { scope: "col" }, name));
  return h("div", { class: "card scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows)));
}

function summaryPart() {
  const title = h("h1", {});
  const facts = h("ul", { class: "facts" });
  const status = h("span", { class: "status", id: "status", hidden: true });
  const body = h("div", { id: "summary" });
  const warnings = h("ul", { class: "warnings" });
  const node = h("div", {},
    h("header", {}, h("div", {}, h("div", { class: "brand" }, "QuRL"), title, facts),
      h("div", { class: "side" }, status, themeButton())),
    body, warnings);
  const update = () => {
    title.textContent = several() ? `${state.runs.length} runs compared` : state.runs[0].label;
    const shared = state.runs.map((run) => run.facts).reduce((kept, next) => kept.filter((fact) => next.includes(fact)));
    facts.replaceChildren(...shared.map((fact) => h("li", {}, fact)));
    const one = () => (isSupervised(state.runs[0]) ? supervisedHero : hero)(state.runs[0]);
    body.replaceChildren(several() ? overview() : one());
    warnings.replaceChildren(...state.runs.flatMap((run) => run.warnings).map((text) => h("li", {}, text)));
    warnings.hidden = !warnings.children.length;
  };
  return { node, update, status };
}

/** Light or dark: the system's choice until the reader makes one, which is kept where the browser lets a page keep things. */
function themeButton() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const button = h("button", { type: "button", id: "theme" });
  const name = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.title = `Switch to ${dark() ? "light" : "dark"} colours`;
  };
  const storage = (use) => { try { return use(localStorage); } catch { return null; } };
  const kept = storage((store) => store.getItem("qurl-theme"));
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    storage((store) => store.setItem("qurl-theme", root.dataset.theme));
    name();
  });
  system.addEventListener("change", name);
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
  const node = h("section", { id: "settings" }, h("h2", {}, "Settings"),
    h("p", { class: "lead" }, "The recipe with all defaults filled in."),
    several() ? h("div", { class: "row" }, h("label", {}, only, "differences only")) : null, body);
  return { node, update };
}
