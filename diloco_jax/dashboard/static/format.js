// Numbers, times and colours as people read them.

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function count(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, of] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (size >= of) return `${trim(value / (unit === "k" ? 1e3 : of))} ${unit}`;
  }
  return size >= 100 || value === 0 ? Math.round(value).toLocaleString("en") : trim(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, of] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= of) return `${trim(value / of)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

function trim(value) {
  return Number(value.toPrecision(3)).toString();
}

export function percent(share, digits = 0) {
  if (share === null || share === undefined) return "–";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? Math.max(1, digits) : digits)} %`;
}

// Seconds as 1:02:03 or 2:03; with tenths where a tick is shorter than a second.
export function duration(seconds, tenths = false) {
  const sign = seconds < 0 ? "-" : "";
  let rest = Math.abs(seconds);
  rest = tenths ? Math.round(rest * 10) / 10 : Math.round(rest);
  const hours = Math.floor(rest / 3600);
  const minutes = Math.floor((rest % 3600) / 60);
  const last = (rest % 60).toFixed(tenths ? 1 : 0).padStart(tenths ? 4 : 2, "0");
  return hours ? `${sign}${hours}:${String(minutes).padStart(2, "0")}:${last}`
    : `${sign}${minutes}:${last}`;
}

const STEPS = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  14400, 21600, 43200, 86400, 172800, 604800];

// The step between marks of time, so that there are `most` of them at the most.
export function tickStep(seconds, most) {
  return STEPS.find((step) => seconds / step <= most) ?? seconds / most;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

// A day with its time: the words of the page count from one.
export function moment(unix) {
  return new Date(unix * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

// Say a text where it is not said yet: what is live is read aloud whenever it is set.
export function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// Make an element with properties and children, without any text read as HTML.
export function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children.filter((child) => child !== null));
  return made;
}

// An island's colour, the same in every view: of many, none has one of its own.
export function islandColour(view, name, chosen) {
  if (view.lanes.length - 1 > 8) return colour(name === chosen ? "c1" : "many");
  return colour(`c${Math.max(0, view.lanes.findIndex((lane) => lane.name === name) - 1)}`);
}

export function legend(list, entries) {
  list.replaceChildren(...entries.map(([text, of, kind]) => {
    const swatch = make("span", { className: `swatch ${kind ?? ""}` });
    if (of) swatch.style.backgroundColor = of;
    return make("li", {}, swatch, text);
  }));
}
