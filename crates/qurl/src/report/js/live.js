// The live page: the server says what is new, the page draws it. Without a server this is never called.

function follow(parts) {
  const source = new EventSource("/events");
  const say = (word, text) => {
    parts.summary.status.hidden = false;
    parts.summary.status.dataset.state = word;
    parts.summary.status.textContent = text;
  };
  let due = null;
  const redraw = (what) => {
    if (due === null) {
      requestAnimationFrame(() => {
        const all = due;
        due = null;
        all.forEach((draw) => draw());
      });
    }
    due = (due || new Set()).add(what);
  };
  const heard = () => {
    const going = state.runs.filter((run) => !run.finished);
    const made = (run) => `${run.figures.steps}${run.total_steps ? ` of ${run.total_steps}` : ""}`;
    if (several()) {
      const over = state.runs.length - going.length;
      say(going.length ? "running" : "finished", `${state.runs.length} runs, ${over} finished`);
      document.title = `${over} of ${state.runs.length} runs · QuRL`;
      return;
    }
    const [run] = state.runs;
    if (run.finished) say("finished", `finished, ${run.figures.steps} steps`);
    else if (run.figures.steps) say("running", `live, step ${made(run)}`);
    else say("running", run.settings.length ? beforeFirstStep(run) : "waiting for the run to begin");
    document.title = `${made(run)} · ${run.label} · QuRL`;
  };
  source.addEventListener("runs", (event) => {
    state.runs = JSON.parse(event.data);
    heard();
    redraw(parts.all);
  });
  source.addEventListener("more", (event) => {
    const more = JSON.parse(event.data);
    extend(state.runs[more.run], more);
    heard();
    redraw(parts.figures);
    if (more.rollouts) redraw(parts.rollouts);
  });
  source.addEventListener("bye", () => {
    source.close();
    if (!state.runs.every((run) => run.finished)) say("lost", "the server was stopped");
  });
  source.addEventListener("error", () => say("lost", "connection lost, trying again"));
  addEventListener("pagehide", () => source.close());
}
