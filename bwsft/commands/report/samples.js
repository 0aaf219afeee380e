// Decoded answers: a canvas that fills step by step, and a heat map of the same commitments.
// An answer's commits are [step from 0, position, token id, confidence].
"use strict";

const show = { step: 0, by: "step", answers: [], timer: null };

function byPosition(answer) {
  const found = new Array(answer.gen_length).fill(null);
  for (const [step, position, token, confidence] of answer.commits) {
    found[position] = { step, confidence, piece: answer.tokens[token], end: answer.end_ids.includes(token) };
  }
  return found;
}

function strength(place, answer) {
  if (show.by === "confidence") return place.confidence;
  return answer.steps > 1 ? place.step / (answer.steps - 1) : 1;
}

// A token as one line of text; an end token as a sign.
function printable(place) {
  return place.end ? "∎" : visible(place.piece);
}

function visible(piece) {
  return piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/[\0-\x08\x0b-\x1f\x7f]/g, "�") || "∅";
}

// Every position keeps the width of its token from the start: nothing moves when it appears.
function makeCanvas(parent, answer, places) {
  const canvas = make(parent, "div", { class: "canvas", role: "img", "aria-label": `Answer being unmasked: ${answer.text}` });
  return places.map((place, position) => {
    if (position && (position + answer.offset) % answer.block_size === 0) make(canvas, "span", { class: "edge" }, "│");
    const cell = make(canvas, "span", {}, place ? printable(place) : "·");
    if (place?.piece.includes("\n")) make(canvas, "br");
    else if (place?.end || !place) canvas.append("\u200b");
    return cell;
  });
}

function makeHeat(parent, answer, places) {
  const size = answer.block_size, rows = Math.ceil((answer.offset + answer.gen_length) / size);
  const heat = make(parent, "div", { class: "heat", tabindex: 0, role: "img" });
  heat.setAttribute("aria-label", `Heat map of ${rows} blocks of ${size} positions; arrow keys read a position`);
  heat.style.gridTemplateColumns = `1.6rem repeat(${size}, minmax(0, 1fr))`;
  const cells = [];
  for (let row = 0; row < rows; row++) {
    make(heat, "b", {}, String(row + 1));
    for (let column = 0; column < size; column++) {
      const position = row * size + column - answer.offset, inside = position >= 0 && position < places.length;
      const place = places[position], cell = make(heat, "i", { class: !inside ? "out" : place ? "" : "never" });
      if (place && size <= 16) cell.textContent = place.step + 1;
      if (inside) cells[position] = cell;
    }
  }
  const reading = make(parent, "div", { class: "reading", "aria-live": "polite" });
  readable(heat, cells, reading, answer, places);
  return cells;
}

function readable(heat, cells, reading, answer, places) {
  let chosen = null;
  function choose(position) {
    if (position < 0 || position >= cells.length) return;
    if (chosen !== null) cells[chosen].classList.remove("chosen");
    chosen = position;
    cells[chosen].classList.add("chosen");
    const place = places[position], block = Math.floor((position + answer.offset) / answer.block_size) + 1;
    reading.textContent = `block ${block}, position ${position + 1}: ` + (place
      ? `“${visible(place.piece)}” at step ${place.step + 1}, confidence ${place.confidence.toFixed(3)}`
      : "still masked when decoding ended");
  }
  heat.addEventListener("pointermove", (event) => choose(cells.indexOf(event.target)));
  heat.addEventListener("keydown", (event) => {
    const size = answer.block_size;
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -size, ArrowDown: size }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(chosen === null ? 0 : chosen + move);
  });
}

function showAnswer(parent, answer) {
  const box = make(parent, "div", { class: "answer" }), places = byPosition(answer);
  make(box, "h3", {}, answer.name);
  const many = places.filter((place) => place).length;
  const ending = answer.ended ? "" : "; no end token";
  make(box, "p", { class: "hint" }, `${answer.context}, ${many} tokens in ${answer.steps} steps${ending}`);
  make(box, "p", { class: "text" }, answer.text || "(empty)");
  make(box, "h3", {}, "Unmasking (∎ end token, │ block edge)");
  const tokens = makeCanvas(box, answer, places);
  make(box, "h3", {}, "When each position was committed, a row per block");
  show.answers.push({ answer, places, tokens, heat: makeHeat(box, answer, places) });
}

function paint() {
  const last = Number(document.getElementById("scrub").max);
  for (const { answer, places, tokens, heat } of show.answers) places.forEach((place, position) => {
    const cell = tokens[position], done = place && place.step < show.step;
    cell.classList.toggle("masked", !done);
    cell.classList.toggle("fresh", Boolean(done) && place.step === show.step - 1 && show.step < last);
    for (const node of place ? [cell, heat[position]] : []) node.style.setProperty("--x", strength(place, answer));
  });
  document.getElementById("scrub").value = show.step;
  document.getElementById("at").textContent = `${show.step} of ${last}`;
  const steps = show.by === "step";
  document.getElementById("low").textContent = steps ? "first" : "0";
  document.getElementById("high").textContent = steps ? "last" : "1";
}

function stop() {
  clearInterval(show.timer);
  show.timer = null;
  document.getElementById("play").textContent = "Play";
}

function play() {
  const last = Number(document.getElementById("scrub").max);
  if (show.step >= last) show.step = 0;
  document.getElementById("play").textContent = "Pause";
  show.timer = setInterval(() => {
    show.step += 1;
    paint();
    if (show.step >= last) stop();
  }, 150);
  paint();
}

function pick(sample) {
  stop();
  for (const name of ["question", "reference"]) document.getElementById(name).textContent = sample[name];
  const parent = document.getElementById("answers");
  parent.replaceChildren();
  show.answers = [];
  for (const answer of sample.answers) showAnswer(parent, answer);
  show.step = Math.max(...sample.answers.map((answer) => answer.steps));
  document.getElementById("scrub").max = show.step;
  paint();
}

function drawSamples(samples) {
  if (!samples.length) return;
  document.getElementById("samples").hidden = false;
  const list = document.getElementById("pick");
  samples.forEach((sample, i) => make(list, "option", { value: i }, `${i + 1}. ${sample.question}`.slice(0, 90)));
  list.addEventListener("change", () => pick(samples[list.value]));
  document.getElementById("play").addEventListener("click", () => (show.timer === null ? play() : stop()));
  document.getElementById("scrub").addEventListener("input", (event) => {
    stop();
    show.step = Number(event.target.value);
    paint();
  });
  for (const radio of document.getElementsByName("by")) radio.addEventListener("change", () => {
    show.by = radio.value;
    paint();
  });
  pick(samples[0]);
}
