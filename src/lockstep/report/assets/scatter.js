"use strict";
// Draws candidates as points of two figures, and sorts their table. Text from outside enters by textContent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent).scatter;
  const table = document.querySelector("button.sort").closest("table");
  const host = document.getElementById("plot");
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 380, LEFT = 84, RIGHT = 18, TOP = 16, BOTTOM = 52, RADIUS = 5;
  const LOG_FROM = 30; // the greatest by the least
  const number = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 5 });

  function make(parent, name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  // Round steps between two values, about so many
  function ticks(low, high, count) {
    const raw = (high - low || Math.abs(high) || 1) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, index) => (first + index) * step);
  }

  // Values whose greatest is many times their least are laid out by their logarithms
  function scaleOf(values, from, to, count) {
    const low = Math.min(...values), high = Math.max(...values), isLog = low > 0 && high / low > LOG_FROM;
    const turn = isLog ? Math.log10 : (value) => value;
    const room = (turn(high) - turn(low) || Math.abs(turn(high)) || 1) * 0.06;
    const least = isLog || low < 0 ? turn(low) - room : Math.max(0, low - room), most = turn(high) + room;
    const place = (value) => from + ((turn(value) - least) / (most - least)) * (to - from);
    return { place, isLog, ticks: isLog ? logTicks(10 ** least, 10 ** most) : ticks(least, most, count) };
  }

  function logTicks(low, high) {
    const powers = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, index) => 10 ** (Math.floor(Math.log10(low)) + index));
    return powers.flatMap((power) => (powers.length > 4 ? [power] : [power, 2 * power, 5 * power])).filter((value) => value >= low && value <= high);
  }

  // Points that no other is as good as in both and better in one, from left to right
  function front(points, better) {
    const turned = (point) => [better.x === "more" ? -point.x : point.x, better.y === "more" ? -point.y : point.y];
    const isBeaten = (point) => {
      const [x, y] = turned(point);
      return points.some((other) => {
        const [otherX, otherY] = turned(other);
        return otherX <= x && otherY <= y && (otherX < x || otherY < y);
      });
    };
    return points.filter((point) => !isBeaten(point)).sort((a, b) => a.x - b.x || a.y - b.y);
  }

  const axes = { x: document.getElementById("axis-x"), y: document.getElementById("axis-y") };
  let points = [], chosen = null;

  function draw() {
    const metrics = { x: data.metrics[axes.x.value], y: data.metrics[axes.y.value] };
    points = data.rows
      .map((row, index) => ({ row, index, x: row.figures[axes.x.value], y: row.figures[axes.y.value] }))
      .filter(({ x, y }) => x !== undefined && y !== undefined)
      .sort((a, b) => a.x - b.x || a.y - b.y);
    const width = host.clientWidth || 900;
    host.replaceChildren();
    const svg = make(host, "svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${metrics.y.label} over ${metrics.x.label}` });
    if (!points.length) return;
    const across = scaleOf(points.map(({ x }) => x), LEFT, width - RIGHT, Math.max(3, Math.floor(width / 130)));
    const up = scaleOf(points.map(({ y }) => y), HEIGHT - BOTTOM, TOP, 6);
    const toX = across.place, toY = up.place;
    for (const value of across.ticks) {
      make(svg, "line", { class: "grid", x1: toX(value), x2: toX(value), y1: TOP, y2: HEIGHT - BOTTOM });
      make(svg, "text", { class: "axis", x: toX(value), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, number.format(value));
    }
    for (const value of up.ticks) {
      make(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: toY(value), y2: toY(value) });
      make(svg, "text", { class: "axis", x: LEFT - 8, y: toY(value) + 4, "text-anchor": "end" }, number.format(value));
    }
    make(svg, "text", { class: "name", x: LEFT + (width - LEFT - RIGHT) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, nameOf(metrics.x, across));
    make(svg, "text", { class: "name", x: -(TOP + (HEIGHT - TOP - BOTTOM) / 2), y: 14, transform: "rotate(-90)", "text-anchor": "middle" }, nameOf(metrics.y, up));
    const best = front(points, { x: metrics.x.better, y: metrics.y.better }), isBest = new Set(best);
    const corner = metrics.x.better === "less";
    // Between two of the front one gets no further than a step, which hugs the points behind it
    const path = best.map(({ x, y }, index) => {
      const [px, py] = [toX(x), toY(y)];
      if (!index) return `M${px},${py}`;
      return corner ? `H${px}V${py}` : `V${py}H${px}`;
    });
    make(svg, "path", { class: "front-line", d: path.join("") });
    for (const point of points) {
      const at = { cx: toX(point.x), cy: toY(point.y) };
      if (point.row.is_chosen) make(svg, "circle", { class: "ring", ...at, r: RADIUS + 5 });
      point.mark = make(svg, "circle", { class: isBest.has(point) ? "point front" : "point", ...at, r: RADIUS });
      make(point.mark, "title", {}, `${point.row.label}\n${told(point)}`);
      point.mark.addEventListener("mouseenter", () => choose(point));
      point.at = at;
    }
    if (chosen !== null) choose(points.find(({ index }) => index === chosen) || null);
  }

  const nameOf = ({ label, better }, { isLog }) => `${label}, ${better} is better${isLog ? " (logarithmic)" : ""}`;
  const told = ({ x, y }) => `${data.metrics[axes.x.value].label} ${number.format(x)}, ${data.metrics[axes.y.value].label} ${number.format(y)}`;

  function choose(point) {
    for (const other of points) other.mark.classList.toggle("chosen", other === point);
    for (const row of table.tBodies[0].rows) row.classList.toggle("chosen", point !== null && Number(row.dataset.row) === point.index);
    chosen = point === null ? null : point.index;
    document.getElementById("told").textContent = point === null ? "" : `${point.row.label}: ${told(point)}`;
  }

  function step(event) {
    const at = points.findIndex(({ index }) => index === chosen), last = points.length - 1;
    const next = { ArrowRight: Math.min(at + 1, last), ArrowLeft: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    choose(points[next]);
    event.preventDefault();
  }

  function sort(button) {
    const column = Number(button.dataset.column), head = button.closest("th");
    const isDown = head.getAttribute("aria-sort") === "ascending", sign = isDown ? -1 : 1;
    for (const other of table.tHead.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const valueOf = (row) => (row.cells[column] && row.cells[column].dataset.value) || "";
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      const [x, y] = [valueOf(a), valueOf(b)];
      if (x === "" || y === "") return (x === "") - (y === "") || a.dataset.row - b.dataset.row; // what has none is last
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return sign * order || a.dataset.row - b.dataset.row;
    });
    table.tBodies[0].append(...rows);
  }

  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button.sort");
    if (button) sort(button);
  });
  if (!host) return;
  for (const select of Object.values(axes)) select.addEventListener("change", draw);
  host.addEventListener("keydown", step);
  table.tBodies[0].addEventListener("mouseover", (event) => {
    const row = event.target.closest("tr");
    const point = row && points.find(({ index }) => index === Number(row.dataset.row));
    if (point) choose(point);
  });
  let pending = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(draw);
  }).observe(host);
  draw();
})();
