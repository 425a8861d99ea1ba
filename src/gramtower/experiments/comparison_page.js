"use strict";
// Draws the curves of #data into .chart elements; legend buttons hide methods, controls choose the horizontal axis, and
// the pointer reads all curves at one place. No library, no network.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const names = Object.keys(data.methods).filter((name) => data.methods[name].seconds.length);
  const hidden = new Set();
  const state = { x: "seconds", log: true, at: null };
  const SVG = "http://www.w3.org/2000/svg";

  const make = (kind, attributes, parent, text) => {
    const element = document.createElementNS(SVG, kind);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.appendChild(element);
    return element;
  };
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e5)) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  };

  // Points [x, y] of a method; places where y is missing, or not positive on a logarithmic axis, are left out.
  const points = (name, chart) => {
    const method = data.methods[name];
    const ys = chart === "objective"
      ? method.value.map((value) => (value - data.lowest) / Math.abs(data.lowest || 1)) : method.metric;
    return method[state.x].map((x, i) => [x, ys[i]])
      .filter(([x, y]) => y !== null && (!state.log || x > 0) && (chart !== "objective" || y > 0));
  };

  const ticks = (low, high, log, room) => {
    if (!log) {
      const rough = (high - low) / Math.max(2, room);
      const unit = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((f) => f * unit).find((s) => s >= rough);
      const found = [];
      for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-9); k++) found.push(Number((k * step).toPrecision(12)));
      return found;
    }
    const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
    const factors = to - from > 3 || room < 4 ? [1] : [1, 2, 5];
    const found = [];
    for (let k = from; k <= to; k++) for (const f of factors) {
      const tick = f * 10 ** k;
      if (tick >= low * 0.999 && tick <= high * 1.001) found.push(Number(tick.toPrecision(6)));
    }
    return found;
  };

  const extent = (values) => values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);

  const draw = (holder) => {
    const chart = holder.dataset.chart, logY = chart === "objective";
    holder.replaceChildren();
    const width = Math.max(280, holder.clientWidth), height = Math.round(Math.min(440, Math.max(280, width * 0.62)));
    const box = { left: 58, right: width - 12, top: 10, bottom: height - 40 };
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": holder.dataset.label }, holder);
    const curves = names.filter((name) => !hidden.has(name)).map((name) => [name, points(name, chart)])
      .filter(([, line]) => line.length);
    if (!curves.length) { make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "nothing to show"); return; }
    let [x0, x1] = extent(curves.flatMap(([, line]) => line.map((p) => p[0])));
    let [y0, y1] = extent(curves.flatMap(([, line]) => line.map((p) => p[1])));
    if (!state.log) x0 = 0;
    if (x1 <= x0) x1 = x0 * 1.1 + 1e-9;
    if (logY) { y0 = Math.max(data.floor, 0.8 * y0); y1 = 2 * Math.max(...curves.map(([, line]) => line[0][1])); }
    else { y0 = 0; y1 = 1.05 * y1 || 1; }
    const place = (log, low, high, from, to) => log
      ? (v) => from + (Math.log(v / low) / Math.log(high / low)) * (to - from) : (v) => from + ((v - low) / (high - low)) * (to - from);
    const toX = place(state.log, x0, x1, box.left, box.right), toY = place(logY, y0, y1, box.bottom, box.top);
    for (const tick of ticks(x0, x1, state.log, width / 90)) {
      make("line", { x1: toX(tick), x2: toX(tick), y1: box.top, y2: box.bottom, stroke: "#e6e6e6" }, svg);
      make("text", { x: toX(tick), y: box.bottom + 17, "text-anchor": "middle" }, svg, short(tick));
    }
    for (const tick of ticks(y0, y1, logY, height / 60)) {
      make("line", { x1: box.left, x2: box.right, y1: toY(tick), y2: toY(tick), stroke: "#e6e6e6" }, svg);
      make("text", { x: box.left - 7, y: toY(tick) + 4, "text-anchor": "end" }, svg, short(tick));
    }
    make("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, svg,
      state.x === "seconds" ? "seconds of training" : "data passes");
    const id = `clip-${chart}`;
    make("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top },
      make("clipPath", { id }, make("defs", {}, svg)));
    const area = make("g", { "clip-path": `url(#${id})`, fill: "none" }, svg);
    for (const [name, line] of curves) {
      const style = data.methods[name].line;
      const d = line.map(([x, y], i) => `${i ? "L" : "M"}${toX(x).toFixed(1)} ${toY(y).toFixed(1)}`).join("");
      const look = { stroke: style.colour, "stroke-width": style.width, "stroke-dasharray": style.dashes.join(" ") };
      make("path", { d, ...look, "stroke-linejoin": "round", "data-method": name }, area);
      if (line.length < 40) for (const [x, y] of line) make("circle", { cx: toX(x), cy: toY(y), r: 2.2, fill: style.colour }, area);
    }
    make("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, fill: "none", stroke: "#999" }, svg);
    const cursor = make("line", { y1: box.top, y2: box.bottom, stroke: "#444", "stroke-dasharray": "2 2", visibility: "hidden" }, svg);
    const show = () => {
      const inside = state.at !== null && state.at >= x0 && state.at <= x1;
      cursor.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) { cursor.setAttribute("x1", toX(state.at)); cursor.setAttribute("x2", toX(state.at)); }
    };
    holder.show = show;
    show();
    const read = (event) => {
      const bounds = svg.getBoundingClientRect();
      const px = Math.min(box.right, Math.max(box.left, ((event.clientX - bounds.left) / bounds.width) * width));
      const share = (px - box.left) / (box.right - box.left);
      state.at = state.log ? x0 * (x1 / x0) ** share : x0 + share * (x1 - x0);
      readOut();
    };
    svg.addEventListener("pointermove", read);
    svg.addEventListener("pointerdown", read);
  };

  const charts = [...document.querySelectorAll(".chart")];
  const redraw = () => { charts.forEach(draw); readOut(); };

  // The latest record of each method at or before the place of the pointer.
  const readOut = () => {
    for (const holder of charts) if (holder.show) holder.show();
    const unit = state.x === "seconds" ? "s" : "data passes";
    document.getElementById("readout").textContent = state.at === null
      ? "Point at a curve to read all methods there: relative difference, then metric." : `At ${short(state.at)} ${unit}:`;
    for (const name of names) {
      const output = document.querySelector(`output[data-method="${CSS.escape(name)}"]`);
      if (state.at === null) { output.textContent = ""; continue; }
      const last = (chart) => points(name, chart).filter(([x]) => x <= state.at * (1 + 1e-9)).pop();
      const parts = charts.map((holder) => last(holder.dataset.chart)).map((p) => (p ? short(p[1]) : "–"));
      output.textContent = parts.join("  ·  ");
    }
  };

  for (const button of document.querySelectorAll(".keys button")) {
    button.addEventListener("click", () => {
      const name = button.dataset.method;
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      redraw();
    });
  }
  for (const input of document.querySelectorAll("input[name=x]")) {
    input.addEventListener("change", () => { state.x = input.value; state.at = null; redraw(); });
  }
  document.getElementById("log").addEventListener("change", (event) => { state.log = event.target.checked; redraw(); });
  const level = document.getElementById("level");
  const choose = () => {
    for (const part of document.querySelectorAll("[data-level]")) part.hidden = part.dataset.level !== level.value;
  };
  if (level) { level.addEventListener("change", choose); choose(); }
  new ResizeObserver(redraw).observe(document.querySelector(".charts"));
})();
