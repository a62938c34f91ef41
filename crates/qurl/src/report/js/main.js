// Puts the page together.

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  state.runs = data.runs;
  state.live = data.live;
  const page = document.getElementById("page");
  const summary = summaryPart();
  page.append(summary.node);
  const sections = [...allSections().map(plotSection), moreSection()];
  const [rollouts, settings] = [rolloutsPart(), settingsPart()];
  const folds = [...sections, rollouts, settings];
  const plots = () => { sections.forEach((section) => section.update()); toolbar.update(); };
  const figures = () => { summary.update(); plots(); };
  const all = () => { summary.update(); rollouts.update(); settings.update(); plots(); };
  const toolbar = toolbarPart(folds, { plots, all });
  page.append(toolbar.node, ...folds.map((part) => part.node),
    h("footer", {}, `Written by qurl ${data.version}. This page loads nothing from elsewhere.`));
  all();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) requestAnimationFrame(plots);
    width = innerWidth;
  });
  if (state.live) follow({ summary, rollouts: rollouts.update, figures, all });
  document.documentElement.dataset.ready = "yes";
}

start();
