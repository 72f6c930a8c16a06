"use strict";
// Draws the timeline of a replay from the data of this page. Text from outside enters by textContent and fillText only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const buckets = data.buckets;
  const section = document.getElementById("timeline");
  if (!buckets.tick.length) return;

  const GUTTER = 76; // CSS pixels left of every plot, so that they line up
  const MAX_ROW = 20, MIN_ROW = 7; // heights of a request in the chart of requests
  const MAX_TRIANGLES = 80; // more preemptions are drawn as fine lines
  const PAN = 0.2, ZOOM = 0.5;
  const isSampled = data.width > 1;
  const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
  const format = (value) => (value == null ? "–" : number.format(value));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const FONT = "12px system-ui, sans-serif";

  // ---- what is drawn: rows of both units; spans between buckets, in which nothing ran, are zeros

  function rowsOf(starts, ends) {
    const rows = { x: [], at: [] };
    starts.forEach((start, index) => {
      rows.x.push(start);
      rows.at.push(index);
      const next = index + 1 < starts.length ? starts[index + 1] : null;
      if (next === null) {
        rows.x.push(ends[index]);
        rows.at.push(index);
      } else if (ends[index] < next) {
        rows.x.push(ends[index]);
        rows.at.push(-1);
      }
    });
    return rows;
  }

  const units = {
    ticks: { rows: rowsOf(buckets.tick, buckets.end_tick), least: 1 },
    ms: { rows: rowsOf(buckets.start_ms, buckets.end_ms), least: 0.001 },
  };
  let unit = data.unit;
  const lastMs = buckets.end_ms[buckets.end_ms.length - 1];
  const shown = { ticks: { factor: 1, name: "tick", suffix: "" }, ms: lastMs > 20000 ? { factor: 1e-3, name: "seconds", suffix: " s" } : { factor: 1, name: "milliseconds", suffix: " ms" } };
  const place = (value) => (value == null ? "–" : format(value * shown[unit].factor));

  const column = (values) => units[unit].rows.at.map((index) => (index < 0 ? 0 : values[index]));

  // ---- the visible range, common to all charts

  const plots = [];
  const view = {
    full: [0, 1],
    range: [0, 1],
    set(min, max) {
      const [first, last] = this.full;
      const width = Math.min(Math.max(max - min, Math.min(units[unit].least, last - first)), last - first);
      const start = Math.min(Math.max(min, first), last - width);
      this.range = [start, start + width];
      for (const plot of plots) plot.setScale("x", { min: start, max: start + width });
      this.tell();
    },
    pan(share) {
      const [min, max] = this.range;
      this.set(min + share * (max - min), max + share * (max - min));
    },
    zoom(factor) {
      const [min, max] = this.range, middle = (min + max) / 2, half = ((max - min) * factor) / 2;
      this.set(middle - half, middle + half);
    },
    reset() {
      this.set(this.full[0], this.full[1]);
    },
    tell() {
      const [min, max] = this.range, [first, last] = this.full, { name, suffix } = shown[unit];
      const isFull = min === first && max === last, what = unit === "ms" ? "time" : name;
      const text = `${what} ${place(min)} to ${place(max)}${suffix}`;
      document.getElementById("range").textContent = isFull ? `all: ${text}` : `${text} of ${place(last)}${suffix}`;
    },
  };

  // ---- the charts

  function spread(mean, low, high) {
    return (u, value, series, index) => {
      const at = index == null ? null : units[unit].rows.at[index];
      if (at == null) return "–";
      if (at < 0) return "0";
      return isSampled ? `${format(mean[at])} (${format(low[at])} to ${format(high[at])})` : format(mean[at]);
    };
  }

  function line(label, color, columns, more) {
    return {
      label, stroke: color, width: 1.5, points: { show: false },
      paths: uPlot.paths.stepped({ align: 1 }),
      value: spread(columns.mean, columns.low, columns.high), ...more,
    };
  }

  const hidden = (label) => ({ label, class: "aux", paths: uPlot.paths.stepped({ align: 1 }), points: { show: false }, width: 0 });

  function gauge(id, height, label, name, colors, more) {
    const columns = buckets[name], fill = colors[`${more.color}Fill`];
    return {
      id, height,
      data: [column(columns.mean), column(columns.high), column(columns.low)],
      series: [line(label, colors[more.color], columns, { fill }), hidden("greatest"), hidden("least")],
      bands: isSampled ? [{ series: [2, 3], fill }] : [],
      greatest: Math.max(...columns.high), ...more,
    };
  }

  const queueChart = (colors) => gauge("chart-queue", 110, "queued", "queued", colors, { color: "queued", limit: null });

  const runningChart = (colors) => gauge("chart-running", 130, "running", "running", colors, {
    color: "running", limit: data.capacity.seqs, limitLabel: "max_num_seqs",
  });

  const blocksChart = (colors) => gauge("chart-blocks", 140, "held", "blocks", colors, {
    color: "blocks", limit: data.capacity.blocks, limitLabel: "capacity", marks: buckets.preempted,
  });

  function batchChart(colors) {
    const { prefill, decode } = buckets;
    const both = prefill.mean.map((value, index) => value + decode.mean[index]);
    return {
      id: "chart-batch", height: 150,
      data: [column(both), column(decode.mean)],
      series: [
        line("prefill tokens", colors.prefill, prefill, { fill: colors.prefillFill }),
        line("decode tokens", colors.running, decode, { fill: colors.decodeFill }),
      ],
      bands: [], limit: data.capacity.tokens, limitLabel: "max_num_batched_tokens", greatest: Math.max(...both),
    };
  }

  function lanesChart(colors) {
    const lanes = data.lanes;
    if (!lanes.length) return null;
    const row = Math.min(MAX_ROW, Math.max(MIN_ROW, Math.floor(420 / lanes.length)));
    const labels = ["queued", "prefill", "decode"];
    const fills = [colors.queued, colors.prefill, colors.running];
    const zeros = column(buckets.queued.mean).map(() => null);
    return {
      id: "chart-lanes", height: lanes.length * row + 62, isLanes: true, row,
      data: labels.map(() => zeros),
      series: labels.map((label, index) => ({ label, stroke: fills[index], fill: fills[index], points: { show: false }, value: () => "" })),
      bands: [], limit: null, greatest: 1,
      draw: (u) => drawLanes(u, lanes, row, fills, colors),
      hover: (u) => {
        const at = u.cursor.top == null || u.cursor.top < 0 ? -1 : Math.floor(u.cursor.top / row);
        return at >= 0 && at < lanes.length ? describe(lanes[at]) : "";
      },
    };
  }

  function describe(lane) {
    const borders = lane[unit], names = ["queued", "prefill", "decode"], parts = [];
    for (let phase = 0; phase < 3; phase++) {
      if (borders[phase] !== null && borders[phase + 1] !== null) {
        parts.push(`${names[phase]} ${format(borders[phase + 1] - borders[phase])}`);
      }
    }
    return `${lane.name}: ${parts.join(", ")} ${unit === "ms" ? "ms" : "ticks"}; ${lane.text}`;
  }

  function drawLanes(u, lanes, row, fills, colors) {
    const { ctx } = u, scale = devicePixelRatio, { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.font = `${Math.min(12, row - 3) * scale}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    lanes.forEach((lane, index) => {
      const middle = top + (index + 0.5) * row * scale;
      if (row >= 11) {
        ctx.fillStyle = colors.muted;
        ctx.fillText(clip(ctx, lane.name, (GUTTER - 14) * scale), left - 8 * scale, middle);
      }
    });
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    lanes.forEach((lane, index) => {
      const borders = lane[unit], y = top + index * row * scale, bar = Math.max(2, row - (row > 10 ? 6 : 2)) * scale;
      for (let phase = 0; phase < 3; phase++) {
        const start = borders[phase], end = borders[phase + 1];
        if (start === null || end === null || end <= start) continue;
        const from = u.valToPos(start, "x", true), to = u.valToPos(end, "x", true);
        const height = phase === 0 ? bar * 0.4 : bar;
        ctx.fillStyle = fills[phase];
        ctx.fillRect(from, y + (row * scale - height) / 2, Math.max(to - from - (phase === 2 ? 0 : 1), 1), height);
      }
    });
    ctx.restore();
  }

  function clip(ctx, text, width) {
    if (ctx.measureText(text).width <= width) return text;
    let length = text.length;
    while (length > 1 && ctx.measureText(`${text.slice(0, length)}…`).width > width) length--;
    return `${text.slice(0, length)}…`;
  }

  function drawLimit(u, chart, colors) {
    if (!chart.limit || chart.limit > u.scales.y.max) return;
    const { ctx } = u, scale = devicePixelRatio, y = Math.round(u.valToPos(chart.limit, "y", true)) + 0.5;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colors.muted;
    ctx.setLineDash([4 * scale, 4 * scale]);
    ctx.lineWidth = scale;
    ctx.beginPath();
    ctx.moveTo(u.bbox.left, y);
    ctx.lineTo(u.bbox.left + u.bbox.width, y);
    ctx.stroke();
    ctx.font = `${11 * scale}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "bottom";
    ctx.fillText(`${chart.limitLabel} ${format(chart.limit)}`, u.bbox.left + u.bbox.width - 4 * scale, y - 2 * scale);
    ctx.restore();
  }

  function drawMarks(u, marks, colors) {
    const { ctx } = u, scale = devicePixelRatio, { x, at } = units[unit].rows, [min, max] = view.range, centres = [];
    at.forEach((index, position) => {
      const isLast = position + 1 === at.length; // a repetition, which only ends the line
      if (index < 0 || isLast || !marks[index] || x[position] < min || x[position] > max) return;
      centres.push(u.valToPos(x[position], "x", true));
    });
    const size = (centres.length > MAX_TRIANGLES ? 1 : 4) * scale, height = 7 * scale;
    ctx.save();
    ctx.fillStyle = colors.alarm;
    ctx.globalAlpha = centres.length > MAX_TRIANGLES ? 0.55 : 1;
    ctx.beginPath();
    for (const centre of centres) {
      ctx.moveTo(centre - size, u.bbox.top - height);
      ctx.lineTo(centre + size, u.bbox.top - height);
      ctx.lineTo(centre, u.bbox.top);
    }
    ctx.fill();
    ctx.restore();
  }

  function palette() {
    const colors = {};
    for (const name of ["queued", "queued-fill", "running", "running-fill", "blocks", "blocks-fill", "prefill", "prefill-fill", "decode-fill", "muted", "grid", "alarm"]) {
      colors[name.replace(/-f/, "F")] = css(`--${name}`);
    }
    return colors;
  }

  function pannable(u, target, handler) {
    return (event) => {
      if (!event.shiftKey) return handler(event);
      const startX = event.clientX, [min, max] = view.range, perPixel = (max - min) / u.over.clientWidth;
      const move = (later) => view.set(min - (later.clientX - startX) * perPixel, max - (later.clientX - startX) * perPixel);
      const end = () => {
        removeEventListener("mousemove", move);
        removeEventListener("mouseup", end);
      };
      addEventListener("mousemove", move);
      addEventListener("mouseup", end);
      event.preventDefault();
      return null;
    };
  }

  function axes(chart, colors, isLast) {
    const common = { stroke: colors.muted, font: FONT, grid: { stroke: colors.grid, width: 1 }, ticks: { show: false } };
    const whole = units[unit] === units.ticks ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7, 1e8] } : {};
    return [
      { ...common, ...whole, size: 30, values: (u, splits) => splits.map(place), label: isLast ? shown[unit].name : undefined, labelFont: FONT, labelSize: 18 },
      chart.isLanes ? { ...common, size: GUTTER, grid: { show: false }, values: (u, splits) => splits.map(() => "") }
        : { ...common, size: GUTTER, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7], space: 32, values: (u, splits) => splits.map(format) },
    ];
  }

  function build(chart, colors, isLast) {
    const host = document.getElementById(chart.id);
    const plotHost = host.querySelector(".plot"), legendHost = host.querySelector(".legend"), note = host.querySelector(".note");
    const top = chart.limit && chart.greatest > chart.limit / 4 ? Math.max(chart.limit, chart.greatest) : chart.greatest;
    const options = {
      width: plotHost.clientWidth, height: chart.height, padding: [14, 8, 0, 0],
      scales: { x: { time: false, range: (u, min, max) => [min, max] }, y: { range: [0, Math.max(top * 1.08, 1)] } },
      series: [{ label: unit === "ms" ? "ms" : "tick", value: (u, value) => format(value) }, ...chart.series],
      bands: chart.bands,
      axes: axes(chart, colors, isLast),
      legend: { live: !chart.isLanes, mount: (u, element) => legendHost.replaceChildren(element) },
      cursor: {
        drag: { x: true, y: false, setScale: false },
        sync: { key: "replay", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        y: Boolean(chart.isLanes), points: { show: false },
        bind: { dblclick: () => () => (view.reset(), null), mousedown: pannable },
      },
      hooks: {
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width < 2) return;
          const from = u.posToVal(left, "x"), to = u.posToVal(left + width, "x");
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          view.set(from, to);
        }],
        draw: [(u) => {
          drawLimit(u, chart, colors);
          if (chart.marks) drawMarks(u, chart.marks, colors);
          if (chart.draw) chart.draw(u);
        }],
        setCursor: chart.hover ? [(u) => { note.textContent = chart.hover(u); }] : [],
      },
    };
    return new uPlot(options, [units[unit].rows.x, ...chart.data], plotHost);
  }

  function rebuild(range) {
    for (const plot of plots.splice(0)) plot.destroy();
    const colors = palette(), { x } = units[unit].rows;
    view.full = [x[0], x[x.length - 1] > x[0] ? x[x.length - 1] : x[0] + units[unit].least];
    const charts = [queueChart, runningChart, blocksChart, batchChart, lanesChart].map((make) => make(colors)).filter(Boolean);
    charts.forEach((chart, index) => plots.push(build(chart, colors, index === charts.length - 1)));
    view.set(...(range || view.full));
  }

  // ---- hands: keys, buttons, unit, size, colours

  const actions = {
    "zoom-in": () => view.zoom(ZOOM), "zoom-out": () => view.zoom(1 / ZOOM),
    left: () => view.pan(-PAN), right: () => view.pan(PAN), reset: () => view.reset(),
  };
  const keys = { "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", ArrowLeft: "left", ArrowRight: "right", 0: "reset", Home: "reset" };

  section.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input")) return;
    actions[action]();
    event.preventDefault();
  });
  section.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-action]");
    if (button) actions[button.dataset.action]();
  });
  for (const radio of section.querySelectorAll("input[name=unit]")) {
    radio.checked = radio.value === unit;
    radio.addEventListener("change", () => {
      unit = radio.value;
      rebuild();
    });
  }
  let pending = 0;
  new ResizeObserver(() => {
    cancelAnimationFrame(pending);
    pending = requestAnimationFrame(() => {
      for (const plot of plots) plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height });
    });
  }).observe(section);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => rebuild(view.range));
  rebuild();
})();
