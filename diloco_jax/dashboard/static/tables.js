// What is shown as text: numbers of the run, islands, alerts, events, goodput.
import { bytes, clock, colour, count, duration, islandColour, make, moment, percent, say } from "./format.js";
import { last } from "./curves.js";
import { statesOf } from "./lanes.js";

const PARTS = {
  merged: "merged", open: "not merged yet", lost: "lost", stalled: "stalled",
  away: "away", slower: "slower steps",
};

export function drawNumbers(view) {
  const { status, run } = view;
  const at = (id) => document.getElementById(id);
  const phase = status.unreachable ? "no answer" : status.phase ?? "starting";
  at("name").textContent = run.name;
  document.title = `${run.name}: ${phase}`;
  at("from").textContent = [run.run_id ? `run ${run.run_id}` : "", view.span[0] ? `began ${moment(view.span[0])}` : ""].filter(Boolean).join(", ");
  at("what").textContent = what(view);
  const { state, why } = view.health;
  // The phase says it already where both are one word.
  at("health").hidden = state === phase && !why.length;
  at("health").className = state;
  const reasons = why.slice(0, 4).join("; ") + (why.length > 4 ? `; and ${why.length - 4} more` : "");
  if (at("health").textContent !== state + reasons) {
    at("health").replaceChildren(make("b", { textContent: state }), reasons);
  }
  at("phase").textContent = phase;
  at("phase").className = `badge ${{ done: "done", stopped: "stopped", "no answer": "away" }[phase] ?? ""}`;
  at("progress").value = status.progress ?? 0;
  const notice = status.unreachable ??
    (view.read < 1 ? `reading what is recorded: ${percent(view.read)}` : "");
  say(at("notice"), notice);
  at("notice").hidden = !notice;

  const islands = Object.values(status.islands ?? {});
  const live = islands.filter((island) => ["training", "compiling", "joining", "quarantined"].includes(island.state));
  const over = status.wall_seconds !== undefined;
  const speed = islands.reduce((sum, island) => sum + (island.tokens_per_second ?? 0), 0);
  const mfu = last(view.curves.mfu.map((value) => [0, value]));
  const numbers = [
    ["tokens", `${count(status.tokens)} of ${count(status.total_tokens ?? run.total_tokens)}`],
    ["progress", percent(status.progress)],
    ["merges", count(status.merges)],
    ["goodput of the run", share(status.goodput)],
    ...(status.tokens_lost ? [["tokens lost", count(Object.values(status.tokens_lost).reduce((sum, lost) => sum + lost, 0))]] : []),
    over ? ["took", duration(status.wall_seconds)] : ["time left", left(view, status)],
    over ? ["islands", String(islands.length)] : ["islands", `${live.length} of ${Math.max(islands.length, run.expected.length)}`],
    ...(over ? [] : [["tokens/s undisturbed", count(speed)]]),
    ...(mfu === null ? [] : [["MFU", percent(mfu, 1)]]),
    ...loss(status),
    ...Object.entries(status.eval_tasks ?? {}).filter(([, score]) => typeof score === "number")
      .slice(0, 4).map(([name, score]) => [name, score.toFixed(3)]),
  ];
  at("numbers").replaceChildren(...numbers.map(([name, value]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
}

// What is trained, on what, by whom.
function what({ status, run, lanes, devices }) {
  const model = status.parameters ? `${count(status.parameters)} parameters` : "A model";
  const islands = lanes.slice(1);
  if (!islands.length) return `${model}, trained on ${run.data}.`;
  const kinds = new Map();
  for (const { device } of islands) kinds.set(device, (kinds.get(device) ?? 0) + 1);
  const named = [...kinds].slice(0, 4).map(([kind, times]) => (times > 1 ? `${times} × ${kind}` : kind)).join(", ");
  const others = kinds.size > 4 ? " and others" : "";
  const stand = [...kinds.keys()].every((kind) => devices.includes(kind)) ? "" : ` (standing for ${named}${others})`;
  const told = islands.length === 1 ? "1 island" : `${islands.length} islands`;
  return `${model}, trained on ${run.data}, by ${told} on ${devices.join(", ") || "unknown devices"}${stand}.`;
}

function left(view, status) {
  const tokens = status.total_tokens - status.tokens;
  return tokens >= 0 && view.tokens_per_s > 0 ? duration(tokens / view.tokens_per_s) : "–";
}

function loss(status) {
  const found = [];
  if (typeof status.eval_loss === "number") found.push(["validation loss", status.eval_loss.toFixed(4)]);
  if (typeof status.eval_bits_per_byte === "number") found.push(["bits per byte", status.eval_bits_per_byte.toFixed(3)]);
  if (!found.length && status.merged_model?.eval_loss) found.push([`merged model, cycle ${status.merged_model.cycle}`, status.merged_model.eval_loss.toFixed(4)]);
  return found;
}

const share = (goodput) => goodput === undefined ? "–" : goodput.toFixed(3);

export function drawGoodput(view) {
  const { parts, lost } = view.goodput;
  const at = (id) => document.getElementById(id);
  at("goodput").textContent = share(parts.merged);
  const shown = Object.entries(PARTS).filter(([name]) => parts[name] > 0.0005);
  at("goodput-bar").replaceChildren(...shown.map(([name]) => {
    const part = make("span");
    part.style.width = `${100 * parts[name]}%`;
    part.style.backgroundColor = colour(name);
    return part;
  }));
  at("goodput-bar").setAttribute("aria-label",
    shown.map(([name, text]) => `${text} ${percent(parts[name])}`).join(", ") || "nothing yet");
  const reasons = Object.entries(lost).map(([reason, tokens]) => `${reason}: ${count(tokens)} tokens`);
  at("goodput-parts").replaceChildren(...shown.map(([name, text]) => {
    const swatch = make("span", { className: "swatch" });
    swatch.style.backgroundColor = colour(name);
    return make("li", {}, swatch, text, make("b", { textContent: percent(parts[name]) }));
  }), ...(reasons.length ? [make("li", { className: "whole", textContent: `lost by reason: ${reasons.join(", ")}` })] : []));
}

export function drawIslands(view, chosen, choose) {
  const over = view.status.phase === "done" && view.window[1] >= view.span[1];
  const words = { training: "computing", absent: "away", none: "gone",
    ...(over ? { training: "done", stopped: "done", none: "done" } : {}) };
  const lanes = view.lanes.slice(1);
  const seconds = view.window[1] - view.window[0];
  const merges = view.lanes[0]?.merges_count ?? 0;
  const total = lanes.reduce((sum, lane) => sum + lane.merged_tokens, 0) || 1;
  const bits = bitsPerNat(view);
  const used = lanes.some((lane) => lane.mfu !== null);
  const link = view.run.link_bytes_per_s;
  const rate = (sum) => `${bytes(sum / seconds)}/s${link ? ` (${percent(sum / seconds / link)})` : ""}`;
  const heads = ["island", "stands for", "state", "tokens/s", "loss", ...(bits ? ["bits/byte"] : []),
    "deltas", "in merges", "weight", "away", "tokens lost", ...(used ? ["MFU"] : []), "up", "down"];
  const wanted = new Set(["island", "state", "tokens/s", "loss", "weight"]); // On a phone.
  const kind = (n) => `${n < 3 ? "text" : ""} ${wanted.has(heads[n]) ? "" : "less"}`;
  const rows = lanes.map((lane) => {
    const curve = (view.curves.loss[lane.name] ?? []).map((value) => [0, value]);
    const loss = last(curve);
    const state = statesOf(lane.states).at(-1);
    const button = make("button", { type: "button", textContent: lane.name + (lane.incarnation > 1 ? ` #${lane.incarnation}` : "") });
    button.setAttribute("aria-pressed", String(lane.name === chosen));
    button.addEventListener("click", () => choose(lane.name));
    const swatch = make("span", { className: "swatch" });
    swatch.style.backgroundColor = islandColour(view, lane.name, chosen);
    const cells = [lane.device, words[state] ?? state, count(lane.merged_tokens / seconds), loss === null ? "–" : loss.toFixed(3),
      ...(bits ? [loss === null ? "–" : (loss * bits).toFixed(3)] : []),
      count(lane.in_merges), merges ? percent(Math.min(1, lane.in_merges / merges)) : "–", percent(lane.merged_tokens / total),
      lane.away_s ? `${lane.away_s.toFixed(1)} s` : "–", lane.lost_tokens ? count(lane.lost_tokens) : "–",
      ...(used ? [percent(lane.mfu, 1)] : []), rate(lane.bytes_up), rate(lane.bytes_down)];
    const row = make("tr", { className: lane.name === chosen ? "chosen" : "" }, make("td", {}, swatch, button),
      ...cells.map((text, n) => make("td", { textContent: text, className: kind(n + 1) })));
    return row;
  });
  const head = make("tr", {}, ...heads.map((text, n) => make("th", { textContent: text, scope: "col", className: kind(n) })));
  keepFocus(document.getElementById("islands"), make("thead", {}, head), make("tbody", {}, ...rows));
}

// The same button has the focus after its row was made anew.
function keepFocus(table, ...parts) {
  const focused = table.contains(document.activeElement) ? document.activeElement.textContent : null;
  table.replaceChildren(...parts);
  if (focused === null) return;
  [...table.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
}

export function bitsPerNat(view) {
  const { eval_loss: loss, eval_bits_per_byte: bits } = view.status;
  return loss && bits ? bits / loss : view.run.bits_per_nat;
}

export function drawAlerts(view) {
  const told = view.alerts.map(([time, text]) => [`${duration(time - view.span[0])} `, text]);
  const known = new Set(view.alerts.map(([, text]) => text));
  const now = (view.status.alerts ?? []).filter((text) => !known.has(text)).map((text) => ["now ", text]);
  const items = [...now, ...told.reverse()].map(([when, text]) => make("li", {}, make("span", { className: "quiet", textContent: when }), text));
  document.getElementById("alerts").replaceChildren(...items);
  document.getElementById("alerts-section").hidden = !items.length;
}

export function drawEvents(found, begin) {
  const head = make("tr", {}, ...["time", "kind", "what"].map((text) => make("th", { textContent: text, scope: "col", className: "text" })));
  const rows = found.events.map(([time, kind, , text]) => make("tr", {},
    make("td", { textContent: `${duration(time - begin)}`, title: clock(time) }),
    make("td", { textContent: kind, className: "text" }), make("td", { textContent: text, className: "said" })));
  document.getElementById("events").replaceChildren(make("thead", {}, head), make("tbody", {}, ...rows));
  document.getElementById("events-said").textContent =
    `${found.events.length}${found.more ? " newest" : ""} events in this window`;
}
