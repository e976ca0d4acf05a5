// The newest merges: a column for each, a row for each island, darker for more weight.
import { colour, count, duration, islandColour, legend, percent } from "./format.js";
import { fitted } from "./lanes.js";

export class Merges {
  constructor(canvas, tip, said, aloud, list) {
    Object.assign(this, { canvas, tip, said, aloud, list, at: null });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  draw(view, chosen) {
    this.view = view;
    this.names = view.lanes.slice(1).map((lane) => lane.name);
    const many = this.names.length > 12;
    const width = this.canvas.clientWidth;
    this.left = width < 500 ? 76 : 120;
    this.high = many ? 10 : 20;
    const height = Math.max(1, this.names.length) * (this.high + 1) + 20;
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    this.each = Math.min(22, (width - this.left) / Math.max(1, view.merges.length));
    const most = Math.max(1, ...view.merges.flatMap((merge) => merge.weights));
    const [ink, none, quiet, bad] = ["ink", "none", "quiet", "absent"].map(colour);
    this.names.forEach((name, row) => {
      const top = row * (this.high + 1);
      const full = islandColour(view, name, chosen);
      pen.globalAlpha = 1;
      pen.fillStyle = ink;
      pen.font = `${name === chosen ? "bold " : ""}${many ? 9 : 13}px system-ui, sans-serif`;
      pen.textBaseline = "middle";
      pen.fillText(fitted(pen, name, this.left - 8), 0, top + this.high / 2);
      view.merges.forEach((merge, column) => {
        const x = this.left + column * this.each;
        pen.globalAlpha = 1;
        pen.fillStyle = none;
        pen.fillRect(x, top, this.each - 1, this.high);
        const weight = merge.weights[row];
        if (weight) {
          pen.globalAlpha = 0.2 + 0.8 * (weight / most);
          pen.fillStyle = full;
          pen.fillRect(x, top, this.each - 1, this.high);
        }
        if (merge.stale[name]) {
          pen.globalAlpha = 1;
          pen.fillStyle = bad;
          pen.fillRect(x, top + this.high - 3, this.each - 1, 3);
        }
      });
    });
    pen.globalAlpha = 1;
    pen.fillStyle = quiet;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "alphabetic";
    if (view.merges.length) {
      const times = [view.merges[0], view.merges.at(-1)].map((merge) => duration(merge.time - view.span[0], true));
      const end = this.left + view.merges.length * this.each;
      pen.fillText(times[0], this.left, height - 4);
      const wide = pen.measureText(times[1]).width;
      if (end - this.left > 3 * wide) pen.fillText(times[1], end - wide, height - 4);
    }
    legend(this.list, [[`up to ${percent(most / 1000)} of the tokens, in its colour`, null, "own"],
      ["took no part", none, ""], ["its base was a version behind, or more", bad, "thin"]]);
    this.canvas.setAttribute("aria-label", this.summary());
    if (!view.merges.length) this.said.textContent = "No merge in this window.";
    else if (this.at === null) this.said.textContent = this.summary();
    if (this.at !== null) this.tell();
  }

  summary() {
    const merges = this.view.merges;
    if (!merges.length) return "No merge in this window.";
    const last = merges.at(-1);
    return `The last ${merges.length} merges of the window. The newest: ${this.told(last)}`;
  }

  told(merge) {
    const parts = merge.weights.map((weight, row) => [this.names[row], weight])
      .filter(([, weight]) => weight).sort((one, other) => other[1] - one[1]);
    const shown = parts.slice(0, 6).map(([name, weight]) => `${name} ${percent(weight / 1000)}`);
    const more = parts.length > 6 ? ` and ${parts.length - 6} more` : "";
    const cosine = merge.pairwise_cosine ?? null;
    return `fragment ${merge.fragment} version ${merge.version}${merge.final ? " (flush)" : ""}, ` +
      `${count(merge.tokens)} tokens of ${shown.join(", ")}${more}` +
      (cosine === null ? "" : `; cosine ${cosine}`) +
      (merge.share < 1 ? `; goes ${percent(merge.share)} of the way` : "");
  }

  point(event) {
    if (!this.view) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.each);
    if (column < 0 || column >= this.view.merges.length) return this.leave();
    this.at = column;
    this.tell();
  }

  key(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.view?.merges.length) return;
    event.preventDefault();
    const from = this.at ?? this.view.merges.length;
    this.at = Math.min(this.view.merges.length - 1, Math.max(0, from + move));
    this.tell();
    this.said.textContent = this.aloud.textContent = this.tip.textContent.replace("\n", " ");
  }

  tell() {
    const merge = this.view.merges[this.at];
    if (!merge) return this.leave();
    this.tip.hidden = false;
    this.tip.textContent = `${duration(merge.time - this.view.span[0], true)}\n${this.told(merge)}`;
    const x = this.left + (this.at + 1) * this.each;
    this.tip.style.left = `${Math.max(0, Math.min(x, this.canvas.clientWidth - this.tip.offsetWidth))}px`;
    this.tip.style.top = "8px";
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    if (this.view) this.said.textContent = this.summary();
  }
}
