// The top of the page: what ran, what came of it. And the table of settings at its end.

function tile(name, figure, more) {
  return h("div", { class: "tile" }, h("div", { class: "name" }, name), h("div", { class: "figure" }, figure),
    h("div", { class: "more" }, more));
}

/**
 * Accuracy before and after: Avg@k where it is measured, as everywhere where the best is meant, else the
 * greedy one.
 */
function score(figures) {
  const sampled = !missing(figures.avg_at_k_after);
  const [name, kind] = sampled ? ["Avg@k", "avg_at_k"] : ["Held-out accuracy", "accuracy"];
  return { name, before: figures[`${kind}_before`], after: figures[`${kind}_after`],
      best: figures.accuracy_best,
    step: figures.best_step };
}

/** Accuracy before and after, and what that is in points. */
function headline(figures) {
  const { name, before, after, best, step } = score(figures);
  const named = (figure, more) => h("div", { class: "headline" }, h("div", { class: "name" }, name),
    h("div", { class: "figure", id: "headline" }, figure), h("div", { class: "name" }, more));
  if (missing(after)) return named(percent(before), missing(before) ? "not measured" : "before the first step");
  if (missing(before)) return named(percent(after), "after the last step");
  const gain = 100 * (after - before);
  const when = step ? `after step ${step}` : "before the first step";
  const peak = missing(best) || best <= after ? "" : `, best ${percent(best)} ${when}`;
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
  ["before", (f) => score(f).before, percent],
  ["after", (f) => score(f).after, percent],
  ["best", (f) => f.accuracy_best, percent],
  ["reward", (f) => f.reward_last, number],
  ["mismatch KL", (f) => f.mismatch_kl, (v) => number(v, 2)],
  ["largest ρ", (f) => f.rho_max, number],
  ["clipped", (f) => f.clipped, share],
  ["rollout tok/s", (f) => f.rollout_tokens_per_s, count],
  ["training tok/s", (f) => f.training_tokens_per_s, count],
  ["time", (f) => f.seconds, duration],
  ["steps", (f) => f.steps, (v) => number(v, 6)],
];

/** A figure of a run; of several seeds the mean, with the deviation where it is worth knowing. */
function cell(runs, of, format) {
  const values = runs.map((run) => of(run.figures)).filter((v) => !missing(v));
  if (!values.length) return "–";
  const [[, mean, , deviation]] = averaged(values.map((v) => [[0, v, 0]]));
  const spread = format === percent && values.length > 1 ? ` ± ${format(deviation)}` : "";
  return `${format(mean)}${spread}`;
}

function overview() {
  const columns = state.runs.every(isSupervised) ? SUPERVISED_OVERVIEW : OVERVIEW;
  const rows = families().map(({ name, runs, index }) => h("tr", {},
    h("th", { scope: "row" }, h("span", { class: "row" }, swatch(colour(index), 0), name,
      runs.length > 1 ? h("span", { class: "name" }, `${runs.length} seeds`) : null)),
    columns.map(([, of, format]) => h("td", {}, cell(runs, of, format)))));
  const heads = ["run", ...columns.map(([name]) => name)].map((name) => h("th", { scope: "col" }, name));
  const reinforced = state.runs.filter((run) => !isSupervised(run));
  const scores = [...new Set(reinforced.map((run) => score(run.figures).name))].join(" or ");
  return h("div", {}, h("div", { class: "card scroll" },
    h("table", { class: "overview" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows))),
    h("p", { class: "absent" }, scores ? `Before, after and best: ${scores}.` : "",
      grouped() ? " Runs that differ in their seed alone are one line: mean ± standard deviation." : ""));
}

/** What must not be overlooked, on top of everything. */
function banners() {
  const all = state.runs.flatMap((run) => run.alarms.map((text) =>
      h("p", {}, several() ? `${run.label}: ` : "", text)));
  return all.length ? [h("div", { class: "banner", role: "alert" }, all)] : [];
}

function summaryPart() {
  const title = h("h1", {});
  const facts = h("ul", { class: "facts" });
  const status = h("span", { class: "status", id: "status", hidden: true });
  const body = h("div", { id: "summary" });
  const alarms = h("div", { id: "alarms" });
  const warnings = h("ul", { class: "warnings" });
  const node = h("div", {},
    h("header", {}, h("div", {}, h("div", { class: "brand" }, "QuRL"), title, facts),
      h("div", { class: "side" }, status, themeButton())),
    alarms, body, warnings);
  const update = () => {
    title.textContent = several() ? `${state.runs.length} runs compared` : state.runs[0].label;
    const shared = state.runs.map((run) => run.facts).reduce((kept, next) => kept.filter((fact) => next.includes(fact)));
    facts.replaceChildren(...shared.map((fact) => h("li", {}, fact)));
    const one = () => (isSupervised(state.runs[0]) ? supervisedHero : hero)(state.runs[0]);
    alarms.replaceChildren(...banners());
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
  const update = () => {
    choice.hidden = !several();
    body.replaceChildren(several() ? settingsOfSeveral(only.checked) : settingsOfOne(state.runs[0]));
  };
  const choice = h("div", { class: "row" }, h("label", {}, only, "differences only"));
  const part = fold("settings", "Settings", "The recipe with all defaults filled in.", choice, body);
  return { ...part, update };
}
