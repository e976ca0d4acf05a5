// Islands as lanes over time, drawn as the server's columns.
import { clock, colour, duration, islandColour, legend, tickStep } from "./format.js";
import { failuresOf, seconds } from "./failures.js";

const STATES = { j: "joining", c: "compiling", t: "training", s: "stopped",
  q: "quarantined", a: "absent", ".": "none" };
const WORDS = { joining: "joining", compiling: "compiling", training: "computing",
  stopped: "stopped", quarantined: "quarantined", absent: "away", none: "not in the run" };
const AXIS = 22;
const SEEN = 6; // Pixels that an absence has at least.
const DENSE = 0.3; // Share of columns with a mark beyond which marks tell nothing.

// The state of each column of a lane, out of its runs such as "c12t88".
export function statesOf(runs) {
  const found = [];
  for (const [, letter, length] of runs.matchAll(/([a-z.])(\d+)/g)) {
    for (let n = 0; n < Number(length); n += 1) found.push(STATES[letter]);
  }
  return found;
}

// Where a state begins and how many columns it lasts, each time.
function runsOf(states, wanted) {
  const found = [];
  states.forEach((state, n) => {
    if (state !== wanted) return;
    if (states[n - 1] === wanted) found.at(-1)[1] += 1;
    else found.push([n, 1]);
  });
  return found;
}

export class Lanes {
  constructor(canvas, tip, said, list, choose) {
    Object.assign(this, { canvas, tip, said, list, choose, at: null, chosen: null });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("click", () => this.at && choose(this.lane(this.at.row)));
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  draw(view, chosen) {
    this.view = view;
    this.chosen = chosen;
    const many = view.lanes.length > 12;
    const width = this.canvas.clientWidth;
    this.left = width < 500 ? 86 : 120;
    this.high = many ? 10 : 24;
    this.gap = many ? 2 : 6;
    const height = view.lanes.length * (this.high + this.gap) + AXIS;
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const paint = Object.fromEntries(
      [...Object.values(STATES), "out", "adoption", "ink", "quiet", "card", "accent", "line", "up"]
        .map((name) => [name, colour(name)]));
    const each = (width - this.left) / view.columns;
    const marked = view.lanes.reduce((sum, lane) => sum + lane.marks.replace(/0/g, "").length, 0);
    this.fine = marked <= DENSE * view.columns * view.lanes.length;
    document.getElementById("lanes-hint").textContent = this.fine ? ""
      : "Show a shorter part to see single takes, adoptions and merges. ";
    view.lanes.forEach((lane, row) => this.lane_(pen, paint, lane, row, each));
    if (!many) this.story(pen, paint, width);
    this.axis(pen, paint, width, height);
    this.legend(paint);
    this.canvas.setAttribute("aria-label", this.summary());
    if (this.at) this.tell(false);
  }

  lane_(pen, paint, lane, row, each) {
    const top = row * (this.high + this.gap);
    const states = statesOf(lane.states);
    const own = { ...paint, training: row ? islandColour(this.view, lane.name, this.chosen) : paint.up };
    let start = 0;
    for (let n = 1; n <= states.length; n += 1) {
      if (n < states.length && states[n] === states[start]) continue;
      const x = this.left + start * each;
      const wide = (n - start) * each;
      pen.fillStyle = own[states[start]];
      pen.fillRect(x, top, wide + 0.3, this.high);
      start = n;
    }
    for (const [from, length] of runsOf(states, "absent")) {
      const wide = Math.max(SEEN, length * each);
      const x = Math.min(this.left + from * each, this.left + states.length * each - wide);
      pen.fillStyle = paint.absent;
      pen.fillRect(x, top, wide, this.high);
      this.hatch(pen, paint.card, x, top, wide);
    }
    const thin = this.high > 12 ? 5 : 3;
    pen.fillStyle = paint.out;
    for (let n = 0; this.fine && n < lane.out.length; n += 1) {
      const tall = (Number(lane.out[n]) / 9) * thin;
      if (tall) pen.fillRect(this.left + n * each, top + this.high - tall, each + 0.3, tall);
    }
    pen.fillStyle = paint.adoption;
    const { marks } = lane;
    for (let n = 0; this.fine && n < marks.length; n += 1) {
      const tall = (Number(marks[n]) / 9) * thin;
      if (tall) pen.fillRect(this.left + n * each, top, Math.min(each, 1.5), tall);
    }
    pen.fillStyle = lane.name === this.chosen ? paint.accent : paint.ink;
    pen.font = `${lane.name === this.chosen ? "bold " : ""}${this.high > 12 ? 13 : 10}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    pen.fillText(fitted(pen, lane.name, this.left - 8), 0, top + this.high / 2);
  }

  // Say in its lane how long each was away, where there is room.
  story(pen, paint, width) {
    const { span, window: [start, stop], lanes } = this.view;
    const place = (time) => this.left + ((time + span[0] - start) / (stop - start)) * (width - this.left);
    const free = lanes.map(() => 0);
    pen.font = "bold 11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    for (const failure of failuresOf(this.view)) {
      const row = lanes.findIndex((lane) => lane.name === failure.who);
      if (row < 0) continue;
      const text = failure.ended === null ? "away" : `away ${seconds(failure.ended - failure.began)}`;
      const wide = pen.measureText(text).width + 10;
      let x = place(failure.ended ?? failure.began) + SEEN;
      if (x + wide > width) x = place(failure.began) - wide - 3;
      if (x < Math.max(this.left, free[row]) || x + wide > width) continue;
      const top = row * (this.high + this.gap) + 4;
      pen.fillStyle = paint.card;
      pen.fillRect(x, top, wide, this.high - 8);
      pen.fillStyle = paint.ink;
      pen.fillText(text, x + 5, top + this.high / 2 - 4);
      free[row] = x + wide;
    }
  }

  hatch(pen, ink, x, top, wide) {
    pen.save();
    pen.beginPath();
    pen.rect(x, top, wide, this.high);
    pen.clip();
    pen.strokeStyle = ink;
    pen.lineWidth = 1.5;
    for (let at = x - this.high; at < x + wide; at += 6) {
      pen.beginPath();
      pen.moveTo(at, top + this.high);
      pen.lineTo(at + this.high, top);
      pen.stroke();
    }
    pen.restore();
  }

  axis(pen, paint, width, height) {
    const [start, stop] = this.view.window;
    const step = tickStep(stop - start, width < 500 ? 4 : 10);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    const from = start - this.view.span[0];
    for (let at = Math.ceil(from / step - 1e-6) * step; at <= stop - this.view.span[0]; at += step) {
      const x = this.left + ((at - from) / (stop - start)) * (width - this.left);
      const text = duration(at, step < 1);
      const half = pen.measureText(text).width / 2;
      pen.fillStyle = paint.line;
      pen.fillRect(x, height - AXIS, 1, 5);
      if (x + half > width) continue;
      pen.fillStyle = paint.quiet;
      pen.fillText(text, Math.max(this.left, x - half), height - 4);
    }
  }

  legend(paint) {
    const there = new Set(this.view.lanes.flatMap((lane) => [...lane.states.replace(/\d/g, "")]));
    const entries = [...there].filter((letter) => letter !== ".")
      .map((letter) => STATES[letter])
      .map((state) => [state === "training" ? "computing, in its colour" : WORDS[state],
        state === "training" ? null : paint[state], { absent: "hatched", training: "own" }[state] ?? ""]);
    if (this.fine) entries.push(["sending: a delta is out", paint.out, "thin"], ["adopting; merging", paint.adoption, "mark"]);
    legend(this.list, entries);
  }

  summary() {
    const lanes = this.view.lanes.slice(1);
    const away = lanes.filter((lane) => lane.away_s > 0);
    const told = away.slice(0, 8).map((lane) => `${lane.name} for ${lane.away_s} s`);
    return `Lanes of the coordinator and ${lanes.length} islands over ` +
      `${duration(this.view.window[1] - this.view.window[0])}. ` +
      (told.length ? `Away: ${told.join(", ")}.` : "No island was away.");
  }

  lane(row) {
    return row > 0 ? this.view.lanes[row]?.name : null;
  }

  point(event) {
    if (!this.view) return;
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / (this.high + this.gap));
    const share = (event.clientX - box.left - this.left) / (box.width - this.left);
    if (row < 0 || row >= this.view.lanes.length || share < 0) return this.leave();
    this.at = { row, column: Math.min(this.view.columns - 1, Math.floor(share * this.view.columns)) };
    this.tell(false);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter" && this.at) return this.choose(this.lane(this.at.row));
    if (event.key === "Escape") { this.choose(null); return this.leave(); }
    if (!moves[event.key] || !this.view) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    const wide = event.shiftKey ? 1 : Math.ceil(this.view.columns / 60);
    const at = this.at ?? { row: 0, column: this.view.columns - 1 };
    this.at = {
      row: Math.min(this.view.lanes.length - 1, Math.max(0, at.row + down)),
      column: Math.min(this.view.columns - 1, Math.max(0, at.column + right * wide)),
    };
    this.tell(true);
  }

  tell(aloud) {
    const lane = this.view.lanes[this.at.row];
    if (!lane) return this.leave();
    const [start, stop] = this.view.window;
    const time = start + ((this.at.column + 0.5) / this.view.columns) * (stop - start);
    const state = this.at.row ? WORDS[statesOf(lane.states)[this.at.column]]
      : { training: "up", absent: "away" }[statesOf(lane.states)[this.at.column]] ?? "not up";
    const more = this.at.row && Number(lane.out[this.at.column]) ? ", a delta is out" : "";
    const text = `${lane.name}${this.at.row && lane.incarnation > 1 ? ` #${lane.incarnation}` : ""}: ${state}${more}\n` +
      `at ${duration(time - this.view.span[0], stop - start < 60)} (${clock(time)})`;
    const box = this.canvas.clientWidth;
    const x = this.left + ((this.at.column + 0.5) / this.view.columns) * (box - this.left);
    this.tip.hidden = false;
    this.tip.textContent = text;
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x + 10, box - wide))}px`;
    this.tip.style.top = `${(this.at.row + 1) * (this.high + this.gap) + 4}px`;
    if (aloud) this.said.textContent = text.replace("\n", " ");
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
  }
}

export function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let cut = text;
  while (cut && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
