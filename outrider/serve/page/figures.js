// Measures an answer while it arrives, and shows the measurements. Times are in ms.

import {definitions, element} from "./dom.js";

const POSITIONS = 8;  // whose acceptance is shown

// Return the measurements of a run that starts now.
export function startRun() {
  return {
    start: performance.now(), arrivals: [], arrivalTokens: [], tokenTimes: [],  // by arrival: its time and its number of tokens
    tokens: 0, rounds: 0, drafted: 0, accepted: 0, reached: [], acceptedAt: [],  // by position: draft tokens reached, accepted
    sources: [],
  };
}

// Count the tokens of a round, and its draft tokens by position.
export function countRound(run, {tokens, drafts: {parents, accepted, source}}) {
  const depths = [];
  parents.forEach((parent, node) => { depths[node] = parent < 0 ? 1 : depths[parent] + 1; });
  const numAccepted = accepted.filter(Boolean).length;
  for (let i = 0; i < Math.max(0, ...depths); i++) {
    run.reached[i] = (run.reached[i] ?? 0) + (numAccepted >= i);
    run.acceptedAt[i] = (run.acceptedAt[i] ?? 0) + (numAccepted > i);
  }
  run.sources = [...new Set([...run.sources, ...source])];
  run.tokens += tokens.length;
  run.rounds += 1;
  run.drafted += parents.length;
  run.accepted += Math.min(numAccepted, tokens.length);
}

// Note the time of `count` tokens that have arrived together.
export function countArrival(run, count) {
  const now = performance.now();
  if (run.arrivals.length) run.tokenTimes.push(...Array(count).fill((now - run.arrivals.at(-1)) / count));
  run.arrivals.push(now);
  run.arrivalTokens.push(count);
}

// Return the figures of a run. `usage` is that of the server, which comes at the end.
export function figuresOf(run, usage) {
  const {start, arrivals, arrivalTokens, tokens, rounds, drafted, accepted, sources} = run;
  const sorted = [...run.tokenTimes].sort((a, b) => a - b);
  const percentile = (share) => (sorted.length ? sorted[Math.ceil(share * sorted.length) - 1] : 0);
  const last = arrivals.at(-1);
  const speed = last > arrivals[0]
    ? (tokens - arrivalTokens[0]) / (last - arrivals[0]) * 1e3
    : tokens / (last - start) * 1e3;  // one arrival: measure from the request
  return {
    speed, tokens, rounds, drafted, accepted, sources, usage, first: arrivals[0] - start, times: [.5, .95, .99].map(percentile),
    shares: run.acceptedAt.slice(0, POSITIONS).map((count, i) => (run.reached[i] ? count / run.reached[i] : 0)),
  };
}

export const speedText = (speed) => `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s`;
const percent = (share) => `${(100 * share).toFixed(0)}%`;

// Return a line with the figures of an answer, which unfolds to all of them.
export function figuresElement({speed, tokens, rounds, drafted, accepted, sources, usage, first, times, shares}) {
  const parts = drafted
    ? [`${percent(accepted / drafted)} of draft tokens accepted`, `${(tokens / rounds).toFixed(1)} tokens per round`, sources.join(" + ")]
    : ["no drafts"];
  const line = element("summary", {}, element("b", {textContent: speedText(speed)}), ` · ${parts.join(" · ")}`);
  const rows = [
    ["tokens per round (tau)", (tokens / rounds).toFixed(2)], ["accepted draft tokens", `${accepted} of ${drafted}`],
    ["accepted by position", shares.map(percent).join(" ") || "no drafts"],
    ["output", `${tokens} tokens in ${rounds} rounds`], ["time to first token", `${first.toFixed(0)} ms`],
    ["ms per token, p50 p95 p99", times.map((time) => time.toFixed(1)).join("  ")],
  ];
  if (usage) {
    const {prompt_tokens: prompt, prompt_tokens_details: details, speculation: {exact, bound}} = usage;
    rows.push(["prompt", `${prompt} tokens, ${details.cached_tokens} cached`]);
    rows.push(["exact", exact ? "yes" : bound ? `no, ${bound.kind} at most ${bound.value}` : "no"]);
  }
  return element("details", {className: "figures"}, line, element("dl", {}, ...definitions(rows)));
}
