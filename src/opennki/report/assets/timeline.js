// The timeline: a lane for each queue, the view [from, to] in ns that all canvases share.
const view = { from: 0, to: TOTAL, selected: -1, place: -1, match: null };
const canvas = document.getElementById("timeline"), overview = document.getElementById("overview"), memory = document.getElementById("memory");
const tip = document.getElementById("tip");
const LABEL = 76, LANE = 22, AXIS = 20, GAP = 3, MEMORY_ROW = 56, LEAST = 1;  // pixels; LEAST: shortest view in ns

function fitted(c, height) {
  const ratio = window.devicePixelRatio || 1, width = c.clientWidth;
  c.style.height = height + "px";
  if (c.width !== Math.round(width * ratio) || c.height !== Math.round(height * ratio)) {
    c.width = Math.round(width * ratio);
    c.height = Math.round(height * ratio);
  }
  const g = c.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, sans-serif";
  g.textBaseline = "middle";
  return [g, width, height];
}

function x_of(ns, width) { return LABEL + (ns - view.from) / (view.to - view.from) * (width - LABEL); }
function ns_of(x, width) { return view.from + (x - LABEL) / (width - LABEL) * (view.to - view.from); }

// First row of a lane that can be visible from `ns` on.
function first_from(lane, ns) {
  let low = lane.first, high = lane.end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ROWS.start[middle] < ns - lane.longest) low = middle + 1; else high = middle;
  }
  return low;
}

function shade(i) { return 0.62 + 0.38 * ((ROWS.op[i] * 7) % 5) / 4; }

function ticks(g, width, height) {
  const span = view.to - view.from, rough = span / Math.max(2, (width - LABEL) / 110);
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 5, 10].map(m => m * power).find(s => s >= rough);
  g.strokeStyle = colour("line");
  g.fillStyle = colour("soft");
  g.beginPath();
  for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
    const x = Math.round(x_of(t, width)) + 0.5;
    g.moveTo(x, AXIS - 4);
    g.lineTo(x, height);
    g.fillText(time(Math.round(t / step) * step), x + 3, AXIS / 2);
  }
  g.stroke();
}

function draw_lane(g, lane, y, width) {
  const base = colour(lane.engine), mark = colour("mark"), picked = view.place >= 0 || view.match !== null;
  const scale = (width - LABEL) / (view.to - view.from);
  let drawn = 0, covered = -1;
  for (let i = first_from(lane, view.from); i < lane.end && ROWS.start[i] < view.to; i++) {
    const x = LABEL + (ROWS.start[i] - view.from) * scale, end = x + ROWS.duration[i] * scale;
    if (end < LABEL) continue;
    const hit = picked && (view.place >= 0 ? ROWS.place[i] === view.place : view.match(i));
    if (end <= covered && !hit) continue;  // inside a pixel that is painted
    const left = Math.max(x, LABEL), w = Math.max(end - left, 0.7);
    g.globalAlpha = picked && !hit ? 0.22 : shade(i);
    g.fillStyle = hit ? mark : base;
    g.fillRect(left, y, w, LANE - GAP);
    if (!hit) covered = Math.ceil(left + w);
    if (w > 40) {
      g.globalAlpha = 1;
      g.fillStyle = colour("bg");
      g.save();
      g.beginPath();
      g.rect(left, y, w - 2, LANE);
      g.clip();
      g.fillText(DATA.ops[ROWS.op[i]], left + 4, y + (LANE - GAP) / 2 + 1);
      g.restore();
    }
    drawn++;
  }
  g.globalAlpha = 1;
  return drawn;
}

function draw_timeline() {
  const height = AXIS + LANES.length * LANE;
  const [g, width] = fitted(canvas, height);
  ticks(g, width, height);
  let drawn = 0;
  LANES.forEach((lane, n) => {
    const y = AXIS + n * LANE;
    drawn += draw_lane(g, lane, y, width);
    g.fillStyle = colour("bg");
    g.fillRect(0, y, LABEL, LANE);
    g.fillStyle = colour("fg");
    g.fillText(lane.name, 6, y + LANE / 2);
  });
  const s = view.selected;
  if (s >= 0) {
    g.strokeStyle = colour("mark");
    g.lineWidth = 2;
    const x = x_of(ROWS.start[s], width), w = ROWS.duration[s] / (view.to - view.from) * (width - LABEL);
    g.strokeRect(Math.max(x, LABEL), AXIS + ROWS.lane[s] * LANE, Math.max(2, w), LANE - GAP);
    g.lineWidth = 1;
    const before = BY_ID.get(ROWS.waits_for[s]);
    if (before !== undefined) {
      g.beginPath();
      g.moveTo(x_of(ROWS.start[before] + ROWS.duration[before], width), AXIS + ROWS.lane[before] * LANE + LANE / 2);
      g.lineTo(x, AXIS + ROWS.lane[s] * LANE + LANE / 2);
      g.stroke();
    }
  }
  canvas.dataset.drawn = drawn;
}

// How busy each lane is, by column: made once.
let busy = null;
function measure(columns) {
  busy = LANES.map(lane => {
    const use = new Float32Array(columns), width = TOTAL / columns;
    for (let i = lane.first; i < lane.end; i++) {
      const start = ROWS.start[i], end = start + ROWS.duration[i];
      for (let c = Math.floor(start / width); c < columns && c * width < end; c++) {
        if (c >= 0) use[c] += (Math.min(end, (c + 1) * width) - Math.max(start, c * width)) / width;
      }
    }
    return use;
  });
}

function draw_overview() {
  const [g, width, height] = fitted(overview, 44), columns = Math.max(1, Math.floor(width - LABEL));
  if (!busy || busy[0].length !== columns) measure(columns);
  const tall = height / LANES.length;
  LANES.forEach((lane, n) => {
    g.fillStyle = colour(lane.engine);
    for (let c = 0; c < columns; c++) {
      if (!busy[n][c]) continue;
      g.globalAlpha = 0.15 + 0.85 * Math.min(1, busy[n][c]);
      g.fillRect(LABEL + c, n * tall, 1, Math.max(1, tall - 0.5));
    }
  });
  g.globalAlpha = 1;
  g.fillStyle = colour("soft");
  g.fillText("whole kernel", 6, height / 2);
  const a = LABEL + view.from / TOTAL * columns, b = LABEL + view.to / TOTAL * columns;
  g.globalAlpha = 0.12;
  g.fillStyle = colour("fg");
  g.fillRect(LABEL, 0, a - LABEL, height);
  g.fillRect(b, 0, width - b, height);
  g.globalAlpha = 1;
  g.strokeStyle = colour("fg");
  g.strokeRect(a + 0.5, 0.5, Math.max(2, b - a - 1), height - 1);
}

function draw_memory() {
  memory.hidden = !MEMORY.length;
  if (!MEMORY.length) return;
  const [g, width] = fitted(memory, MEMORY.length * MEMORY_ROW);
  MEMORY.forEach((part, n) => {
    const top = n * MEMORY_ROW + 6, tall = MEMORY_ROW - 12;
    let most = 0;
    for (const b of part.bytes) most = Math.max(most, b);
    const scale = tall / Math.max(part.capacity, most, 1);
    g.fillStyle = colour(n ? "gpsimd" : "tensor");
    g.globalAlpha = 0.55;
    g.beginPath();
    g.moveTo(LABEL, top + tall);
    let level = 0;
    for (let i = 0; i < part.at.length; i++) {
      const x = Math.min(Math.max(x_of(part.at[i], width), LABEL), width);
      g.lineTo(x, top + tall - level * scale);
      level = part.bytes[i];
      g.lineTo(x, top + tall - level * scale);
    }
    g.lineTo(width, top + tall - level * scale);
    g.lineTo(width, top + tall);
    g.fill();
    g.globalAlpha = 1;
    g.strokeStyle = colour("line");
    g.strokeRect(LABEL + 0.5, top + 0.5, width - LABEL - 1, tall - 1);
    g.fillStyle = colour("fg");
    g.fillText(part.name.toUpperCase(), 6, top + tall / 2 - 7);
    g.fillStyle = colour("soft");
    g.fillText(bytes(most), 6, top + tall / 2 + 7);
    g.fillText(`of ${bytes(part.capacity)} for each partition`, LABEL + 6, top + 8);
  });
}

let waiting = false;
function draw() {
  draw_timeline();
  draw_overview();
  draw_memory();
  document.getElementById("range").textContent = `${time(view.from)} to ${time(view.to)} (${time(view.to - view.from)})`;
}

// Drawing once in each frame, however many events ask for it.
function redraw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

function show(from, to) {
  const span = Math.min(Math.max(to - from, LEAST), TOTAL);
  from = Math.min(Math.max(from, 0), TOTAL - span);
  view.from = from;
  view.to = from + span;
  redraw();
}

function zoom(factor, ns = (view.from + view.to) / 2) {
  show(ns - (ns - view.from) * factor, ns + (view.to - ns) * factor);
}

// The row at a point of the canvas, -1 for none.
function row_at(x, y) {
  const width = canvas.clientWidth, lane = LANES[Math.floor((y - AXIS) / LANE)];
  if (!lane || x < LABEL) return -1;
  const ns = ns_of(x, width), near = 2 * (view.to - view.from) / (width - LABEL);
  let best = -1, distance = near;
  for (let i = first_from(lane, ns - near); i < lane.end && ROWS.start[i] <= ns + near; i++) {
    const end = ROWS.start[i] + ROWS.duration[i];
    const d = ns < ROWS.start[i] ? ROWS.start[i] - ns : ns > end ? ns - end : 0;
    if (d <= distance) { best = i; distance = d; }
  }
  return best;
}

function hover(x, y, client) {
  const i = row_at(x, y);
  tip.hidden = i < 0;
  if (i < 0) return;
  tip.textContent = describe(i).join("\n");
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(client.x + 14, window.innerWidth - box.width - 8) + "px";
  tip.style.top = (client.y + 18 + box.height > window.innerHeight ? client.y - box.height - 10 : client.y + 18) + "px";
}

function select(i) {
  view.selected = i;
  const details = document.getElementById("details");
  details.replaceChildren();
  if (i >= 0) {
    const text = describe(i), p = DATA.places[ROWS.place[i]];
    details.append(element("b", {}, text[0]), element("br"), text.slice(1, -1).join("; "));
    const before = BY_ID.get(ROWS.waits_for[i]);
    if (before !== undefined) {
      const jump = element("button", {}, `waited for ${DATA.ops[ROWS.op[before]]} (${place(ROWS.place[before])})`);
      jump.addEventListener("click", () => { select(before); reveal(before); });
      details.append(" ", jump);
    }
    details.append(element("pre", {}, p.around.map(([n, line]) => `${n === p.line ? ">" : " "} ${n}  ${line}`).join("\n")));
  }
  redraw();
}

function reveal(i) {
  const start = ROWS.start[i], end = start + ROWS.duration[i];
  if (start < view.from || end > view.to) {
    const span = view.to - view.from, middle = (start + end) / 2;
    show(middle - span / 2, middle + span / 2);
  }
}
