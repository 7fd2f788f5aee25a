// The data of the page, decoded, and how numbers are written.
const DATA = JSON.parse(document.getElementById("data").textContent);
const ENGINES = ["tensor", "vector", "scalar", "gpsimd", "sync", "dma"];
const ARRAYS = { float64: Float64Array, float32: Float32Array, int32: Int32Array, uint16: Uint16Array };

function column(c) {
  const text = atob(c.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new ARRAYS[c.dtype](bytes.buffer);
}

const ROWS = { count: DATA.rows.count };
for (const [name, value] of Object.entries(DATA.rows)) if (name !== "count") ROWS[name] = column(value);
const MEMORY = Object.entries(DATA.occupancy).map(([name, m]) => ({ name, capacity: m.capacity, at: column(m.at), bytes: column(m.bytes) }));

// rows of each lane: first and last + 1; they are sorted by lane and start
const LANES = DATA.lanes.map(name => ({ name, engine: name.startsWith("dma") ? "dma" : name, first: 0, end: 0 }));
for (let i = 0; i < ROWS.count; i++) {
  const lane = LANES[ROWS.lane[i]];
  if (i === 0 || ROWS.lane[i] !== ROWS.lane[i - 1]) lane.first = i;
  lane.end = i + 1;
}
// the longest row of each lane bounds how far back a row that is still running can have started
for (const lane of LANES) {
  lane.longest = 0;
  for (let i = lane.first; i < lane.end; i++) lane.longest = Math.max(lane.longest, ROWS.duration[i]);
}
const BY_ID = new Map();
for (let i = 0; i < ROWS.count; i++) BY_ID.set(ROWS.id[i], i);

const TOTAL = Math.max(DATA.latency_us * 1e3, 1e-3);

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim(); }

function three(x) { return Number(x.toPrecision(4)).toString(); }

function time(ns) {
  const a = Math.abs(ns);
  if (a >= 1e9) return three(ns / 1e9) + " s";
  if (a >= 1e6) return three(ns / 1e6) + " ms";
  if (a >= 1e3) return three(ns / 1e3) + " µs";
  return three(ns) + " ns";
}

function scaled(x, unit, step = 1000) {
  const names = step === 1024 ? ["", "Ki", "Mi", "Gi", "Ti"] : ["", "k", "M", "G", "T", "P"];
  let i = 0;
  while (Math.abs(x) >= step && i < names.length - 1) { x /= step; i++; }
  return three(x) + " " + names[i] + unit;
}

function bytes(x) { return scaled(x, "B", 1024); }
function percent(x) { return (100 * x).toFixed(1) + " %"; }
function place(i) { const p = DATA.places[i]; return p.file ? `${p.file}:${p.line}` : "no source line"; }

function iteration(i) {
  return Array.from(ROWS.iteration.subarray(ROWS.first[i], ROWS.first[i + 1]));
}

// Everything a reader may want of one row, a line each.
function describe(i) {
  const p = DATA.places[ROWS.place[i]], at = iteration(i), out = [];
  out.push(`${DATA.ops[ROWS.op[i]]}  on ${DATA.lanes[ROWS.lane[i]]}, ${time(ROWS.duration[i])} from ${time(ROWS.start[i])}`);
  if (DATA.texts[ROWS.text[i]]) out.push(DATA.texts[ROWS.text[i]]);
  const facts = [];
  if (ROWS.bytes[i]) facts.push(bytes(ROWS.bytes[i]));
  if (ROWS.flops[i]) facts.push(scaled(ROWS.flops[i], "flop"));
  if (at.length) facts.push(`iteration (${at.join(", ")})`);
  if (ROWS.wait[i] > 0) facts.push(`waited ${time(ROWS.wait[i])}`);
  if (facts.length) out.push(facts.join(", "));
  out.push(p.file ? `${place(ROWS.place[i])}   ${p.text}` : "no source line");
  return out;
}

function element(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
  e.append(...children);
  return e;
}
