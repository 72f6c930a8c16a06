"use strict";
/* The page asks this server alone. Everything that comes from it is put into the page as text, never as markup. */

const POLL_MS = 2000, METRICS_S = 5.5, WINDOW = 150,  /* metrics are the dearest answer: some 7 ms */
  RECENT_S = 30, MAX_STEPS = 600, MAX_EVENTS = 200, MAX_TALK = 100;
const byId = (id) => document.getElementById(id);
let apiKey = "";  /* in memory only */
let cluster = null;

function make(tag, props, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, props);
  node.append(...children);
  return node;
}
function setText(node, text) { if (node.textContent !== text) node.textContent = text; }

const whole = new Intl.NumberFormat("en");
const count = (value) => value === null || value === undefined ? "–" : whole.format(Math.round(value));
const rate = (value) => value === null || !isFinite(value) ? "–" : value >= 100 ? count(value) : value.toFixed(1);
const percent = (value) => value === null || !isFinite(value) ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
function bytes(value) {
  if (value === null || value === undefined) return "no bound";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${value >= 100 || at === 0 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}
function seconds(value) {
  if (value === null || value === undefined || !isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${Math.round(value / 3600)} h`;
}
const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

/* -- asking ------------------------------------------------------------------------------------------------------- */

class Refused extends Error {
  constructor(status, body) { super(body?.error?.message ?? `status ${status}`); this.status = status; this.body = body; }
}
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  if (response.status === 401 || response.status === 403) byId("key").hidden = false;
  throw new Refused(response.status, await response.json().catch(() => null));
}
function live(text, kind) {
  const chip = byId("live");
  setText(chip, text);
  chip.className = `chip ${kind}`;
}
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key").querySelector("input");
  apiKey = field.value;
  field.value = "";
  byId("key").hidden = true;
  restart();
});

/* -- metrics ------------------------------------------------------------------------------------------------------ */

const KNOWN = new Set([
  "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total", "prompt_tokens_total",
  "prefix_cache_queries_total", "prefix_cache_hits_total", "time_to_first_token_seconds_bucket",
  "kv_store_bytes", "kv_store_budget_bytes", "kv_store_blocks", "kv_store_loaded_total", "kv_store_rejected_total",
]);
function parseMetrics(text) {
  const models = new Map(), tiers = new Map();
  for (const line of text.split("\n")) {
    const colon = line.indexOf(":"), brace = line.indexOf("{");
    if (line.startsWith("#") || colon < 0 || brace < colon || !KNOWN.has(line.slice(colon + 1, brace))) continue;
    const name = line.slice(colon + 1, brace), end = line.lastIndexOf("}");
    const labels = {};
    for (const [, key, value] of line.slice(brace + 1, end).matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value.replace(/\\(.)/g, "$1");
    const value = Number(line.slice(end + 1));
    const into = name.startsWith("kv_store") ? tiers : models;
    const key = labels.tier ?? labels.model_name;
    if (!into.has(key)) into.set(key, { buckets: [] });
    if (name.endsWith("_bucket")) into.get(key).buckets.push([labels.le === "+Inf" ? Infinity : Number(labels.le), value]);
    else into.get(key)[name] = value;
  }
  return { at: performance.now() / 1000, models, tiers };
}
function quantile(now, before, part) {
  const counts = now.map(([le, value], at) => [le, value - (before?.[at]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let low = 0, below = 0;
  for (const [le, upTo] of counts) {
    if (upTo >= part * total) return isFinite(le) ? low + (le - low) * (part * total - below) / Math.max(upTo - below, 1e-9) : low;
    [low, below] = [le, upTo];
  }
  return low;
}
const history = [];
function figuresOf(name) {
  const last = history.at(-1), first = history.find((each) => last.at - each.at <= RECENT_S);
  const now = last?.models.get(name), then = first?.models.get(name);
  if (!now) return null;
  const elapsed = last.at - first.at;
  const grown = (key) => (now[key] ?? 0) - (then?.[key] ?? 0);
  const asked = grown("prefix_cache_queries_total");
  return {
    running: now.num_requests_running, waiting: now.num_requests_waiting, kv: now.kv_cache_usage_perc,
    tokens: elapsed > 0 ? grown("generation_tokens_total") / elapsed : null,
    prompts: elapsed > 0 ? grown("prompt_tokens_total") / elapsed : null,
    hits: asked > 0 ? grown("prefix_cache_hits_total") / asked : null,
    p50: quantile(now.buckets, then?.buckets, 0.5), p95: quantile(now.buckets, then?.buckets, 0.95),
  };
}

/* -- tables ------------------------------------------------------------------------------------------------------- */

/** Bring a table up to date: rows keep their nodes, so that focus and selection stay; cells change where their text does. */
function fill(table, columns, rows, keyOf) {
  if (!table.tHead) {
    const head = table.createTHead().insertRow();
    for (const column of columns) head.append(make("th", { textContent: column.name, scope: "col", title: column.title ?? "", className: column.kind ?? "" }));
    table.createTBody();
  }
  const body = table.tBodies[0], known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((each, at) => {
    const key = keyOf(each);
    let row = known.get(key);
    known.delete(key);
    if (!row) {
      row = make("tr");
      row.dataset.key = key;
      columns.forEach((column, place) => row.append(make(place ? "td" : "th", { className: column.kind ?? "", scope: place ? "" : "row" })));
    }
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
    columns.forEach((column, place) => {
      if (column.control) column.control(row.cells[place], each);
      else setText(row.cells[place], String(column.show(each)));
      if (column.mark) row.cells[place].className = `${column.kind ?? ""} ${column.mark(each)}`;
    });
  });
  known.forEach((row) => row.remove());
}
function button(cell, text, act) {
  let node = cell.querySelector("button");
  if (!node) { node = make("button", { type: "button" }); cell.append(node); }
  setText(node, text);
  node.onclick = async () => {
    node.disabled = true;
    try { await act(); } catch (error) { note("refused", error.message); }
    node.disabled = false;
    poll();
  };
}

const MODELS = [
  { name: "model", kind: "word", show: (m) => m.id },
  { name: "state", kind: "word", show: (m) => m.reason ? `${m.state}: ${m.reason}` : m.state, mark: (m) => `state-dot ${m.state}` },
  { name: "tier", show: (m) => m.tier },
  { name: "priority", show: (m) => ({ "-2": "critical", "-1": "high", 0: "normal", 1: "low" })[m.priority] ?? m.priority },
  { name: "running", show: (m) => count(m.num_running) },
  { name: "waiting", show: (m) => count(m.num_waiting) },
  { name: "requests", show: (m) => count(m.num_requests) },
  { name: "tokens/s", title: "generated, last half minute; models of one replica are counted with its first", show: (m) => m.figures ? rate(m.figures.tokens) : m.shared },
  { name: "first token p50 / p95", show: (m) => m.figures ? `${seconds(m.figures.p50)} / ${seconds(m.figures.p95)}` : "" },
  { name: "KV used", show: (m) => m.figures ? percent(m.figures.kv) : "" },
  { name: "prefix hits", show: (m) => m.figures ? percent(m.figures.hits) : "" },
  { name: "sessions", show: (m) => m.max_active_sessions === null ? count(m.num_sessions) : `${m.num_sessions} / ${m.max_active_sessions}` },
  { name: "", control: (cell, m) => {
    if (cluster.is_fixed || m.replica === null) return;
    const does = m.state === "resident" ? "unload" : "load";
    button(cell, does, () => ask(`/v1/models/${encodeURIComponent(m.id)}/${does}`, { method: "POST" }));
  } },
];
const ms = (value) => seconds(value === null ? null : value / 1000);
const REQUESTS = [
  { name: "request", kind: "word", show: (r) => r.id },
  { name: "way", kind: "word", show: (r) => [...r.hops.map((hop) => hop.intent ? `${hop.model} (${hop.intent})` : hop.model), r.model ?? "–"].join(" → ") },
  { name: "state", kind: "word", show: (r) => r.state === "ended" ? `${r.status ?? ""} ${r.error ?? r.finish_reasons.join(", ")}` : r.state },
  { name: "why it waited", kind: "word", show: (r) => r.waits.map((each) => each.reason).join("; ") },
  { name: "session", show: (r) => r.session_id ?? "" },
  { name: "waited", show: (r) => ms(r.waited_ms) },
  { name: "first token", show: (r) => ms(r.ttft_ms) },
  { name: "total", show: (r) => ms(r.total_ms) },
  { name: "prompt (cached)", show: (r) => `${count(r.prompt_tokens)} (${count(r.cached_tokens)})` },
  { name: "output", show: (r) => count(r.output_tokens) },
  { name: "tokens/s", show: (r) => rate(r.tokens_per_second) },
];
const SESSIONS = [
  { name: "session", kind: "word", show: (s) => s.id },
  { name: "model", show: (s) => s.model },
  { name: "state", show: (s) => s.state },
  { name: "requests", show: (s) => count(s.num_requests) },
  { name: "tokens on the device", show: (s) => count(s.num_tokens) },
  { name: "in host memory or on disk", show: (s) => count(s.num_stored_tokens) },
  { name: "idle", show: (s) => seconds(s.idle_s) },
  { name: "age", show: (s) => seconds(s.age_s) },
  { name: "", control: (cell, s) => button(cell, "end", () => ask(`/v1/sessions/${encodeURIComponent(s.id)}`, { method: "DELETE" })) },
];

/* -- what is shown of a poll -------------------------------------------------------------------------------------- */

function showNow() {
  const names = [...(history.at(-1)?.models.keys() ?? [])], all = names.map(figuresOf).filter(Boolean);
  const sum = (key) => all.reduce((total, each) => total + (each[key] ?? 0), 0);
  const most = (key) => all.reduce((found, each) => each[key] === null ? found : Math.max(found ?? 0, each[key]), null);
  const of = (key) => cluster.models.reduce((total, each) => total + each[key], 0);
  const tiles = [
    ["running", count(of("num_running")), `${count(of("num_waiting"))} waiting`],
    ["tokens/s", rate(sum("tokens")), `${rate(sum("prompts"))} prompt tokens/s`],
    ["first token", seconds(most("p50")), `p95 ${seconds(most("p95"))}, slowest model`],
    ["KV used", percent(most("kv")), "fullest pool"],
    ["requests", count(cluster.counters.requests_total), `${count(cluster.sessions_live)} sessions`],
  ];
  const list = byId("now");
  if (!list.children.length) list.append(...tiles.map(([name]) => make("div", { className: "tile" }, make("dt", { textContent: name }), make("dd", {}, make("span"), make("span", { className: "more" })))));
  tiles.forEach(([, value, more], at) => {
    const [text, below] = list.children[at].querySelectorAll("dd > span");
    setText(text, value);
    setText(below, more);
  });
  push(rates, [Date.now() / 1000, sum("tokens"), of("num_running"), of("num_waiting")], WINDOW);
}
function showBudgets() {
  const bars = cluster.budgets.map((each) => [each.name.replace("_", " "), each.used_bytes, each.effective_bytes, ""]);
  for (const [tier, each] of history.at(-1)?.tiers ?? [])
    bars.push([`sessions' KV, ${tier}`, each.kv_store_bytes, each.kv_store_budget_bytes, `, ${count(each.kv_store_loaded_total)} blocks came back`]);
  const into = byId("budgets");
  while (into.children.length > bars.length) into.lastChild.remove();
  bars.forEach(([name, used, most, more], at) => {
    let row = into.children[at];
    if (!row) {
      row = make("div", { className: "bar" }, make("span"), make("div", { className: "track" }, make("div", { className: "fill" })), make("span", { className: "figures" }));
      into.append(row);
    }
    const part = most ? Math.min(1, used / most) : 0;
    setText(row.children[0], name);
    const track = row.querySelector(".fill");
    track.style.width = `${100 * part}%`;
    track.className = part > 0.9 ? "fill full" : "fill";
    setText(row.children[2], `${bytes(used)} of ${bytes(most)}${more}`);
  });
}
function showCluster() {
  setText(byId("cluster"), cluster.cluster);
  const deterministic = cluster.replicas.map((each) => each.deterministic).filter((each) => each !== null);
  const chip = byId("deterministic"), holds = deterministic.every(Boolean);
  chip.hidden = !deterministic.length;
  chip.className = `chip ${holds ? "good" : "bad"}`;
  setText(chip, holds ? "deterministic: the same bytes alone or batched" : "not deterministic: see lockstep models verify");
  byId("warnings").replaceChildren(...cluster.warnings.map((text) => make("span", { className: "chip bad", textContent: text })));
  const first = new Map(cluster.replicas.map((each) => [each.key, each.models[0]]));
  const models = cluster.models.map((m) => ({ ...m, figures: figuresOf(m.id), shared: first.get(m.replica) && first.get(m.replica) !== m.id ? `with ${first.get(m.replica)}` : "" }));
  fill(byId("models"), MODELS, models, (m) => m.id);
  fill(byId("sessions"), SESSIONS, cluster.sessions.slice(-100).reverse(), (s) => s.id);
  byId("sessions").closest("section").querySelector(".empty").hidden = cluster.sessions.length > 0;
  const choices = ["", ...cluster.models.map((m) => m.id)], select = byId("chat").querySelector("select");
  if (choices.join("\n") !== select.dataset.choices) {
    const chosen = select.value;
    select.dataset.choices = choices.join("\n");
    select.replaceChildren(...choices.map((id) => make("option", { value: id, textContent: id || (cluster.entry ? "whoever it is routed to" : cluster.models[0].id) })));
    select.value = choices.includes(chosen) ? chosen : "";
  }
  const list = byId("events");
  if (!list.children.length) for (const { at_s, ...each } of cluster.transitions.slice(-20)) note("tier_changed", each, at_s);
  list.nextElementSibling.hidden = list.children.length > 0;
  if (byId("manifest-card").hidden && !cluster.is_fixed) { byId("manifest-card").hidden = false; readManifest(); }
}
let timer = 0, generation = 0;
async function poll() {
  clearTimeout(timer);
  const mine = ++generation;
  if (!document.hidden) {
    try {
      const isDue = history.length < 2 || performance.now() / 1000 - history.at(-1).at >= METRICS_S;
      const [state, requests, metrics] = await Promise.all([ask("/v1/cluster").then((r) => r.json()), ask("/v1/requests?limit=20").then((r) => r.json()), isDue ? ask("/metrics").then((r) => r.text()) : null]);
      if (mine !== generation) return;
      cluster = state;
      if (metrics !== null) history.push(parseMetrics(metrics));
      if (history.length > WINDOW) history.shift();
      showNow();
      showBudgets();
      showCluster();
      fill(byId("requests"), REQUESTS, requests.data, (r) => String(r.number));
      byId("requests").closest("section").querySelector(".empty").hidden = requests.data.length > 0;
      live("live", "good");
    } catch (error) {
      if (mine !== generation) return;
      live(error instanceof Refused ? error.message : "the server does not answer; trying again", "bad");
    }
  }
  timer = setTimeout(poll, POLL_MS);
}
const CHANGES = new Set(["tier_changed", "manifest_replaced", "worker_restarted"]);
/** After such an event: what it changed is shown soon, and however many come, twice a second at most. */
function soon() {
  if (soon.timer) return;
  soon.timer = setTimeout(() => { soon.timer = 0; poll(); }, 500);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

/* -- charts ------------------------------------------------------------------------------------------------------- */

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const axis = (label, side, scale) => ({ label, side, scale, stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: side === 1 ? 0 : 1 }, ticks: { stroke: colour("--line") }, size: 46, labelSize: 18, font: "12px system-ui", labelFont: "12px system-ui" });
const times = () => ({ stroke: colour("--muted"), grid: { stroke: colour("--grid") }, ticks: { stroke: colour("--line") }, font: "12px system-ui", space: 90, values: (_, at) => at.map(clock) });
function chart(into, series, axes, scales) {
  const data = series.map(() => []);
  const plot = new uPlot({ width: into.clientWidth || 400, height: 190, series, axes, scales, cursor: { drag: { x: false, y: false } } }, data, into);
  new ResizeObserver(() => plot.setSize({ width: into.clientWidth, height: 190 })).observe(into);
  return { plot, data };
}
function push({ plot, data }, values, most) {
  values.forEach((value, at) => { data[at].push(value); if (data[at].length > most) data[at].shift(); });
  plot.setData(data);
}
const rates = chart(byId("rates"), [{ value: (_, at) => at === null ? "–" : clock(at) }, { label: "tokens/s", stroke: colour("--a"), fill: colour("--a-fill"), width: 1.5 }, { label: "running", stroke: colour("--blocks"), scale: "n", width: 1.5 }, { label: "waiting", stroke: colour("--queued"), scale: "n", dash: [5, 3], width: 1.5 }],
  [times(), axis("tokens/s", 3, "y"), axis("requests", 1, "n")], { n: { range: (_, low, high) => [0, Math.max(4, high)] }, y: { range: (_, low, high) => [0, Math.max(10, high * 1.1)] } });
const steps = chart(byId("steps"), [{ value: (_, at) => at === null ? "–" : clock(at) }, { label: "ms", stroke: colour("--decode"), paths: () => null, points: { show: true, size: 4, fill: colour("--decode") } }, { label: "tokens", stroke: colour("--queued"), scale: "n", paths: () => null, points: { show: true, size: 3, fill: colour("--queued") } }],
  [times(), axis("ms", 3, "y"), axis("tokens of the step", 1, "n")], { y: { range: (_, low, high) => [0, Math.max(10, high * 1.1)] }, n: { range: (_, low, high) => [0, Math.max(8, high * 1.1)] } });
let waitingSteps = [];
setInterval(() => {
  if (!waitingSteps.length || document.hidden) return;
  for (const each of waitingSteps) steps.data.forEach((column, at) => { column.push(each[at]); if (column.length > MAX_STEPS) column.shift(); });
  waitingSteps = [];
  steps.plot.setData(steps.data);
}, 500);

/* -- events ------------------------------------------------------------------------------------------------------- */

const SKIPPED = new Set(["at_s"]);
function note(type, data, at = Date.now() / 1000) {
  const text = typeof data === "string" ? data : Object.entries(data).filter(([key, value]) => !SKIPPED.has(key) && value !== null && value !== "").map(([key, value]) => `${key} ${value}`).join(", ");
  const list = byId("events");
  list.prepend(make("li", {}, make("time", { textContent: clock(at) }), make("strong", { textContent: type.replaceAll("_", " ") }), ` ${text}`));
  while (list.children.length > MAX_EVENTS) list.lastChild.remove();
}
/** Frames of a stream of server-sent events: [type, data] each. */
async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = "", type = "message", data = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line.startsWith("event: ")) type = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
      else if (line === "" && data) { yield [type, data]; [type, data] = ["message", ""]; }
    }
  }
}
let watching = null;
async function watch() {
  for (let first = true; ; first = false) {
    watching = new AbortController();
    try {
      const response = await ask("/v1/events", { signal: watching.signal });
      for await (const [type, text] of frames(response)) {
        const data = JSON.parse(text);
        if (type === "step") { waitingSteps.push([data.at_s, data.duration_ms, data.num_tokens]); if (waitingSteps.length > MAX_STEPS) waitingSteps.shift(); }
        else { note(type, data, data.at_s); if (CHANGES.has(type)) soon(); }
      }
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

/* -- chat --------------------------------------------------------------------------------------------------------- */

const talk = [];
let answering = null;
function say(kind, text) {
  const into = byId("talk"), line = make("p", { className: kind, textContent: text });
  into.append(line);
  while (into.children.length > MAX_TALK) into.firstChild.remove();
  into.scrollTop = into.scrollHeight;
  return line;
}
byId("chat").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (answering) return;
  const form = byId("chat"), field = form.querySelector("textarea"), session = form.elements.session.value.trim();
  talk.push({ role: "user", content: field.value });
  say("mine", field.value);
  field.value = "";
  const route = say("route", ""), line = say("theirs", "");
  let answer = "";
  answering = new AbortController();
  byId("stop").hidden = false;
  try {
    const body = { messages: talk, stream: true, stream_options: { include_usage: true } };
    if (form.querySelector("select").value) body.model = form.querySelector("select").value;
    if (session) body.session_id = session;
    const response = await ask("/v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: answering.signal });
    for await (const [, text] of frames(response)) {
      if (text === "[DONE]") break;
      const chunk = JSON.parse(text);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices?.[0]?.delta ?? {};
      for (const call of delta.tool_calls ?? []) if (call.function?.name === "dispatch_to_specialist") setText(route, `routed: ${call.function.arguments}`);
      if (delta.content) { answer += delta.content; setText(line, answer); byId("talk").scrollTop = byId("talk").scrollHeight; }
      const about = chunk.lockstep;
      if (about) setText(route, [
        about.hops ? about.hops.map((hop) => hop.intent ? `${hop.model} (${hop.intent})` : hop.model).join(" → ") : chunk.model,
        `first token ${seconds(about.ttft_ms / 1000)}`, `${rate(about.tokens_per_second)} tokens/s`, about.session_id ? `session ${about.session_id}` : "", `request ${about.request_id}`,
      ].filter(Boolean).join(" · "));
    }
    talk.push({ role: "assistant", content: answer });
  } catch (error) {
    setText(route, error.name === "AbortError" ? "stopped" : error.message);
    if (answer) talk.push({ role: "assistant", content: answer }); else talk.pop();
  }
  answering = null;
  byId("stop").hidden = true;
});
byId("stop").addEventListener("click", () => answering?.abort());
byId("chat").querySelector("textarea").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat").requestSubmit();
});

/* -- manifest ----------------------------------------------------------------------------------------------------- */

const manifestText = byId("manifest").querySelector("textarea");
async function readManifest() {
  try {
    manifestText.value = await (await ask("/v1/manifest", { headers: { Accept: "application/yaml" } })).text();
    byId("faults").replaceChildren();
  } catch (error) { setText(byId("replaced"), error.message); }
}
function selectLine(number) {
  const lines = manifestText.value.split("\n"), start = lines.slice(0, number - 1).reduce((sum, each) => sum + each.length + 1, 0);
  manifestText.focus();
  manifestText.setSelectionRange(start, start + (lines[number - 1]?.length ?? 0));
  manifestText.scrollTop = Math.max(0, (number - 4) * manifestText.scrollHeight / Math.max(1, lines.length));
}
byId("manifest").addEventListener("submit", async (event) => {
  event.preventDefault();
  const faults = byId("faults");
  faults.replaceChildren();
  setText(byId("replaced"), "being brought in …");
  try {
    await ask("/v1/manifest", { method: "PUT", headers: { "Content-Type": "application/yaml" }, body: manifestText.value });
    setText(byId("replaced"), "it holds now");
  } catch (error) {
    const problems = error.body?.error?.problems ?? [];
    setText(byId("replaced"), problems.length ? `${problems.length} to mend; nothing has changed` : error.message);
    faults.append(...problems.map((each) => {
      const link = make("button", { type: "button", textContent: `line ${each.line}: ${each.where} ${each.message}` });
      link.addEventListener("click", () => selectLine(each.line));
      return make("li", {}, link);
    }));
    if (problems.length) selectLine(problems[0].line);
  }
  poll();
});
byId("reread").addEventListener("click", readManifest);

function restart() {
  watching?.abort();
  poll();
  if (!restart.watches) { restart.watches = true; watch().finally(() => { restart.watches = false; }); }
}
restart();
