/* -- hosts and replicas ------------------------------------------------------------------------------------------- */

const amounts = (h) => Object.entries(h.resources).map(([name, all]) => name === "memory" ? `${bytes(h.free[name] ?? 0)} of ${bytes(all)} memory` : `${h.free[name] ?? 0} of ${all} ${name}`).join(", ");
const HOSTS = [
  { name: "host", kind: "word", show: (h) => h.name },
  { name: "address", kind: "word", show: (h) => h.address },
  { name: "state", kind: "word", show: (h) => [h.is_there ? h.is_drained ? "" : "there" : "lost", h.is_drained ? "drained" : ""].filter(Boolean).join(", "), mark: (h) => `state-dot ${h.is_there ? h.is_drained ? "leaving" : "ready" : "failed"}` },
  { name: "replicas", title: "on it, those that leave it included", show: (h) => count(h.num_replicas) },
  { name: "free", kind: "word", show: (h) => h.is_there ? amounts(h) : "" },
  { name: "", control: (cell, h) => {
    if (cluster.is_fixed) return;
    button(cell, h.is_drained ? "undrain" : "drain", () => ask(`/v1/cluster/hosts/${encodeURIComponent(h.name)}/drain`, { method: h.is_drained ? "DELETE" : "POST" }));
  } },
];
const routed = (p) => Object.values(p.routed).reduce((total, each) => total + each, 0);
const PLACES = [
  { name: "replica", kind: "word", show: (p) => `${p.models[0] ?? p.key}#${p.number}` },
  { name: "host", kind: "word whole-line", title: "whose worker listens at this address", show: (p) => p.host ? `${p.host}${p.address ? ` (${p.address})` : ""}` : "–" },
  { name: "state", kind: "word wide", show: (p) => p.reason ? `${p.state === "ready" ? "gets no requests" : p.state}: ${p.reason}` : p.state, mark: (p) => `state-dot ${p.state === "ready" && p.reason ? "starting" : p.state}` },
  { name: "running", title: "requests of this gateway, as all that follows", show: (p) => count(p.num_running) },
  { name: "requests", show: (p) => count(routed(p)) },
  { name: "by session / prefix", title: "part of the requests that it got as it had the session, or the longest beginning of the prompt", show: (p) => routed(p) ? `${percent((p.routed.session ?? 0) / routed(p))} / ${percent((p.routed.prefix ?? 0) / routed(p))}` : "–" },
  { name: "retried", title: "requests that another replica answered, as this one was lost before their first token", show: (p) => count(p.num_retried) },
  { name: "cached blocks", show: (p) => count(p.num_cached_blocks) },
  { name: "starts", title: "workers that were started for it", show: (p) => count(p.num_starts) },
  { name: "away", title: "times that it was lost or left its host, and for how long it was away", show: (p) => p.num_away ? `${count(p.num_away)} ×, ${seconds(p.away_s)}` : "–" },
];
function showHosts() {
  byId("hosts-card").hidden = !cluster.hosts.length && !cluster.places.length;
  if (byId("hosts-card").hidden) return;
  later("hosts", fill(byId("hosts"), HOSTS, cluster.hosts, (h) => `${h.name} ${h.address} ${h.is_there}`));
  later("places", fill(byId("places"), PLACES, cluster.places, (p) => `${p.key}#${p.number}`));
}
