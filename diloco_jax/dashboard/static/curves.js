// Curves over time, by ECharts. Text in tooltips is drawn, never read as HTML.
import { bytes, clock, colour, count, duration, islandColour, legend, percent, tickStep } from "./format.js";

const FEW = 8;
const charts = new Map();
const OVER_TIME = { mark: (at, step) => duration(at, step < 1), step: tickStep,
  head: (at, [start, stop], begin) => `${duration(at, stop - start < 60)} (${clock(at + begin)})` };
const OVER_TOKENS = { mark: (at) => count(at), step: () => undefined,
  head: (at) => `${count(at)} tokens merged` };

function chart(id) {
  if (!charts.has(id)) {
    charts.set(id, window.echarts.init(document.getElementById(id), null, { renderer: "canvas" }));
  }
  return charts.get(id);
}

export function resize() {
  for (const each of charts.values()) each.resize();
}

// Draw one chart: `series` are {name, data, colour, dashed, wide, points}. One of which
// the run has had nothing yet is not there.
function draw(id, view, series, { format = count, min = null, tip = null, span = null, axis = OVER_TIME } = {}) {
  const [start, stop] = span ?? view.window.map((time) => time - view.span[0]);
  const there = series.filter((one) => one.data.some((point) => point[1] !== null));
  const section = document.getElementById(id).closest("section");
  if (!there.length && !charts.has(id)) { section.hidden = true; return; }
  section.hidden = false;
  const [ink, quiet, line, card] = ["ink", "quiet", "line", "card"].map(colour);
  const step = axis.step(stop - start, document.getElementById(id).clientWidth < 380 ? 5 : 6);
  chart(id).setOption({
    animation: false,
    textStyle: { fontFamily: "system-ui, sans-serif" },
    grid: { left: 62, right: 14, top: 12, bottom: 26 },
    xAxis: {
      type: "value", min: start, max: stop, interval: step,
      axisLabel: { color: quiet, hideOverlap: true, showMaxLabel: false, showMinLabel: start === 0,
        formatter: (value) => axis.mark(value, step) },
      axisLine: { lineStyle: { color: line } }, splitLine: { show: false },
    },
    yAxis: {
      type: "value", scale: min === null, min, splitNumber: 4,
      axisLabel: { color: quiet, formatter: (value) => format(value), hideOverlap: true },
      splitLine: { lineStyle: { color: line } },
    },
    tooltip: {
      trigger: "axis", renderMode: "richText", confine: true, backgroundColor: ink,
      borderWidth: 0, textStyle: { color: card, fontSize: 12 },
      formatter: (points) => {
        if (!points.length) return "";
        const at = points[0].value[0];
        const head = axis.head(at, [start, stop], view.span[0]);
        return [head, ...(tip ?? plain)(points, format)].join("\n");
      },
    },
    series: there.map((one) => ({
      type: "line", name: one.name, data: one.data, symbol: one.points ? "circle" : "none",
      symbolSize: 6, showSymbol: Boolean(one.points), connectNulls: true, z: one.wide ? 5 : 2,
      lineStyle: { color: one.colour, width: one.wide ? 2.5 : one.thin ? 1 : 1.8, type: one.dashed ? "dashed" : "solid",
        opacity: one.thin ? 0.45 : 1 },
      itemStyle: { color: one.colour },
    })),
    graphic: there.length ? [] : [{ type: "text", left: "center", top: "middle",
      style: { text: "nothing in this window", fill: quiet, font: "13px system-ui, sans-serif" } }],
  }, { notMerge: true });
  const told = there.slice(0, FEW).map((one) => `${one.name} ${format(last(one.data))}`);
  document.getElementById(id).setAttribute("aria-label",
    told.length ? `Newest values: ${told.join(", ")}` : "nothing in this window");
  const list = document.getElementById(`${id}-legend`);
  const named = there.filter((one) => !one.thin);
  const entries = named.map((one) => [one.name, one.colour, one.dashed ? "thin dashed" : "thin"]);
  const thin = there.filter((one) => one.thin);
  if (thin.length) entries.unshift([`${thin.length} islands`, thin[0].colour, "thin"]);
  legend(list, entries);
}

export function last(data) {
  return data.findLast((point) => point[1] !== null)?.[1] ?? null;
}

function plain(points, format) {
  return points.map((point) => `${point.seriesName}: ${format(point.value[1])}`);
}

// Many curves are told by their lowest, middle and highest, and the chosen one.
function spread(points, format, chosen) {
  if (points.length <= FEW + 2) return plain(points, format);
  const islands = points.filter((point) => point.seriesName !== "merged model" && point.value[1] !== null)
    .sort((one, other) => one.value[1] - other.value[1]);
  if (!islands.length) return ["no island told its loss"];
  const [low, middle, high] = [islands[0], islands[islands.length >> 1], islands.at(-1)];
  return [`lowest ${low.seriesName}: ${format(low.value[1])}`, `median: ${format(middle.value[1])}`,
    `highest ${high.seriesName}: ${format(high.value[1])}`,
    ...plain(points.filter((point) => point.seriesName === chosen), format)];
}

export function drawCurves(view, chosen) {
  const { curves } = view;
  const times = curves.times.map((time) => time - view.span[0]);
  const pairs = (values) => times.map((time, n) => [time, values[n]]);
  const line = (name, values, of, more = {}) => ({ name, data: pairs(values), colour: colour(of), ...more });
  const loss = (value) => value === null ? "–" : Number(value.toPrecision(4)).toString();

  const names = Object.keys(curves.loss);
  const many = names.length > FEW;
  const series = names.map((name, n) => ({ ...line(name, curves.loss[name], "many",
    { thin: many && name !== chosen, wide: name === chosen, dashed: !many && n % 2 === 1 }),
  colour: islandColour(view, name, chosen) }));
  const merged = curves.merged_loss.map(([time, , value]) => [time - view.span[0], value]);
  series.push({ name: "merged model", data: merged, colour: colour("ink"), wide: true, points: true });
  draw("loss", view, series, { format: loss, tip: (told, format) => spread(told, format, chosen) });

  course(view, loss);

  const speeds = [line("computed", curves.computed, "quiet", { dashed: true })];
  speeds.push(line("merged", curves.merged, "ink"));
  draw("speed", view, speeds, { min: 0 });
  draw("cosine", view, [line("between islands", curves.pairwise_cosine, "ink"),
    line("to the fragment's last", curves.cosine_to_last, "quiet", { dashed: true })],
  { format: (value) => value === null ? "–" : value.toFixed(2) });
  draw("bandwidth", view, [line("up", curves.up, "ink"), line("down", curves.down, "quiet", { dashed: true })],
    { format: (value) => `${bytes(value)}/s`, min: 0 });
  draw("behind", view, [line("of all islands", curves.behind_mean, "ink"),
    line("of the one most behind", curves.behind_most, "quiet", { dashed: true })], { min: 0 });
  const share = (value) => percent(value);
  draw("mfu", view, [line("of all islands", curves.mfu, "ink")], { format: share, min: 0 });
  const held = [line("coordinator", curves.memory_bytes, "ink")];
  if (curves.workers_memory_bytes.some((value) => value)) held.push(line("its workers", curves.workers_memory_bytes, "quiet", { dashed: true }));
  draw("machine", view, held, { format: bytes, min: 0 });
  said(view, last(pairs(curves.memory_left_bytes)), last(pairs(curves.disk_free_bytes)));
}

// Where the run stands: its loss over the tokens that were merged.
function course(view, format) {
  const { curves, status } = view;
  const islands = curves.tokens.map((tokens, n) => [tokens, curves.mean_loss[n]]);
  const points = curves.merged_loss.map(([, , value, tokens]) => [tokens, value]);
  if (typeof status.eval_loss === "number" && view.window[1] >= view.span[1]) points.push([status.tokens, status.eval_loss]);
  const tokens = [...islands, ...points].map(([at]) => at);
  const from = Math.min(...tokens);
  const until = Math.max(from + 1, ...tokens);
  draw("course", view, [
    { name: "islands, on what they train on", data: islands, colour: colour("quiet") },
    { name: "merged model, on validation text", data: points, colour: colour("ink"), wide: true, points: true },
  ], { format, span: [from, until], axis: OVER_TOKENS });
}

// What a curve cannot say: what is not known, and shares of what there is.
function said(view, memory, disk) {
  const { run, lanes } = view;
  const tell = (id, text) => { document.getElementById(id).textContent = text; };
  tell("machine-said", disk === null ? "" :
    `At the end of the window ${bytes(memory)} of its machine's memory and ${bytes(disk)} of its disk were free.`);
  const seconds = Math.max(1e-3, view.window[1] - view.window[0]);
  const most = ["bytes_up", "bytes_down"].map((way) => Math.max(0, ...lanes.slice(1).map((lane) => lane[way])) / seconds);
  const [up, down] = most.map((rate) => bytes(rate));
  const link = run.link_bytes_per_s;
  tell("bandwidth-said", `Busiest island in this window: ${up}/s up, ${down}/s down on average` +
    (link ? `, ${percent(most[0] / link, 1)} and ${percent(most[1] / link, 1)} of a link of ${bytes(link)}/s each way.`
      : ". With --link-gbit-per-s, the dashboard shows how much of its link that is."));
}
