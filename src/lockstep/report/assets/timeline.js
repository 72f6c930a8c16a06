"use strict";
// Draws the timeline of one replay, or of two in one picture, from the data of this page. Text from outside enters by
// textContent and fillText only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent).timeline;
  const section = document.getElementById("timeline");
  if (!section || !data.sides.some((side) => side.buckets.tick.length)) return;

  const isPair = data.sides.length > 1;

  const GUTTER = isPair && data.lanes.length ? 110 : 76; // CSS pixels left of every plot, so that they line up
  const MAX_ROW = 20, MIN_ROW = 7; // heights of a request in the chart of requests
  const MAX_TRIANGLES = 80; // more preemptions are drawn as fine lines
  const PAN = 0.2, ZOOM = 0.5;
  const number = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
  const format = (value) => (value == null ? "–" : number.format(value));
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const FONT = "12px system-ui, sans-serif";

  // ---- what is drawn: rows of both units; spans between buckets, in which nothing ran, are zeros
  // at[side][row] is the side's bucket at that row's place, -1 where it did nothing, and -2 after its end


  function rowsOfOne(starts, ends) {
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

  function merged(own) {
    if (own.length === 1) return { x: own[0].x, at: [own[0].at] };
    const x = [...new Set(own.flatMap((rows) => rows.x))].sort((a, b) => a - b);
    const at = own.map((rows) => {
      let place = -1;
      return x.map((value) => {
        while (place + 1 < rows.x.length && rows.x[place + 1] <= value) place++;
        if (place < 0) return -1;
        return value > rows.x[rows.x.length - 1] ? -2 : rows.at[place];
      });
    });
    return { x, at };
  }

  function unitOf(from, to, least) {
    const own = data.sides.map(({ buckets }) => rowsOfOne(buckets[from], buckets[to]));
    return { own, rows: merged(own), least };
  }

  const units = { ticks: unitOf("tick", "end_tick", 1), ms: unitOf("start_ms", "end_ms", 0.001) };
  let unit = data.unit;
  const lastMs = Math.max(...data.sides.map(({ buckets }) => buckets.end_ms[buckets.end_ms.length - 1] || 0));
  const shown = { ticks: { factor: 1, name: "tick", suffix: "" }, ms: lastMs > 20000 ? { factor: 1e-3, name: "seconds", suffix: " s" } : { factor: 1, name: "milliseconds", suffix: " ms" } };
  const place = (value) => (value == null ? "–" : format(value * shown[unit].factor));

  const column = (values, side) => units[unit].rows.at[side].map((index) => (index === -2 ? null : index < 0 ? 0 : values[index]));

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

  function spread(columns, side) {
    const { mean, low, high } = columns;
    return (u, value, series, row) => {
      const at = row == null ? null : units[unit].rows.at[side][row];
      if (at == null || at === -2) return "–";
      if (at < 0) return "0";
      return low && data.sides[side].width > 1 ? `${format(mean[at])} (${format(low[at])} to ${format(high[at])})` : format(mean[at]);
    };
  }

  function line(label, color, columns, side, more) {
    return {
      label: isPair ? `${data.sides[side].name} ${label}` : label, stroke: color, width: 1.5, points: { show: false },
      paths: uPlot.paths.stepped({ align: 1 }), value: spread(columns, side), ...more,
    };
  }

  const hidden = (label) => ({ label, class: "aux", paths: uPlot.paths.stepped({ align: 1 }), points: { show: false }, width: 0 });

  // Limits of both sides, one line where they are the same
  function limitsOf(what, label) {
    const values = data.sides.map(({ capacity }) => capacity[what]);
    if (values.every((value) => value === values[0])) return [{ value: values[0], label }];
    return values.map((value, side) => ({ value, label: `${data.sides[side].name} ${label}` }));
  }

  // A line for each series of each side, and a band around it where it is sampled
  function lineChart({ id, height, series: wanted, has_band: hasBand, has_marks: hasMarks, limit }, colors) {
    const columns = [], series = [], bands = [];
    let greatest = 0;
    data.sides.forEach((side, number) => wanted.forEach(({ label, color, column: name, base }) => {
      const values = side.buckets[name], ink = isPair ? side.name.toLowerCase() : color, fill = colors[`${ink}Fill`];
      const drawn = base ? values.mean.map((value, index) => value + side.buckets[base].mean[index]) : values.mean;
      columns.push(column(drawn, number));
      series.push(line(label, colors[ink], values, number, isPair ? {} : { fill }));
      greatest = Math.max(greatest, ...(hasBand ? values.high : drawn));
      if (!hasBand) return;
      columns.push(column(values.high, number), column(values.low, number));
      series.push(hidden("greatest"), hidden("least"));
      if (side.width > 1) bands.push({ series: [series.length - 1, series.length], fill });
    }));
    return { id, height, data: columns, series, bands, hasMarks, limits: limit ? limitsOf(...limit) : [], greatest };
  }

  function lanesChart(colors) {
    const lanes = data.lanes;
    if (!lanes.length) return null;
    const row = Math.min(MAX_ROW, Math.max(MIN_ROW, Math.floor(420 / lanes.length)));
    const labels = ["queued", "prefill", "decode"];
    const fills = [colors.queued, colors.prefill, colors.running];
    const zeros = units[unit].rows.x.map(() => null);
    return {
      id: "chart-lanes", height: lanes.length * row + 62, isLanes: true, row,
      data: labels.map(() => zeros),
      series: labels.map((label, index) => ({ label, stroke: fills[index], fill: fills[index], points: { show: false }, value: () => "" })),
      bands: [], limits: [], greatest: 1,
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
      ctx.fillStyle = colors.alarm;
      for (const [start, end] of lane.stalls[unit]) {
        const from = u.valToPos(start, "x", true), to = u.valToPos(end, "x", true), thin = Math.max(scale, bar * 0.4);
        ctx.fillRect(from, y + (row * scale - thin) / 2, Math.max(to - from, 1), thin);
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

  function dashed(u, colors, draw) {
    const { ctx } = u, scale = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colors.muted;
    ctx.setLineDash([4 * scale, 4 * scale]);
    ctx.lineWidth = scale;
    ctx.font = `${11 * scale}px system-ui, sans-serif`;
    draw(ctx, scale);
    ctx.restore();
  }

  function drawLimit(u, limit, isLeft, colors) {
    if (!limit.value || limit.value > u.scales.y.max) return;
    dashed(u, colors, (ctx, scale) => {
      const y = Math.round(u.valToPos(limit.value, "y", true)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(u.bbox.left, y);
      ctx.lineTo(u.bbox.left + u.bbox.width, y);
      ctx.stroke();
      ctx.textAlign = isLeft ? "left" : "right";
      ctx.textBaseline = "bottom";
      const x = u.bbox.left + (isLeft ? 4 * scale : u.bbox.width - 4 * scale);
      ctx.fillText(`${limit.label} ${format(limit.value)}`, x, y - 2 * scale);
    });
  }

  function drawMark(u, isFirst, colors) {
    const [min, max] = view.range, value = data.mark[unit];
    if (value < min || value > max) return;
    dashed(u, colors, (ctx, scale) => {
      const x = Math.round(u.valToPos(value, "x", true)) + 0.5, isRight = x > u.bbox.left + u.bbox.width / 2;
      ctx.strokeStyle = ctx.fillStyle = colors.text;
      ctx.beginPath();
      ctx.moveTo(x, u.bbox.top);
      ctx.lineTo(x, u.bbox.top + u.bbox.height);
      ctx.stroke();
      if (!isFirst) return;
      ctx.textAlign = isRight ? "right" : "left";
      ctx.textBaseline = "top";
      ctx.fillText(data.mark.label, x + (isRight ? -5 : 5) * scale, u.bbox.top + 2 * scale);
    });
  }

  function drawPreemptions(u, side, color) {
    const { ctx } = u, scale = devicePixelRatio, { x, at } = units[unit].own[side], [min, max] = view.range, centres = [];
    const marks = data.sides[side].buckets.preempted;
    at.forEach((index, position) => {
      const isLast = position + 1 === at.length; // a repetition, which only ends the line
      if (index < 0 || isLast || !marks[index] || x[position] < min || x[position] > max) return;
      centres.push(u.valToPos(x[position], "x", true));
    });
    const size = (centres.length > MAX_TRIANGLES ? 1 : 4) * scale, height = 7 * scale;
    ctx.save();
    ctx.fillStyle = color;
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
    for (const name of ["queued", "queued-fill", "running", "running-fill", "blocks", "blocks-fill", "prefill", "prefill-fill", "decode", "decode-fill", "a", "a-fill", "b", "b-fill", "text", "muted", "grid", "alarm"]) {
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
        : { ...common, size: GUTTER, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6, 1e7], space: 24, values: (u, splits) => splits.map(format) },
    ];
  }

  function build(chart, colors, isFirst, isLast) {
    const host = document.getElementById(chart.id);
    const plotHost = host.querySelector(".plot"), legendHost = host.querySelector(".legend"), note = host.querySelector(".note");
    const near = chart.limits.map(({ value }) => value).filter((value) => chart.greatest > value / 4);
    const top = Math.max(chart.greatest, ...near);
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
          chart.limits.forEach((limit, number) => drawLimit(u, limit, number > 0, colors)); // lines may lie close
          if (chart.hasMarks) data.sides.forEach((side, number) => drawPreemptions(u, number, isPair ? colors[side.name.toLowerCase()] : colors.alarm));
          if (chart.draw) chart.draw(u);
          if (data.mark) drawMark(u, isFirst, colors);
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
    const charts = [...data.charts.map((chart) => lineChart(chart, colors)), lanesChart(colors)].filter(Boolean);
    charts.forEach((chart, index) => plots.push(build(chart, colors, index === 0, index === charts.length - 1)));
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
