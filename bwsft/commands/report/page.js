// The page from its embedded data. Every text goes through textContent or setAttribute.
"use strict";

// For whoever opens the page by machine: data-drawn, or data-error with the message.
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

// A table that scrolls by itself where it is too wide. Its first column names the row.
function table(parent, label, { head, rows }, marked = () => false) {
  if (!rows.length) return;
  const box = make(parent, "div", { class: "wide", tabindex: 0, role: "group", "aria-label": label });
  const node = make(box, "table"), top = make(make(node, "thead"), "tr"), body = make(node, "tbody");
  for (const title of head) make(top, title ? "th" : "td", title ? { scope: "col" } : {}, title);
  for (const [label, ...values] of rows) {
    const line = make(body, "tr", marked(values) ? { class: "differs" } : {});
    make(line, "th", { scope: "row" }, String(label));
    for (const text of values) make(line, "td", {}, String(text));
  }
}

function drawFacts(parent, facts, several) {
  if (several) { table(parent, "Figures of the runs", facts); return; }
  const list = make(parent, "dl");
  for (const [label, value] of facts.rows) {
    const box = make(list, "div");
    make(box, "dt", {}, label);
    make(box, "dd", {}, value);
  }
}

function drawSpikes(parent, runs) {
  const shown = 20, several = runs.length > 1;
  const all = runs.flatMap((run) => run.spikes.map(([step, ...what]) => [...(several ? [run.name] : []), step.toLocaleString("en"), ...what]));
  if (!all.length) { make(parent, "p", { class: "hint" }, "None so far."); return; }
  table(parent, "Spikes", { head: [...(several ? ["run"] : []), "step", "what", "what became of it"], rows: all.slice(0, shown) });
  if (all.length > shown) make(parent, "p", { class: "hint" }, `${all.length - shown} more are marked in the curves.`);
}

// A page of a run in progress loads itself again, not while somebody reads a figure by keyboard.
function drawLive(live) {
  if (!live) return;
  document.getElementById("live").hidden = false;
  const several = live.runs.length > 1, parent = document.getElementById("progress");
  live.runs.forEach((run, i) => {
    const row = make(parent, "p", { class: "row" });
    make(row, "label", { for: `done-${i}` }, several ? run.name : "Progress");
    make(row, "progress", { id: `done-${i}`, max: run.steps, value: run.done });
    make(row, "span", {}, run.said);
  });
  const button = document.getElementById("refresh"), said = document.getElementById("refreshing");
  let timer = null;
  function wait() {
    timer = setTimeout(() => {
      const busy = document.querySelector("main :focus") || document.hidden;
      if (busy) wait(); else location.reload();
    }, live.every * 1000);
  }
  function toggle() {
    if (timer === null) wait(); else { clearTimeout(timer); timer = null; }
    button.textContent = timer === null ? "Go on" : "Pause";
    said.textContent = timer === null
      ? "The page stands still."
      : `The page loads itself again every ${live.every} s, but not while a figure has the focus.`;
  }
  button.addEventListener("click", toggle);
  toggle();
}

function draw(data) {
  const at = (id) => document.getElementById(id), several = data.runs.length > 1;
  at("name").textContent = data.name;
  for (const line of data.summary) make(at("summary"), "p", {}, line);
  drawLive(data.live);
  drawFacts(at("facts"), data.facts, several);
  const thinned = data.runs.filter((run) => run.curves.every > 1).map((run) => `${run.curves.every} updates${several ? ` of ${run.name}` : ""}`);
  if (thinned.length) at("thinned").textContent = ` A point is the mean of ${thinned.join(", ")}.`;
  drawCurves(at("curves"), data.runs);
  drawSlices(data.runs);
  drawSpikes(at("spikes"), data.runs);
  if (data.counts.rows.length) table(at("counts"), "Data counts", data.counts);
  else make(at("counts"), "p", { class: "hint" }, "These runs were written before data counts were stored.");
  for (const note of data.notes) make(at("notes"), "p", { class: "hint" }, note);
  drawSamples(data.samples);
  at("about").textContent = data.settings.about;
  table(at("differ"), "Settings that differ", data.settings.differ);
  table(at("settings"), "Every setting", data.settings.all, (values) => values.some((value) => value !== values[0]));
  table(at("provenance"), "Provenance", data.provenance);
  document.documentElement.dataset.drawn = "yes";
}

draw(JSON.parse(document.getElementById("data").textContent));
