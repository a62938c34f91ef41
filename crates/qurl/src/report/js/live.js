// The live page: the server says what is new, the page draws it. Without a server this is never called.

function follow(parts) {
  const source = new EventSource("/events");
  const say = (word, text) => {
    parts.summary.status.hidden = false;
    parts.summary.status.dataset.state = word;
    parts.summary.status.textContent = text;
  };
  let due = false;
  const redraw = (what) => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => { due = false; what(); });
  };
  const heard = () => {
    const run = state.runs[0];
    const of = run.total_steps ? ` of ${run.total_steps}` : "";
    if (run.finished) say("finished", `finished, ${run.figures.steps} steps`);
    else say("running", run.figures.steps ? `live, step ${run.figures.steps}${of}` : beforeFirstStep(run));
    document.title = `${run.figures.steps}${of} · ${run.label} · QuRL`;
  };
  source.addEventListener("run", (event) => {
    state.runs = [JSON.parse(event.data)];
    heard();
    redraw(parts.all);
  });
  source.addEventListener("more", (event) => {
    const more = JSON.parse(event.data);
    extend(state.runs[0], more);
    heard();
    redraw(() => { parts.figures(); if (more.rollouts) parts.rollouts.update(); });
  });
  source.addEventListener("bye", () => {
    source.close();
    if (!state.runs[0].finished) say("lost", "the server was stopped");
  });
  source.addEventListener("error", () => say("lost", "connection lost, trying again"));
  addEventListener("pagehide", () => source.close());
}
