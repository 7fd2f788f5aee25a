// Tables and the roofline.
function row(tag, cells, numeric = 1) {
  return element("tr", {}, ...cells.map((c, n) => element(tag, n >= numeric ? { class: "n" } : {}, c)));
}

function meter(parts) {
  const m = element("div", { class: "meter" });
  for (const [share, name, title] of parts) m.append(element("i", { style: `width:${100 * share}%;background:var(--${name})`, title }));
  return m;
}

function cards() {
  const d = DATA, r = d.roofline, out = document.getElementById("cards");
  const add = (value, text) => out.append(element("div", { class: "card" }, element("b", {}, value), element("span", {}, text)));
  document.getElementById("title").textContent = `${d.kernel} on ${d.target}`;
  document.getElementById("estimate").textContent = d.estimate;
  add(time(d.latency_us * 1e3), `latency, ${time(d.launch_us * 1e3)} of it launch`);
  add(d.bound_by, "bounds it");
  add(bytes(d.metrics.hbm_read_bytes), "read from HBM");
  add(bytes(d.metrics.hbm_write_bytes), "written to HBM");
  add(scaled(d.metrics.model_flops, "flop"), "of matrix products");
  add(scaled(r.attained, "flop/s"), `attained, of ${scaled(r.peak, "flop/s")}`);
  add(String(d.instructions), "instructions executed");
  const notes = [...d.warnings];
  if (d.truncated) notes.push(`${d.truncated} further instructions are not drawn: the record was limited.`);
  if (d.simulated < d.instructions) notes.push(`${d.simulated} instructions were simulated one by one, the others in steady states of loops.`);
  if (d.programs > 1) notes.push(`Program (${d.program.join(", ")}) of ${d.programs} on ${d.cores} core${d.cores > 1 ? "s" : ""}.`);
  document.getElementById("notes").textContent = notes.join(" ");
}

function engines() {
  const out = document.getElementById("engines");
  out.append(row("th", ["engine", "", "busy", "of the time", "waiting", "instructions"], 2));
  for (const name of ENGINES) {
    const use = DATA.engines[name];
    if (!use) continue;
    const r = row("td", [name, meter([[Math.min(1, use.active), name, percent(use.active)]]), time(use.busy_ns), percent(use.active),
      time(use.wait_ns), String(use.instructions)], 2);
    out.append(r);
  }
}

function bounds() {
  const out = document.getElementById("bounds");
  out.append(row("th", ["resource", "", "needs at least", "of the latency"], 2));
  for (const [name, ns] of Object.entries(DATA.bounds).sort((a, b) => b[1] - a[1])) {
    const engine = ENGINES.includes(name) ? name : "dma", share = Math.min(1, ns / TOTAL);
    out.append(row("td", [name === DATA.bound_by ? element("b", {}, name) : name, meter([[share, engine, percent(share)]]), time(ns), percent(share)], 2));
  }
}

function lines() {
  const out = document.getElementById("lines"), most = Math.max(...DATA.lines.map(l => Object.values(l.busy_ns).reduce((a, b) => a + b, 0)), 1e-9);
  out.append(row("th", ["line", "source", "busy, by engine", "critical", "of the latency", "instructions", "HBM"], 3));
  for (const l of DATA.lines.slice(0, 200)) {
    const p = DATA.places[l.place];
    const parts = ENGINES.filter(e => l.busy_ns[e]).map(e => [l.busy_ns[e] / most, e, `${e}: ${time(l.busy_ns[e])}`]);
    const r = row("td", [element("code", { class: "one" }, place(l.place)), element("code", {}, p.text), meter(parts), time(l.critical_ns),
      percent(l.critical_ns / TOTAL), String(l.instructions), l.hbm_bytes ? bytes(l.hbm_bytes) : ""], 3);
    r.className = "pick";
    r.tabIndex = 0;
    const pick = () => {
      view.place = view.place === l.place ? -1 : l.place;
      view.match = null;
      for (const other of out.querySelectorAll("tr")) other.classList.remove("on");
      if (view.place >= 0) r.classList.add("on");
      redraw();
    };
    r.addEventListener("click", pick);
    r.addEventListener("keydown", e => { if (e.key === "Enter" || e.key === " ") { pick(); e.preventDefault(); } });
    out.append(r);
  }
  if (DATA.lines.length > 200) out.append(row("td", [`and ${DATA.lines.length - 200} more`]));
}

function metrics() {
  const out = document.getElementById("metrics");
  for (const [name, value] of Object.entries(DATA.metrics)) out.append(row("td", [element("code", {}, name), Number(value.toPrecision(6)).toString()]));
}

// Operations per byte against operations per second, both logarithmic.
function roofline() {
  const r = DATA.roofline, W = 480, H = 260, left = 58, bottom = 34, top = 12, right = 14;
  const ridge = r.peak / r.bandwidth, known = r.intensity > 0 && r.attained > 0;
  const xs = [Math.min(ridge / 64, known ? r.intensity / 4 : ridge), Math.max(ridge * 16, known ? r.intensity * 4 : 0)].map(Math.log10);
  const ys = [Math.min(r.peak / 1e4, known ? r.attained / 4 : r.peak), r.peak * 3].map(Math.log10);
  const X = v => left + (Math.log10(v) - xs[0]) / (xs[1] - xs[0]) * (W - left - right);
  const Y = v => H - bottom - (Math.log10(v) - ys[0]) / (ys[1] - ys[0]) * (H - bottom - top);
  const part = (name, attributes, text) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) e.setAttribute(key, value);
    if (text !== undefined) e.textContent = text;
    return e;
  };
  const svg = part("svg", { viewBox: `0 0 ${W} ${H}`, width: W, "max-width": "100%", role: "img", "aria-label": "Roofline" });
  for (let p = Math.ceil(xs[0]); p <= xs[1]; p++) {
    const x = X(10 ** p);
    svg.append(part("line", { x1: x, x2: x, y1: top, y2: H - bottom, stroke: "var(--line)" }),
      part("text", { x, y: H - bottom + 14, "text-anchor": "middle" }, three(10 ** p)));
  }
  for (let p = Math.ceil(ys[0]); p <= ys[1]; p++) {
    const y = Y(10 ** p);
    svg.append(part("line", { x1: left, x2: W - right, y1: y, y2: y, stroke: "var(--line)" }),
      part("text", { x: left - 5, y: y + 4, "text-anchor": "end" }, scaled(10 ** p, "")));
  }
  const low = Math.max(10 ** xs[0], 10 ** ys[0] / r.bandwidth);
  svg.append(part("polyline", { points: [[X(low), Y(low * r.bandwidth)], [X(ridge), Y(r.peak)], [W - right, Y(r.peak)]].map(p => p.join(",")).join(" "),
    fill: "none", stroke: "var(--fg)", "stroke-width": 2 }));
  if (known) {
    const ceiling = Math.min(r.peak, r.intensity * r.bandwidth);
    svg.append(part("line", { x1: X(r.intensity), x2: X(r.intensity), y1: Y(r.attained), y2: Y(ceiling), stroke: "var(--mark)", "stroke-dasharray": "3 3" }),
      part("circle", { cx: X(r.intensity), cy: Y(r.attained), r: 5, fill: "var(--mark)" }),
      part("text", { x: X(r.intensity) + 8, y: Y(r.attained) + 14 }, `${percent(r.attained / ceiling)} of what its intensity allows`));
  }
  svg.append(part("text", { x: (left + W) / 2, y: H - 4, "text-anchor": "middle" }, "operations per HBM byte"),
    part("text", { x: left, y: 9 }, "operations per second"));
  document.getElementById("roofline").append(svg);
}
