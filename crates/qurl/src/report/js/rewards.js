// The parts of a run's rewards: as many as the recipe names, so their lines are found in the data.

const PART = "reward_parts.";

/** The names of all parts of the runs, in alphabetical order. */
function partNames() {
  const keys = state.runs.flatMap((run) => Object.keys(run.series).filter((key) => key.startsWith(PART)));
  return [...new Set(keys)].sort().map((key) => key.slice(PART.length));
}

/** A plot with one line for every part. */
const rewardParts = {
  id: "reward-parts", title: "Parts of the reward", format: number, zero: true, optional: true,
  get lines() {
    return partNames().map((name) => ({ name, of: (run) => points(run, PART + name) }));
  },
};
