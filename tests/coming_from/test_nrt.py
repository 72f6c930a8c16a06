"""The sentences of docs/coming-from.md for users of NRT are true: each is run, most of them on one server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lockstep.cluster.manifest_file import parse
from lockstep.cluster.state import MAX_TRANSITIONS
from lockstep.errors import ManifestError
from tests.coming_from.conftest import BUSY, SUPPORT, YAML, Seen
from tests.coming_from.offline import EXAMPLES, printed
from tests.coming_from.page import PAGE, states
from tests.waiting import until

LONG = "billing " * 40
"""More than a KV block of tokens."""


def manifest(**changes: str) -> str:
    """The example with a key of its `legal` model set."""
    read = yaml.safe_load(SUPPORT)
    read["models"]["specialists"][2].update(changes)
    return yaml.safe_dump(read, sort_keys=False)


# -- commands ---------------------------------------------------------------------------------------------------------


@states("Prints every fault with its line, or the placement.")
def test_check_prints_the_placement_or_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpu_budget: 2.4 GB needed of 18 GB" in printed(
        "check", str(EXAMPLES / "customer-support.yaml"), "--backend", "stub"
    )
    path = tmp_path / "faulty.yaml"
    path.write_text(SUPPORT.replace("18GB", '"18432"').replace("tier: standby", "tier: stanby"))
    printed("check", str(path), code=2)
    assert re.findall(r"line (\d+): ", capsys.readouterr().err) == ["4", "27"]


@states(
    "Other backends: `pocket` answers with words, `auto` loads each model's own source.",
    "Any source: a file, a directory, `hf://org/name`, `stub://NAME`.",
)
@pytest.mark.parametrize("backend", ["pocket", "stub://all", "pocket://"])
def test_other_backends_boot_the_example(backend: str) -> None:
    assert "gpu_budget" in printed("check", str(EXAMPLES / "customer-support.yaml"), "--backend", backend)


@states("`GET /v1/cluster` as a table.")
def test_ps_prints_the_cluster(seen: Seen) -> None:
    shown = printed("ps", "--base-url", str(seen.client.base_url))
    assert all(model["id"] in shown for model in seen.cluster["models"])


@states("Live, in a terminal. `--once` prints one view.")
def test_top_prints_a_frame(seen: Seen) -> None:
    assert "billing" in printed("top", "--once", "--base-url", str(seen.client.base_url))


# -- routes and manifest keys -----------------------------------------------------------------------------------------


@states(
    "Routed when `model` is absent, the cluster's name or the entry's id.",
    "Also a `model` of requests; it is routed.",
)
@pytest.mark.parametrize("model", [None, "customer-support-agent", "router"])
def test_a_request_is_routed(model: str | None, seen: Seen) -> None:
    answer = seen.ask("billing", **({} if model is None else {"model": model}))
    assert [hop["model"] for hop in answer["lockstep"]["hops"]] == ["router", "billing"]
    assert "hops" not in seen.ask("billing", model="technical")["lockstep"]


@states("Each with its tier.")
def test_models_have_their_tiers(seen: Seen) -> None:
    tiers = {model["id"]: model["tier"] for model in seen.client.get("/v1/models").json()["data"]}
    assert (tiers["router"], tiers["legal"]) == ("resident", "standby")


@states("JSON, or YAML for `Accept: application/yaml`.")
def test_the_manifest_is_json_or_yaml(seen: Seen) -> None:
    as_json = seen.client.get("/v1/manifest").json()
    as_yaml = yaml.safe_load(seen.client.get("/v1/manifest", headers={"Accept": "application/yaml"}).text)
    assert as_json == as_yaml


@states("YAML or JSON. A faulty manifest changes nothing.")
def test_a_faulty_manifest_changes_nothing(seen: Seen) -> None:
    before = seen.client.get("/v1/manifest").json()
    same = seen.client.put("/v1/manifest", json=before)
    faulty = seen.client.put("/v1/manifest", content=BUSY.replace("18GB", '"18432"'), headers=YAML)
    assert (same.status_code, faulty.status_code) == (200, 400)
    assert "18432MiB" in faulty.json()["error"]["message"]
    assert seen.client.get("/v1/manifest").json() == before


@states("A page for browsers, JSON for other clients.")
def test_the_home_page_is_for_browsers(seen: Seen) -> None:
    assert seen.client.get("/").json()["name"] == "lockstep"
    assert "<html" in seen.client.get("/", headers={"Accept": "text/html"}).text


@states("Server-sent events.", "Every change of a tier, with its reason and duration.", "With the reason.")
def test_events_have_their_fields(seen: Seen) -> None:
    fields = {
        kind: json.loads(seen.events[seen.events.index(f"event: {kind}") + 1].removeprefix("data: "))
        for kind in ("tier_changed", "session_evicted", "hop")
    }
    assert {"reason", "duration_ms"} <= fields["tier_changed"].keys()
    assert fields["session_evicted"]["reason"]


@states("A model finished its part, with the intent and the next model.")
def test_a_hop_has_intent_and_target(seen: Seen) -> None:
    hop = json.loads(seen.events[seen.events.index("event: hop") + 1].removeprefix("data: "))
    assert (hop["model"], hop["intent"], hop["target"]) == ("router", "billing", "specialists.billing")


@states(
    "For resident weights and KV pools. Without an accelerator it limits memory.",
    "For standby weights and KV in host memory.",
)
def test_budgets_have_what_is_resident_and_what_is_standby(seen: Seen) -> None:
    used = {budget["name"]: budget["used_bytes"] for budget in seen.cluster["budgets"]}
    assert used["gpu_budget"] >= 800_000_000
    assert used["ram_budget"] >= 800_000_000


@states("Any number of lists and single models, by any name.")
def test_models_may_have_any_names() -> None:
    text = (
        "cluster: x\nmodels:\n  a: {source: stub://a}\n  many: [{id: b, source: stub://b}, {id: c, source: stub://c}]\n"
    )
    assert [entry.id for entry in parse(text).entries] == ["a", "b", "c"]


@states("`active` means resident.")
def test_active_is_resident() -> None:
    assert parse(manifest(tier="active")) == parse(manifest(tier="resident"))


@states("Another server answers. Under `stub` and `pocket` the model is local.")
def test_a_remote_model_is_local_under_stub(seen: Seen) -> None:
    assert seen.ask("nothing of it")["model"] == "fallback"
    printed("check", str(EXAMPLES / "customer-support.yaml"), "--backend", "auto", code=2)


@states("Four names, or a number; the lowest goes first.")
def test_priorities_are_names_or_numbers() -> None:
    names = ("critical", "high", "normal", "low")
    assert [parse(manifest(priority=name)).entry("legal").priority for name in names] == [-2, -1, 0, 1]


@states("One model or a list.")
def test_co_activation_is_one_or_many() -> None:
    one, many = (parse(SUPPORT.replace("co_activation: router", f"co_activation: {w}")) for w in ("router", "[router]"))
    assert one == many


@states("A model of its own, or the name of another model.")
def test_a_fallback_may_be_another_model() -> None:
    read = yaml.safe_load(SUPPORT)
    read["fallback"] = "legal"
    assert parse(yaml.safe_dump(read, sort_keys=False)).fallback == "legal"


@states("The router's output is limited to the rule's words and `none`.")
def test_the_router_names_a_specialist_or_none(seen: Seen) -> None:
    said = [seen.ask(text)["lockstep"]["hops"][0]["completion"] for text in ("billing", "legal", "a poem, please")]
    assert said == ["intent=billing", "intent=legal", "intent=none"]


@states("The defaults.")
def test_times_of_sessions_are_the_defaults() -> None:
    times = "sessions: {idle_threshold: 30s, min_lifetime: 250ms, sweep_interval: 500ms}\n"
    assert parse(SUPPORT + times) == parse(SUPPORT)


# -- counters ---------------------------------------------------------------------------------------------------------


@states(
    "Counted after the boot; NRT counts the boot too.",
    "Models that were loaded; a resident model is not warmed.",
)
def test_promotions_are_those_after_the_boot(seen: Seen) -> None:
    """Two warmed specialists, the fallback for its request, and `legal` by hand; the router came with the boot."""
    counters, transitions = seen.cluster["counters"], seen.cluster["transitions"]
    assert (counters["co_activation_warms"], counters["promotions"], counters["demotions"]) == (2, 4, 1)
    arrived = [change["model"] for change in transitions if change["to"] == "resident"]
    assert sorted(arrived) == ["billing", "fallback", "legal", "router", "technical"]


@states("Idle sessions that lost their KV on the device.", "Models that were unloaded to make room.")
def test_evictions_of_sessions_and_models_are_counted_apart(seen: Seen) -> None:
    counters = seen.cluster["counters"]
    assert counters["lru_evictions"] >= 1, "the router holds one session, and a second one came"
    assert counters["model_evictions"] == 0


@states("The latest 256.")
def test_the_latest_transitions_are_kept() -> None:
    assert MAX_TRANSITIONS == 256


@states("Named sessions, and open requests without a session.")
def test_live_sessions_are_those_that_are_named(seen: Seen) -> None:
    assert seen.cluster["sessions_live"] == 2


# -- a routed answer --------------------------------------------------------------------------------------------------


@states(
    '`{"intent":"billing","target":"specialists.billing"}`. `"lockstep_hops": false` leaves the call out.',
    '`{"intent":"none","target":"fallback"}`',
    "`model` is the model that answered.",
    "The reason of the answer, never `tool_calls` for the router's call.",
    "The `session_id` of the request; null without one.",
)
def test_answers_are_those_of_the_page(seen: Seen) -> None:
    for answer, intent, model, session in zip(
        seen.answers, ("billing", "none"), ("billing", "fallback"), ("one", "two"), strict=True
    ):
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "dispatch_to_specialist"
        assert f"`{call['function']['arguments']}`" in PAGE
        facts = answer["lockstep"]
        assert (facts["intent"], facts["final_model"], facts["session_id"]) == (intent, model, session)
        assert answer["model"] == model
        assert answer["choices"][0]["finish_reason"] == "length"
    bare = seen.ask("billing", lockstep_hops=False)
    assert "tool_calls" not in bare["choices"][0]["message"]
    assert bare["lockstep"]["session_id"] is None


def test_the_call_is_in_the_first_chunk_of_a_stream(seen: Seen) -> None:
    body = {"messages": [{"role": "user", "content": "billing"}], "max_tokens": 4, "stream": True}
    frames = seen.client.post("/v1/chat/completions", json=body).text.split("\n\n")
    calls = [number for number, frame in enumerate(frames) if "dispatch_to_specialist" in frame]
    assert calls == [0]


# -- sessions ---------------------------------------------------------------------------------------------------------


@states("A request of the session is being answered.")
def test_a_session_is_active_while_a_request_is_answered(seen: Seen) -> None:
    body = {"model": "technical", "messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
    body |= {"max_tokens": 6000, "n": 8, "session_id": "active"}  # 48,000 tokens: it is left long before its end
    with seen.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(line for line in lines if '"content":"[' in line)
        assert seen.session("active")["state"] == "active"


@states(
    "Its KV is kept on the device, in host memory or on disk.",
    "Its KV is kept nowhere.",
    "The fastest place that holds some of it.",
    "Tokens kept on the device, in host memory, on disk.",
)
def test_a_session_moves_to_host_memory_and_its_answer_has_the_same_bytes(seen: Seen) -> None:
    """The model holds one session at once, so a second one takes the device from the first."""
    first = seen.ask(LONG, model="technical", session_id="moved")
    until(lambda: seen.session("moved")["num_disk_tokens"] > 0, "the session is copied to host memory and disk")
    kept = seen.session("moved")
    assert (kept["state"], kept["place"], kept["num_tokens"] > 0) == ("idle", "device", True)
    seen.ask("x", model="technical", session_id="short")
    moved = seen.session("moved")
    assert (moved["state"], moved["place"], moved["num_host_tokens"] > 0) == ("idle", "host", True)
    again = seen.ask(LONG, model="technical", session_id="moved")
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    short = seen.session("short")
    assert (short["state"], short["place"]) == ("dropped", "none"), "its prompt fills no block, so nothing was copied"


def test_sizes_are_those_of_the_paragraph_about_them() -> None:
    assert 'A manifest with `"18432"`\ndoes not boot' in PAGE
    with pytest.raises(ManifestError):
        parse(SUPPORT.replace("18GB", '"18432"'))
