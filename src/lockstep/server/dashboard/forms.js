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
  forbidden.clear();
  askedAt.clear();
  watching?.abort();
  poll();
  if (!restart.watches) { restart.watches = true; watch().finally(() => { restart.watches = false; }); }
}
later("begin", function* () { restart(); }());
