// The page from its embedded data. Every text goes through textContent or setAttribute.
"use strict";

// For whoever opens the page by machine: data-drawn, or data-error with the message.
window.addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

function table(parent, head, rows, marked = () => false) {
  const node = make(parent, "table"), top = make(make(node, "thead"), "tr"), body = make(node, "tbody");
  for (const title of head) make(top, "th", { scope: "col" }, title);
  for (const row of rows) {
    const line = make(body, "tr", marked(row) ? { class: "differs" } : {});
    for (const text of row.slice(0, head.length)) make(line, "td", {}, String(text));
  }
}

function drawConfig(config) {
  const differs = (row) => row[2] !== null && row[1] !== row[2];
  const changed = config.fields.filter(differs), known = config.preset !== null;
  document.getElementById("preset").textContent = !known
    ? "These values started from no preset that is known here."
    : changed.length ? `What differs from the preset ${config.preset}:` : `All as in the preset ${config.preset}.`;
  const parent = document.getElementById("config");
  if (changed.length) table(parent, ["field", "this run", "preset"], changed);
  const head = known ? ["field", "this run", "preset"] : ["field", "this run"];
  table(document.getElementById("fields"), head, config.fields, differs);
}

function draw(data) {
  document.getElementById("name").textContent = data.name;
  document.getElementById("summary").textContent = data.summary;
  for (const [label, value] of data.facts) {
    const box = make(document.getElementById("facts"), "div");
    make(box, "dt", {}, label);
    make(box, "dd", {}, value);
  }
  if (data.curves.every > 1) {
    document.getElementById("thinned").textContent = ` A point is the mean of ${data.curves.every} updates.`;
  }
  drawCurves(document.getElementById("curves"), data.curves, data.evals);
  for (const note of data.notes) make(document.getElementById("notes"), "p", { class: "hint" }, note);
  drawSamples(data.samples);
  drawConfig(data.config);
  table(document.getElementById("provenance"), ["what", "value"], data.provenance);
  document.documentElement.dataset.drawn = "yes";
}

draw(JSON.parse(document.getElementById("data").textContent));
