// The page: which part of the run is shown, and when it is asked for anew.
import { drawCurves, resize } from "./curves.js";
import { duration } from "./format.js";
import { Lanes } from "./lanes.js";
import { Merges } from "./merges.js";
import { drawFailures } from "./failures.js";
import { drawAlerts, drawEvents, drawGoodput, drawIslands, drawNumbers } from "./tables.js";

const LIVE_MS = 2000;
const REST_MS = 15000;
const PLAY_MS = 400;
const PLAY_SHARE = 0.01;
const at = (id) => document.getElementById(id);
const shown = { view: null, until: null, chosen: null, playing: false, asked: 0, eventsKey: "" };
const lanes = new Lanes(at("lanes"), at("lanes-tip"), at("lanes-said"), at("lanes-legend"), choose);
const merges = new Merges(at("merges"), at("merges-tip"), at("merges-said"), at("merges-aloud"), at("merges-legend"));
let timer = 0;

function choose(name) {
  shown.chosen = name === shown.chosen ? null : name;
  draw();
}

// The window that is asked for; null: from the beginning, up to the newest line.
function windowNow() {
  const length = Number(at("length").value) || null;
  const stop = shown.until;
  const newest = shown.view?.span[1];
  const end = stop ?? newest;
  const start = length && end ? Math.max(shown.view.span[0], end - length) : null;
  return { start, stop };
}

async function ask(path, parameters) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null));
  const answer = await fetch(`${path}?${query}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function refresh() {
  clearTimeout(timer);
  const number = shown.asked += 1;
  try {
    const { start, stop } = windowNow();
    const columns = Math.round(at("lanes").clientWidth - 120);
    const view = await ask("view", { start, stop, columns: Math.max(100, columns) });
    if (number !== shown.asked) return;
    shown.view = view;
    draw();
    await events();
  } catch (error) {
    if (number !== shown.asked) return;
    at("notice").textContent = shown.view?.status.phase === "done"
      ? `The run is over, and its dashboard too: diloco dashboard WORKDIR shows it again.`
      : `The dashboard does not answer (${error.message}).`;
    at("notice").hidden = false;
  }
  if (number === shown.asked) later();
}

function later() {
  clearTimeout(timer);
  const over = ["done", "stopped"].includes(shown.view?.status.phase) && shown.view.read === 1;
  const every = shown.playing ? PLAY_MS : over || shown.until !== null ? REST_MS : LIVE_MS;
  timer = setTimeout(() => {
    if (document.hidden) return later();
    if (shown.playing) step();
    refresh();
  }, every);
}

async function events() {
  const { view } = shown;
  const words = at("words").value.trim();
  const found = await ask("events", { words, start: view.window[0], stop: view.window[1] + 1e-3 });
  const key = JSON.stringify([found, view.span[0]]);
  if (key === shown.eventsKey) return;
  shown.eventsKey = key;
  drawEvents(found, view.span[0]);
}

function draw() {
  const { view, chosen } = shown;
  if (!view) return;
  drawNumbers(view);
  drawFailures(view);
  lanes.draw(view, chosen);
  merges.draw(view, chosen);
  drawCurves(view, chosen);
  drawGoodput(view);
  drawIslands(view, chosen, choose);
  drawAlerts(view);
  slider(view);
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
}

function slider(view) {
  const [begin, newest] = view.span;
  const end = shown.until ?? newest;
  const whole = Math.max(1e-3, newest - begin);
  if (document.activeElement !== at("until") || shown.playing || shown.until === null) {
    at("until").value = String(Math.round(1000 * Math.min(1, (end - begin) / whole)));
  }
  const text = `${duration(end - begin)} of ${duration(whole)}`;
  at("until-text").textContent = text;
  at("until").setAttribute("aria-valuetext", text);
  at("live").setAttribute("aria-pressed", String(shown.until === null));
  at("play").setAttribute("aria-pressed", String(shown.playing));
  at("play").textContent = shown.playing ? "❚❚ Pause" : "▶ Play";
}

// Move the end of the window by a share of what is shown, or of the whole.
function move(share) {
  if (!shown.view) return;
  const [begin, newest] = shown.view.span;
  const length = Number(at("length").value) || newest - begin;
  const next = (shown.until ?? newest) + share * length;
  shown.until = next >= newest ? null : Math.max(begin + 0.1, next);
}

function step() {
  move(PLAY_SHARE * (Number(at("length").value) ? 10 : 1));
  if (shown.until === null) shown.playing = false;
}

function play() {
  shown.playing = !shown.playing;
  if (shown.playing && shown.until === null && shown.view) shown.until = shown.view.span[0] + 0.1;
  refresh();
}

function live() {
  shown.until = null;
  shown.playing = false;
  refresh();
}

at("until").addEventListener("input", () => {
  if (!shown.view) return;
  const [begin, newest] = shown.view.span;
  const share = Number(at("until").value) / 1000;
  shown.playing = false;
  shown.until = share >= 1 ? null : Math.max(begin + 0.1, begin + share * (newest - begin));
  refresh();
});
at("length").addEventListener("change", refresh);
at("play").addEventListener("click", play);
at("live").addEventListener("click", live);
at("words").addEventListener("input", () => events().catch(() => {}));
at("controls").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const keys = { p: play, l: live, "[": () => { move(-0.1); refresh(); }, "]": () => { move(0.1); refresh(); },
    "/": () => at("words").focus() };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
});
document.addEventListener("visibilitychange", () => document.hidden || refresh());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { resize(); refresh(); }, 150);
});
refresh();
