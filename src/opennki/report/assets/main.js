// Events, and the first drawing. The address may name a part: #t=FROM,TO (ns), #id=ROW, #find=TEXT.
function follow_address() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const part = (wanted.get("t") || "").split(",").map(Number);
  if (part.length === 2 && part.every(Number.isFinite)) show(part[0], part[1]);
  const found = BY_ID.get(Number(wanted.get("id") ?? -1));
  if (found !== undefined) { select(found); reveal(found); }
  if (wanted.has("find")) { document.getElementById("find").value = wanted.get("find"); find(wanted.get("find")); }
}

function find(text) {
  const wanted = text.trim().toLowerCase();
  view.place = -1;
  if (!wanted) {
    view.match = null;
  } else {
    const ops = DATA.ops.map(o => o.toLowerCase().includes(wanted)), texts = DATA.texts.map(t => t.toLowerCase().includes(wanted));
    const places = DATA.places.map((p, i) => place(i).toLowerCase().includes(wanted) || p.text.toLowerCase().includes(wanted));
    view.match = i => ops[ROWS.op[i]] || texts[ROWS.text[i]] || places[ROWS.place[i]];
  }
  redraw();
}

document.getElementById("in").addEventListener("click", () => zoom(0.5));
document.getElementById("out").addEventListener("click", () => zoom(2));
document.getElementById("fit").addEventListener("click", () => show(0, TOTAL));
document.getElementById("find").addEventListener("input", e => find(e.target.value));

let drag = null;
canvas.addEventListener("wheel", e => {
  e.preventDefault();
  if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
    const move = (e.deltaX || e.deltaY) / canvas.clientWidth * (view.to - view.from);
    show(view.from + move, view.to + move);
  } else {
    zoom(Math.exp(e.deltaY * 0.0015), ns_of(Math.max(e.offsetX, LABEL), canvas.clientWidth));
  }
}, { passive: false });
canvas.addEventListener("pointerdown", e => {
  drag = { x: e.offsetX, from: view.from, to: view.to, moved: false };
  canvas.setPointerCapture(e.pointerId);
  canvas.classList.add("moving");
});
canvas.addEventListener("pointermove", e => {
  if (!drag) return hover(e.offsetX, e.offsetY, { x: e.clientX, y: e.clientY });
  const move = (drag.x - e.offsetX) / (canvas.clientWidth - LABEL) * (drag.to - drag.from);
  if (Math.abs(drag.x - e.offsetX) > 3) drag.moved = true;
  tip.hidden = true;
  if (drag.moved) show(drag.from + move, drag.to + move);
});
canvas.addEventListener("pointerup", e => {
  if (drag && !drag.moved) select(row_at(e.offsetX, e.offsetY));
  drag = null;
  canvas.classList.remove("moving");
});
canvas.addEventListener("pointerleave", () => { tip.hidden = true; });

function overview_to(e) {
  const ns = (e.offsetX - LABEL) / (overview.clientWidth - LABEL) * TOTAL;
  if (overview.start === undefined) return;
  const a = Math.min(overview.start, ns), b = Math.max(overview.start, ns);
  if (b - a > TOTAL / 200) show(a, b);
}
overview.addEventListener("pointerdown", e => {
  overview.start = (e.offsetX - LABEL) / (overview.clientWidth - LABEL) * TOTAL;
  overview.setPointerCapture(e.pointerId);
});
overview.addEventListener("pointermove", overview_to);
overview.addEventListener("pointerup", e => {
  const span = view.to - view.from, ns = (e.offsetX - LABEL) / (overview.clientWidth - LABEL) * TOTAL;
  if (Math.abs(ns - overview.start) <= TOTAL / 200) show(ns - span / 2, ns + span / 2);
  overview.start = undefined;
});
document.addEventListener("keydown", e => {
  if (e.target.tagName === "INPUT") return;
  const span = view.to - view.from, move = { a: -1, d: 1, ArrowLeft: -1, ArrowRight: 1 }[e.key];
  if (move) show(view.from + move * span / 6, view.to + move * span / 6);
  else if (e.key === "w" || e.key === "+") zoom(0.6);
  else if (e.key === "s" || e.key === "-") zoom(1 / 0.6);
  else if (e.key === "f") show(0, TOTAL);
  else if (e.key === "Escape") { view.place = -1; view.match = null; select(-1); }
});
window.addEventListener("resize", redraw);
window.addEventListener("hashchange", follow_address);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

cards();
engines();
bounds();
lines();
metrics();
roofline();
follow_address();
// At once: a page that is loaded without a screen (a test, a printer) may never be given a frame.
draw();
document.body.dataset.ready = "yes";
// for measurements: when the first paint was
requestAnimationFrame(() => requestAnimationFrame(() => { document.body.dataset.paint = Math.round(performance.now()); }));
