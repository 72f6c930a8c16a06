"use strict";
/* The page asks this server alone. Everything that comes from it is put into the page as text, never as markup. */

const POLL_MS = 2000, STATS_MS = 5500, LOGS_MS = 3500,  /* rates are over 30 s, so that they need not be asked each time */
  NUM_POINTS = 150, MAX_STEPS = 600, MAX_LINES = 200, MAX_TALK = 100, MAX_OPENED = 20,
  FRAME_MS = 6, MAX_NEW_ROWS = 12;  /* of each frame, for bringing panels up to date */
const byId = (id) => document.getElementById(id);
let apiKey = "";  /* in memory only */
let cluster = null, stats = null;

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
const clocks = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const clock = (at) => clocks.format(at * 1000);

/* -- asking ------------------------------------------------------------------------------------------------------- */

class Refused extends Error {
  constructor(status, body) { super(body?.error?.message ?? `status ${status}`); this.status = status; this.body = body; }
}
async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (apiKey) headers.Authorization = `Bearer ${apiKey}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  if (response.status === 401) byId("key").hidden = false;
  throw new Refused(response.status, await response.json().catch(() => null));
}
const forbidden = new Set();  /* paths that this key does not open */
/** The answer of a path, or null where it is not for this key. */
async function tell(path) {
  const [bare] = path.split("?");
  if (forbidden.has(bare)) return null;
  try {
    return await (await ask(path)).json();
  } catch (error) {
    if (error.status !== 403) throw error;
    forbidden.add(bare);
    return null;
  }
}
function live(text, kind) {
  const chip = byId("live");
  setText(chip, text);
  chip.className = `chip ${kind}`;
}
byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key").querySelector("input");
  apiKey = field.value.trim().replace(/^(?:authorization\s*:\s*)?bearer\s+/i, "");
  field.value = "";
  byId("key").hidden = true;
  restart();
});

/* -- frames ------------------------------------------------------------------------------------------------------- */

const jobs = new Map();
const FRAME = Symbol("frame");  /* what work yields that wants to go on in the next one */
/** Work that is done a piece in each frame, so that it holds none for long; newer work takes the place of the same name. */
function later(name, work) {
  if (!jobs.size) requestAnimationFrame(workOn);
  jobs.delete(name);
  jobs.set(name, work);
}
function workOn() {
  const until = performance.now() + FRAME_MS;
  do {
    const [name, work] = jobs.entries().next().value;
    let step = { done: true };
    try { step = work.next(); } catch (error) { reportError(error); }
    if (step.done && jobs.get(name) === work) jobs.delete(name);
    if (step.value === FRAME) break;
  } while (jobs.size && performance.now() < until);
  if (jobs.size) requestAnimationFrame(workOn);
}

/* -- tables ------------------------------------------------------------------------------------------------------- */

/** Bring a table up to date: rows keep their nodes, so that focus and selection stay; cells change where their text does. */
function* fill(table, columns, rows, keyOf, detail = null) {
  if (!table.tHead) {
    const head = table.createTHead().insertRow();
    for (const column of columns) head.append(make("th", { textContent: column.name, scope: "col", title: column.title ?? "", className: column.kind ?? "" }));
    table.createTBody();
  }
  const body = table.tBodies[0], known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const keys = new Set(rows.map(keyOf));
  let numNew = 0;
  known.forEach((row, key) => { if (!keys.has(key)) row.remove(); });
  for (const [at, each] of rows.entries()) {
    const key = keyOf(each);
    let row = known.get(key);
    if (!row) {
      row = make("tr");
      numNew += 1;
      row.dataset.key = key;
      if (each.isDetail) row.append(make("td", { className: "detail", colSpan: columns.length }));
      else columns.forEach((column, place) => row.append(make(place ? "td" : "th", { className: column.kind ?? "", scope: place ? "" : "row" })));
    }
    if (body.rows[at] !== row) body.insertBefore(row, body.rows[at] ?? null);
    if (each.isDetail) detail(row.cells[0], each);
    else columns.forEach((column, place) => {
      if (column.control) column.control(row.cells[place], each);
      else setText(row.cells[place], String(column.show(each)));
      if (column.mark) row.cells[place].className = `${column.kind ?? ""} ${column.mark(each)}`;
    });
    yield numNew % MAX_NEW_ROWS || !numNew ? null : FRAME;
  }
  table.closest("section").querySelector(".empty")?.toggleAttribute("hidden", rows.length > 0);
}
function button(cell, text, act) {
  let node = cell.querySelector("button");
  if (!node) { node = make("button", { type: "button" }); cell.append(node); }
  setText(node, text);
  node.onclick = async () => {
    if (node.ariaBusy === "true") return;  /* one that is disabled would lose its focus */
    node.ariaBusy = "true";
    try { await act(); } catch (error) { note("refused", error.message); }
    node.ariaBusy = "false";
    poll();
  };
}

const drafts = (share) => (share ?? null) === null ? "" : `, ${percent(share)} of drafts`;
const MODELS = [
  { name: "model", kind: "word", show: (m) => m.adapter ? `${m.id} (adapter)` : m.id },
  { name: "state", kind: "word", show: (m) => m.reason ? `${m.state}: ${m.reason}` : m.state, mark: (m) => `state-dot ${m.state}` },
  { name: "tier", kind: "word", show: (m) => m.tier },
  { name: "task", kind: "word", title: "generate text, embed texts or rerank documents", show: (m) => m.task ?? "–" },
  { name: "priority", kind: "word", show: (m) => ({ "-2": "critical", "-1": "high", 0: "normal", 1: "low" })[m.priority] ?? m.priority },
  { name: "running", title: "being answered, those that wait in the engine included", show: (m) => count(m.num_running) },
  { name: "waiting", title: "for the model to be loaded, or for a session's place", show: (m) => count(m.num_waiting) },
  { name: "requests", show: (m) => count(m.num_requests) },
  { name: "tokens/s", title: "generated, last half minute; models of one replica are counted with its first", show: (m) => m.stats ? rate(m.stats.tokens_per_s) + drafts(m.stats.draft_share) : m.shared, mark: (m) => m.stats ? "" : "muted" },
  { name: "first token p50 / p95", show: (m) => m.stats ? `${seconds(m.stats.ttft_p50_s)} / ${seconds(m.stats.ttft_p95_s)}` : "" },
  { name: "KV used", title: "of an encoder, the activations of its texts", show: (m) => m.stats ? percent(m.stats.kv_share) : "" },
  { name: "prefix hits", show: (m) => m.stats ? percent(m.stats.hit_share) : "" },
  { name: "sessions", show: (m) => m.max_active_sessions === null ? count(m.num_sessions) : `${m.num_sessions} / ${m.max_active_sessions}` },
  { name: "", control: (cell, m) => {
    if (cluster.is_fixed || m.replica === null) return;
    const does = m.state === "resident" ? "unload" : "load";
    button(cell, does, () => ask(`/v1/models/${encodeURIComponent(m.id)}/${does}`, { method: "POST" }));
  } },
];
const ms = (value) => seconds(value === null ? null : value / 1000);
const REQUESTS = [
  { name: "came", kind: "word", show: (r) => clock(r.at_s) },
  { name: "way", kind: "word whole-line", show: (r) => [...r.hops.map((hop) => hop.intent ? `${hop.model} (${hop.intent})` : hop.model), r.model ?? "–"].join(" → ") },
  { name: "state", kind: "word whole-line", show: (r) => r.state === "ended" ? `${r.status ?? ""} ${r.error ?? r.finish_reasons.join(", ")}` : r.state },
  { name: "why it waited", kind: "word wide", show: (r) => [...new Set(r.waits.map((each) => each.reason))].join("; ") },
  { name: "waited", show: (r) => ms(r.waited_ms) },
  { name: "first token", show: (r) => ms(r.ttft_ms) },
  { name: "total", show: (r) => ms(r.total_ms) },
  { name: "tokens", title: "of the prompt (of which cached) and of the answer", show: (r) => `${count(r.prompt_tokens)} (${count(r.cached_tokens)}) + ${count(r.output_tokens)}` },
  { name: "tokens/s", show: (r) => rate(r.tokens_per_second) },
  { name: "replay", control: (cell, r) => {
    const node = cell.firstChild ?? cell.appendChild(make("button", { type: "button", textContent: "details" }));
    node.ariaExpanded = String(opened.has(r.number));
    node.onclick = () => {
      if (!opened.delete(r.number)) opened.set(r.number, r);
      if (opened.size > MAX_OPENED) opened.delete(opened.keys().next().value);
      showRequests();
    };
  } },
];
let requests = [];
const opened = new Map();  /* requests whose details are shown, by number; they stay when newer ones come */
function showRequests() {
  requests.forEach((r) => { if (opened.has(r.number)) opened.set(r.number, r); });
  const known = new Map([...opened, ...requests.map((r) => [r.number, r])]);
  const all = [...known.values()].sort((a, b) => b.number - a.number);
  const rows = all.flatMap((r) => opened.has(r.number) ? [r, { ...r, isDetail: true }] : [r]);
  later("requests", fill(byId("requests"), REQUESTS, rows, (r) => `${r.number}${r.isDetail ? " details" : ""}`, showDetail));
}
/** Each reason for which a request waited, with its times, and the commands that decide it again. */
function showDetail(cell, r) {
  const told = JSON.stringify([r.waits, r.replay]);
  if (cell.dataset.told === told) return;
  cell.dataset.told = told;
  const reasons = r.waits.map((each) => make("li", { textContent: `${each.reason} (${each.model}, ${each.kind.replaceAll("_", " ")}: from ${ms(each.at_ms)} on${each.seen_ms ? `, for ${ms(each.seen_ms)}` : ""})` }));
  const commands = r.replay.map((at) => {
    const line = make("li", { textContent: `${at.model}: sequence ${at.sequence} of ${at.engine}, from step ${at.step}` });
    if (at.command !== null) {
      const copy = make("button", { type: "button", textContent: "copy" });
      copy.addEventListener("click", () => copyText(line.querySelector("code"), copy));
      line.append(make("br"), make("code", { textContent: at.command }), " ", copy);
    }
    return line;
  });
  cell.replaceChildren(
    make("p", {}, "Request ", make("code", { textContent: r.id }), ` to ${r.endpoint}`, r.session_id === null ? "" : `, session ${r.session_id}`, r.caller ? `, with ${r.caller}` : ""),
    make("h3", { textContent: "Why it waited" }), reasons.length ? make("ul", {}, ...reasons) : make("p", { textContent: "Nobody saw it wait; the planner is asked ten times a second." }),
    make("h3", { textContent: "To replay it" }), commands.length ? make("ul", {}, ...commands) : make("p", { textContent: "Its steps are in no recording; a server with --trace DIR makes one." }));
}
async function copyText(from, told) {
  getSelection().selectAllChildren(from);  /* where a page may not write to the clipboard, it is ready for Ctrl+C */
  try { await navigator.clipboard.writeText(from.textContent); setText(told, "copied"); } catch { setText(told, "selected"); }
  setTimeout(() => setText(told, "copy"), POLL_MS);
}
const SESSIONS = [
  { name: "session", kind: "word", show: (s) => s.id },
  { name: "model", kind: "word", show: (s) => s.model },
  { name: "state", kind: "word", show: (s) => s.state },
  { name: "requests", show: (s) => count(s.num_requests) },
  { name: "its KV is", kind: "word", title: "the fastest place that has something of it", show: (s) => ({ device: "on the device", host: "in host memory", disk: "on disk", none: "nowhere" })[s.place] ?? "–" },
  { name: "tokens on the device", show: (s) => count(s.num_tokens) },
  { name: "in host memory", show: (s) => count(s.num_host_tokens) },
  { name: "on disk", show: (s) => count(s.num_disk_tokens) },
  { name: "idle", show: (s) => seconds(s.idle_s) },
  { name: "age", show: (s) => seconds(s.age_s) },
  { name: "", control: (cell, s) => button(cell, "end", () => ask(`/v1/sessions/${encodeURIComponent(s.id)}?caller=${encodeURIComponent(s.caller)}`, { method: "DELETE" })) },
];

/* -- what is shown of a poll -------------------------------------------------------------------------------------- */

function* showNow() {
  const engines = stats.engines, of = (key) => cluster.models.reduce((total, each) => total + each[key], 0);
  const sum = (key) => engines.reduce((total, each) => total + (each[key] ?? 0), 0);
  const most = (key) => engines.reduce((found, each) => each[key] === null ? found : Math.max(found ?? 0, each[key]), null);
  const inEngines = sum("num_waiting"), running = Math.max(0, of("num_running") - inEngines), waiting = of("num_waiting") + inEngines;
  const tiles = [
    ["running", count(running), `${count(waiting)} waiting`],
    ["tokens/s", rate(sum("tokens_per_s")), `${rate(sum("prompt_tokens_per_s"))} prompt tokens/s`],
    ["first token", seconds(most("ttft_p50_s")), `p95 ${seconds(most("ttft_p95_s"))}, slowest model`],
    ["KV used", percent(most("kv_share")), "fullest pool"],
    ["requests", count(cluster.counters.requests_total), `${count(cluster.sessions_live)} sessions`],
  ];
  const list = byId("now");
  if (!list.children.length) list.append(...tiles.map(([name]) => make("div", { className: "tile" }, make("dt", { textContent: name }), make("dd", {}, make("span"), make("span", { className: "more" })))));
  tiles.forEach(([, value, more], at) => {
    const [text, below] = list.children[at].querySelectorAll("dd > span");
    setText(text, value);
    setText(below, more);
  });
  rates.push([[Date.now() / 1000, sum("tokens_per_s"), running, waiting]], NUM_POINTS);
}
function* showBudgets() {
  const unlimited = { gpu_budget: "memory for models", ram_budget: "memory for standby models" };
  const bars = cluster.budgets.map((each) => [each.effective_bytes === null && unlimited[each.name] || each.name.replace("_", " "), each.used_bytes, each.effective_bytes, ""]);
  for (const tier of stats.tiers)
    bars.push([`kept KV, ${tier.name}`, tier.num_bytes, tier.budget_bytes, `; ${count(tier.num_loaded)} blocks came back`]);
  const into = byId("budgets");
  while (into.children.length > bars.length) into.lastChild.remove();
  bars.forEach(([name, used, most, more], at) => {
    let row = into.children[at];
    if (!row) {
      row = make("div", { className: "bar" }, make("span"), make("div", { className: "track" }, make("div", { className: "fill" })), make("span", { className: "stats" }));
      into.append(row);
    }
    const part = most ? Math.min(1, used / most) : 0;
    setText(row.children[0], name);
    const track = row.querySelector(".fill");
    track.style.width = `${100 * part}%`;
    track.className = part > 0.9 ? "fill full" : "fill";
    setText(row.children[2], most === null ? `${bytes(used)}, no limit set${more}` : `${bytes(used)} of ${bytes(most)}${more}`);
  });
}
function* showCluster() {
  setText(byId("cluster"), cluster.cluster);
  const engines = cluster.replicas.map((each) => each.engine).filter((each) => each && each.isa);
  byId("kernels").hidden = !engines.length;
  setText(byId("kernels"), [...new Set(engines.map((each) => `${each.isa}, ${each.threads} threads`))].join("; "));
  byId("warnings").replaceChildren(...cluster.warnings.map((text) => make("span", { className: "chip bad", textContent: text })));
  yield;
  offer(cluster.models.map((m) => m.id), cluster.entry ? "whoever it is routed to" : cluster.models[0].id);
  if (!showCluster.isBegun) for (const { at_s, ...each } of cluster.transitions.slice(-20)) note("tier_changed", each, at_s);
  showCluster.isBegun = true;
  if (byId("manifest-card").hidden && !cluster.is_fixed) { byId("manifest-card").hidden = false; readManifest(); }
}
function showModels() {
  const first = new Map(cluster.replicas.map((each) => [each.key, each.models[0]])), engines = new Map(stats.engines.map((each) => [each.model, each]));
  const models = cluster.models.map((m) => ({ ...m, stats: engines.get(m.id), shared: first.get(m.replica) && first.get(m.replica) !== m.id ? `with ${first.get(m.replica)}` : "" }));
  later("models", fill(byId("models"), MODELS, models, (m) => m.id));
  showSessions(cluster.sessions);
}
function showSessions(sessions) {
  later("sessions", fill(byId("sessions"), SESSIONS, sessions.slice(-100).reverse(), (s) => s.id));
}
/** Offer models to chat with. */
function offer(ids, anybody) {
  const choices = ["", ...ids], select = byId("chat").querySelector("select");
  if (choices.join("\n") === select.dataset.choices) return;
  const chosen = select.value;
  select.dataset.choices = choices.join("\n");
  select.replaceChildren(...choices.map((id) => make("option", { value: id, textContent: id || anybody })));
  select.value = choices.includes(chosen) ? chosen : "";
}
let lastLine = 0, isLost = false;  /* a server that comes back may have begun anew */
function* showLogs(lines, isAnew) {
  byId("logs-card").hidden = lines === null;
  if (lines === null) return;
  if (isAnew) { lastLine = 0; byId("logs").replaceChildren(); }
  if (lines.length && lines[0].number > lastLine + 1 && lastLine) lines.unshift({ at_s: lines[0].at_s, level: "", logger: "", text: "… lines that went by unseen" });
  prepend(byId("logs"), lines.map((each) => make("li", {}, make("time", { textContent: clock(each.at_s) }), make("span", { className: `level ${each.level}`, textContent: each.level }), make("span", { className: "logger", textContent: each.logger }), each.text)));
  lastLine = lines.at(-1)?.number ?? lastLine;
}
/** Put lines above those that are there, the last on top; as many are kept as are bearable. */
function prepend(list, lines) {
  list.prepend(...lines.slice(-MAX_LINES).reverse());
  while (list.children.length > MAX_LINES) list.lastChild.remove();
  list.nextElementSibling.hidden = list.children.length > 0;
}
let timer = 0, generation = 0;
const askedAt = new Map();
/** Whether something is to be asked again, which is noted if so; at first sooner, since rates need two moments. */
function isDue(name, interval) {
  const times = askedAt.get(name) ?? [], now = performance.now();
  const due = times.length < 2 || now - times.at(-1) >= interval;
  if (due) askedAt.set(name, [...times, now].slice(-2));
  return due;
}
async function poll() {
  clearTimeout(timer);
  const mine = ++generation;
  if (!document.hidden) {
    try {
      const isAnew = isLost;
      if (isAnew) askedAt.clear();
      const [state, listed, rates, lines] = await Promise.all([
        tell("/v1/cluster"), tell("/v1/requests?limit=20"),
        stats === null || isDue("stats", STATS_MS) ? tell("/v1/stats") : undefined, isDue("logs", LOGS_MS) ? tell(`/v1/logs?after=${isAnew ? 0 : lastLine}`) : undefined,
      ]);
      if (mine !== generation) return;
      [cluster, requests] = [state, listed.data];
      if (isAnew) { isLost = false; opened.clear(); }
      if (rates !== undefined) stats = rates;
      document.body.classList.toggle("caller", !cluster);
      if (cluster && stats) {
        later("now", showNow());
        later("budgets", showBudgets());
        later("cluster", showCluster());
        showModels();
        showHosts();
        live("live", "good");
      } else if (!cluster) {
        byId("key").hidden = false;
        const [models, sessions] = await Promise.all([tell("/v1/models"), tell("/v1/sessions")]);
        offer(models.data.map((m) => m.id), "whoever answers by default");
        showSessions(sessions.data);
        live("this key sees what is its own; an admin key sees all", "good");
      }
      showRequests();
      if (lines !== undefined) later("logs", showLogs(lines && lines.data, isAnew));
    } catch (error) {
      if (mine !== generation) return;
      isLost ||= !(error instanceof Refused);
      live(error instanceof Refused ? error.message : "the server does not answer; trying again", "bad");
    }
  }
  timer = setTimeout(poll, POLL_MS);
}
const CHANGES = new Set(["tier_changed", "manifest_replaced", "worker_restarted", "replica_lost"]);
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
/** A chart, drawn in a frame of its own as it is seen first. */
class Chart {
  constructor(into, numSeries, optionsOf) {
    this.data = Array.from({ length: numSeries }, () => []);
    later(into.id, this.draw(into, optionsOf));
  }
  * draw(into, optionsOf) {
    const options = optionsOf();
    yield FRAME;
    const size = () => ({ width: into.clientWidth || 400, height: 190 });
    this.plot = new uPlot({ ...size(), ...options, cursor: { drag: { x: false, y: false } } }, this.data, into);
    let width = into.clientWidth;
    new ResizeObserver(() => { if (into.clientWidth !== width) { width = into.clientWidth; this.plot.setSize(size()); } }).observe(into);
    yield FRAME;
  }
  push(points, most) {
    this.data.forEach((column, at) => { column.push(...points.map((each) => each[at])); column.splice(0, column.length - most); });
    this.plot?.setData(this.data);
  }
}
const moment = { value: (_, at) => at === null ? "–" : clock(at) };
const from0 = (least, room = 1) => ({ range: (_, low, high) => [0, Math.max(least, high * room)] });
const line = { width: 1.5, points: { show: false } };
const rates = new Chart(byId("rates"), 4, () => ({
  series: [
    moment,
    { label: "tokens/s", stroke: colour("--a"), fill: colour("--a-fill"), ...line },
    { label: "running", stroke: colour("--blocks"), scale: "n", ...line },
    { label: "waiting", stroke: colour("--queued"), scale: "n", dash: [5, 3], ...line },
  ],
  axes: [times(), axis("tokens/s", 3, "y"), axis("requests", 1, "n")],
  scales: { y: from0(10, 1.1), n: from0(4) },
}));
const dots = (label, name, size, scale) => ({ label, scale, stroke: colour(name), paths: () => null, points: { show: true, size, fill: colour(name) } });
const steps = new Chart(byId("steps"), 3, () => ({
  series: [moment, dots("ms", "--decode", 4, "y"), dots("tokens", "--queued", 3, "n")],
  axes: [times(), axis("ms", 3, "y"), axis("tokens of the step", 1, "n")],
  scales: { y: from0(10, 1.1), n: from0(8, 1.1) },
}));
let newSteps = [], newNotes = [];
setInterval(() => {
  if (document.hidden) return;
  if (newSteps.length) later("new steps", showSteps());
  if (newNotes.length) later("events", showNotes());
}, 500);
function* showSteps() {
  steps.push(newSteps, MAX_STEPS);
  newSteps = [];
}
function* showNotes() {
  prepend(byId("events"), newNotes.map(noteLine));
  newNotes = [];
}

/* -- events ------------------------------------------------------------------------------------------------------- */

const SKIPPED = new Set(["at_s"]);
function note(type, data, at = Date.now() / 1000) {
  newNotes.push([type, data, at]);
  if (newNotes.length > MAX_LINES) newNotes.shift();
}
function noteLine([type, data, at]) {
  const text = typeof data === "string" ? data : Object.entries(data).filter(([key, value]) => !SKIPPED.has(key) && value !== null && value !== "").map(([key, value]) => `${key} ${value}`).join(", ");
  return make("li", {}, make("time", { textContent: clock(at) }), make("strong", { textContent: type.replaceAll("_", " ") }), ` ${text}`);
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
        if (type === "step") { newSteps.push([data.at_s, data.duration_ms, data.num_tokens]); if (newSteps.length > MAX_STEPS) newSteps.shift(); }
        else { note(type, data, data.at_s); if (CHANGES.has(type)) soon(); }
      }
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}
