// What failed: a table of who, when, for how long, why, and what it cost.
import { clock, count, duration, make } from "./format.js";

const HEADS = ["when", "who", "for", "why", "what it cost"];

export function drawFailures(view) {
  const all = view.failures.count;
  const shown = failuresOf(view);
  document.getElementById("failures-section").hidden = !all;
  document.getElementById("failures-said").textContent = summary(view);
  const rows = [...shown].reverse().map((failure) => make("tr", {},
    make("td", { textContent: duration(failure.began), title: clock(view.span[0] + failure.began) }), make("td", { textContent: failure.who, className: "text" }),
    make("td", { textContent: failure.ended === null ? "until now" : seconds(failure.ended - failure.began) }),
    make("td", { textContent: failure.why, className: "said" }), make("td", { textContent: cost(failure), className: "said" })));
  const head = make("tr", {}, ...HEADS.map((text, n) => make("th", { textContent: text, scope: "col", className: n === 2 ? "" : "text" })));
  document.getElementById("failures").replaceChildren(...(rows.length ? [make("thead", {}, head), make("tbody", {}, ...rows)] : []));
  if (all > shown.length) document.getElementById("failures-said").textContent += ` The newest ${shown.length} are listed: show a shorter part of the run for the others.`;
}

// The rows of the failures, as objects by the names of their fields.
export function failuresOf({ failures: { fields, whys, shown } }) {
  return shown.map((row) => {
    const failure = Object.fromEntries(fields.map((name, n) => [name, row[n]]));
    return { ...failure, why: whys[failure.why] };
  });
}

export function seconds(value) {
  return value < 0.05 ? "–" : value < 100 ? `${value.toFixed(1)} s` : duration(value);
}

function cost(failure) {
  const parts = [];
  if (failure.lost_tokens) parts.push(`${failure.lost_tokens.toLocaleString("en")} tokens lost`);
  if (failure.idle_tokens) parts.push(`${count(failure.idle_tokens)} tokens not computed`);
  if (failure.without) parts.push(`${failure.without} merge${failure.without > 1 ? "s" : ""} without it`);
  if (failure.merged !== null) {
    const what = failure.who === "coordinator" ? "merges went on" : "merged again";
    parts.push(`${what} ${seconds(failure.merged - failure.began)} after it began`);
  }
  return parts.join(", ") || "nothing";
}

function summary(view) {
  const all = view.failures.count;
  const by = new Map();
  for (const failure of failuresOf(view)) by.set(failure.who, (by.get(failure.who) ?? 0) + 1);
  const whose = [...by].sort((one, other) => other[1] - one[1]).slice(0, 8).map(([who, times]) => `${who} ${times}`);
  const lost = view.lanes.slice(1).reduce((sum, lane) => sum + lane.lost_tokens, 0);
  return `${all} failure${all > 1 ? "s" : ""}: ${whose.join(", ")}${by.size > 8 ? " and others" : ""}. ` +
    `${lost ? `${lost.toLocaleString("en")} tokens were lost.` : "No tokens were lost."}`;
}
