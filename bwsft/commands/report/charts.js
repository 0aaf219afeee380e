// Line charts as inline SVG. A series is {label, steps, values, kind, dots}; null values are gaps.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 200, LEFT = 52, RIGHT = 10, TOP = 10, BOTTOM = 24;

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

function axes(svg, width, x, y, domain) {
  for (const value of ticks(0, domain.top, 4)) {
    make(svg, "line", { class: "tick", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    make(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value));
  }
  for (const value of ticks(domain.first, domain.last, width / 110)) {
    if (!Number.isInteger(value)) continue;
    make(svg, "text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, value.toLocaleString("en"));
  }
}

function nearest(steps, step) {
  let best = 0;
  for (let i = 1; i < steps.length; i++) if (Math.abs(steps[i] - step) <= Math.abs(steps[best] - step)) best = i;
  return best;
}

// A figure with caption, curves and a line that reads out the values under the cursor.
function chart(parent, title, series) {
  const figure = make(parent, "figure"), caption = make(figure, "figcaption");
  make(caption, "b", {}, title);
  series = series.filter((one) => one.values.some((value) => value !== null));
  if (!series.length) { make(figure, "p", { class: "hint" }, "nothing recorded yet"); return; }
  if (series.length > 1) for (const one of series) {
    const key = make(caption, "span", { class: "key" });
    make(key, "i", { class: one.kind });
    key.append(one.label);
  }
  const all = series.flatMap((one) => one.values).filter((value) => value !== null);
  const steps = series.flatMap((one) => one.steps);
  const domain = { first: Math.min(...steps), last: Math.max(...steps), top: Math.max(...all) * 1.05 || 1 };
  if (domain.first === domain.last) { domain.first -= 1; domain.last += 1; }
  const label = `${title}: ${series.map((one) => `${one.label} from ${short(one.values[0])} to ${short(one.values.at(-1))}`).join("; ")}`;
  const svg = make(figure, "svg", { role: "img", tabindex: 0, "aria-label": label, height: HEIGHT });
  const reading = make(figure, "div", { class: "reading", "aria-live": "polite" });
  const longest = series.reduce((a, b) => (b.steps.length > a.steps.length ? b : a));
  let scale = null, chosen = null;

  function draw() {
    const width = Math.max(svg.clientWidth, 120);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    const x = (step) => LEFT + (step - domain.first) / (domain.last - domain.first) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - value / domain.top * (HEIGHT - TOP - BOTTOM);
    axes(svg, width, x, y, domain);
    for (const one of series) {
      make(svg, "path", { class: `curve ${one.kind}`, d: path(one, x, y) });
      if (one.dots || one.values.length === 1) one.values.forEach((value, i) => {
        if (value !== null) make(svg, "circle", { class: one.kind, cx: x(one.steps[i]), cy: y(value), r: 3 });
      });
    }
    scale = { x, width };
    if (chosen !== null) mark();
  }
  function mark() {
    svg.querySelector(".cursor")?.remove();
    const step = longest.steps[chosen], at = scale.x(step);
    make(svg, "line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM });
    const words = series.map((one) => {
      const i = nearest(one.steps, step), where = one.steps[i] === step ? "" : ` (step ${one.steps[i]})`;
      return `${one.label} ${short(one.values[i])}${where}`;
    });
    reading.textContent = `step ${step.toLocaleString("en")}: ${words.join(", ")}`;
  }
  svg.addEventListener("pointermove", (event) => {
    const place = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (scale.width - LEFT - RIGHT);
    chosen = nearest(longest.steps, domain.first + place * (domain.last - domain.first));
    mark();
  });
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const from = chosen ?? (move < 0 ? longest.steps.length : -1);
    chosen = Math.min(Math.max(from + move, 0), longest.steps.length - 1);
    mark();
  });
  draw();
  new ResizeObserver(() => { if (svg.clientWidth !== scale.width) draw(); }).observe(svg);
}

function drawCurves(parent, curves, evals) {
  const line = (label, values, kind = "accent") => ({ label, steps: curves.step, values, kind });
  chart(parent, "Loss, nats per token", [
    line("update", curves.loss, "accent raw"),
    line("running mean", curves.mean),
  ]);
  chart(parent, "Held-out blockwise NELBO, nats per token", [
    { label: "NELBO", steps: evals.step, values: evals.nelbo, kind: "second", dots: evals.step.length < 60 },
  ]);
  chart(parent, "Learning rate", [line("lr", curves.lr)]);
  chart(parent, "Gradient norm before clipping", [line("norm", curves.grad_norm)]);
  chart(parent, "Tokens per second", [
    line("all", curves.tokens_per_second),
    line("supervised", curves.supervised_per_second, "second"),
  ]);
}
