// Line charts as inline SVG. A series is {label, steps, values, kind}, and optionally {dots, errors
// (half a bar at each value), counts, spikes (steps)}; null values are gaps. Its kind is a class c0,
// c1, ...: a color and a way of dashing.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 200, LEFT = 52, RIGHT = 18, TOP = 12, BOTTOM = 24;

function make(parent, tag, attributes = {}, text) {
  const svg = tag === "svg" || parent.namespaceURI === SVG;
  const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function short(value) {
  if (value === null) return "none";
  const size = Math.abs(value);
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  if (size >= 1 || size === 0) return String(+value.toPrecision(4));
  return size >= 1e-3 ? String(+value.toPrecision(3)) : value.toExponential(1);
}

// A round distance between ticks, so that about `count` of them span `range`.
function tickSize(range, count) {
  const rough = range / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

function ticks(low, high, count) {
  const size = tickSize(high - low, count), found = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high * (1 + 1e-9); i++) found.push(i * size || 0);
  return found;
}

function path(series, x, y) {
  let line = "", pen = "M";
  series.values.forEach((value, i) => {
    if (value === null) pen = "M";
    else { line += `${pen}${x(series.steps[i]).toFixed(1)},${y(value).toFixed(1)}`; pen = "L"; }
  });
  return line;
}

function axes(svg, width, x, y, domain, options) {
  for (const value of ticks(0, domain.top, 4)) {
    make(svg, "line", { class: "tick", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    make(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value));
  }
  for (const value of options.ticks ?? ticks(domain.first, domain.last, width / 110)) {
    if (!Number.isInteger(value)) continue;
    make(svg, "text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, value.toLocaleString("en") + options.suffix);
  }
}

function curve(svg, one, x, y) {
  make(svg, "path", { class: `curve ${one.kind}`, d: path(one, x, y) });
  one.values.forEach((value, i) => {
    if (value === null) return;
    const cx = x(one.steps[i]), error = one.errors?.[i];
    if (error) make(svg, "line", { class: `bar ${one.kind}`, x1: cx, x2: cx, y1: y(Math.max(value - error, 0)), y2: y(value + error) });
    if (one.dots || one.values.length === 1) make(svg, "circle", { class: one.kind, cx, cy: y(value), r: 3 });
  });
  for (const step of one.spikes ?? []) {
    make(svg, "path", { class: `spike ${one.kind}`, d: `M${x(step) - 5},${TOP - 8}h10l-5,8z` });
  }
}

function addKey(caption, one) {
  const node = make(caption, "span", { class: "key" });
  const line = make(node, "svg", { width: 26, height: 8, "aria-hidden": "true" });
  make(line, "line", { class: `curve ${one.kind}`, x1: 0, x2: 26, y1: 4, y2: 4 });
  node.append(one.label);
}

function nearest(steps, step) {
  let best = 0;
  for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - step) <= Math.abs(steps[best] - step)) best = i;
  return best;
}

function spoken(title, series) {
  const words = series.map((one) => {
    const spikes = one.spikes?.length ? `, ${one.spikes.length} spikes, first at step ${one.spikes[0]}` : "";
    return `${one.label} from ${short(one.values[0])} to ${short(one.values.at(-1))}${spikes}`;
  });
  return `${title}: ${words.join("; ")}`;
}

function span(series) {
  const all = series.flatMap((one) => one.values.map((value, i) => value + (one.errors?.[i] ?? 0)));
  const steps = series.flatMap((one) => [...one.steps, ...(one.spikes ?? [])]);
  const domain = { first: least(steps), last: most(steps), top: most(all) * 1.05 || 1 };
  return domain.first === domain.last ? { ...domain, first: domain.first - 1, last: domain.last + 1 } : domain;
}

const most = (values) => values.reduce((a, b) => Math.max(a, b));
const least = (values) => values.reduce((a, b) => Math.min(a, b));

// A figure with caption, curves and a line that reads out the values under the cursor.
function chart(parent, title, series, options = { unit: "step", suffix: "" }) {
  const figure = make(parent, "figure"), caption = make(figure, "figcaption");
  make(caption, "b", {}, title);
  series = series.filter((one) => one.values.some((value) => value !== null));
  if (!series.length) { make(figure, "p", { class: "hint" }, "nothing recorded yet"); return; }
  if (series.length > 1) for (const one of series) addKey(caption, one);
  if (series.some((one) => one.spikes?.length)) make(caption, "span", { class: "key" }, "▼ spike");
  const domain = span(series);
  const svg = make(figure, "svg", { role: "img", tabindex: 0, "aria-label": spoken(title, series), height: HEIGHT });
  const reading = make(figure, "div", { class: "reading", "aria-live": "polite" });
  const steps = [...new Set(series.flatMap((one) => one.steps))].sort((a, b) => a - b);
  let scale = null, chosen = null;

  function draw() {
    const width = Math.max(svg.clientWidth, 120);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    const x = (step) => LEFT + (step - domain.first) / (domain.last - domain.first) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - value / domain.top * (HEIGHT - TOP - BOTTOM);
    axes(svg, width, x, y, domain, options);
    for (const one of series) curve(svg, one, x, y);
    scale = { x, width };
    if (chosen !== null) mark();
  }
  function mark() {
    svg.querySelector(".cursor")?.remove();
    const step = steps[chosen], at = scale.x(step);
    make(svg, "line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
    const words = series.map((one) => {
      const i = nearest(one.steps, step), where = one.steps[i] === step ? "" : ` (${options.unit} ${one.steps[i]})`;
      const error = one.errors?.[i] ? ` ± ${short(one.errors[i])}` : "", count = one.counts ? ` of ${one.counts[i]} draws` : "";
      return `${one.label} ${short(one.values[i])}${error}${count}${where}`;
    });
    reading.textContent = `${options.unit} ${step.toLocaleString("en")}${options.suffix}: ${words.join(", ")}`;
  }
  svg.addEventListener("pointermove", (event) => {
    const place = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (scale.width - LEFT - RIGHT);
    chosen = nearest(steps, domain.first + place * (domain.last - domain.first));
    mark();
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const from = chosen ?? (move < 0 ? steps.length : -1);
    chosen = Math.min(Math.max(from + move, 0), steps.length - 1);
    mark();
  });
  draw();
  new ResizeObserver(() => { if (svg.clientWidth !== scale.width) draw(); }).observe(svg);
}

// One run: its quantities by name. Several: a curve per run, named after it.
function drawCurves(parent, runs) {
  const one = runs.length === 1 ? runs[0] : null;
  const line = (run, label, values, kind, more = {}) => ({ label, steps: run.curves.step, values, kind, ...more });
  const each = (name, label) => runs.map((run, i) => line(run, one ? label : run.name, run.curves[name], `c${i}`));
  const loss = each("mean", "running mean").map((series, i) => ({ ...series, spikes: runs[i].spikes.map(([step]) => step) }));
  if (one) chart(parent, "Loss, nats per token", [line(one, "update", one.curves.loss, "c0 raw"), ...loss]);
  else chart(parent, "Loss, running mean, nats per token", loss);
  chart(parent, "Held-out blockwise NELBO, nats per token", runs.map((run, i) => ({
    label: one ? "NELBO" : run.name, steps: run.evals.step, values: run.evals.nelbo, kind: `c${i}`, dots: run.evals.step.length < 60,
  })));
  chart(parent, "Learning rate", each("lr", "lr"));
  chart(parent, "Gradient norm before clipping", each("grad_norm", "norm"));
  if (one) chart(parent, "Tokens per second", [...each("tokens_per_second", "all"), line(one, "supervised", one.curves.supervised_per_second, "c1")]);
  else chart(parent, "Supervised tokens per second", each("supervised_per_second"));
}

// One run: its base and its newest checkpoint. Several: the newest of each.
function drawSlices(runs) {
  const models = runs.length === 1
    ? runs[0].slices.map((slice, i) => [slice.name, slice, `c${(i + 1) % 2}`])
    : runs.flatMap((run, i) => run.slices.slice(-1).map((slice) => [`${run.name}, ${slice.name}`, slice, `c${i}`]));
  if (!models.length) return;
  document.getElementById("slices").hidden = false;
  const parent = document.getElementById("sliced");
  const series = (by) => models.map(([label, slice, kind]) => ({
    label, kind, dots: true, steps: slice[by].at, values: slice[by].mean, errors: slice[by].error, counts: slice[by].count,
  }));
  const blocks = [...new Set(models.flatMap(([, slice]) => slice.block.at))];
  chart(parent, "By block of the response", series("block"), { unit: "block", suffix: "", ticks: blocks.length <= 12 ? blocks : undefined });
  chart(parent, "By mask rate of the block, up to", series("rate"), { unit: "rate up to", suffix: " %", ticks: [25, 50, 75, 100] });
}
