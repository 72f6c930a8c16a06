"""Every metric of a snapshot reaches the page, under vLLM's name and with its labels."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.cluster.events import EVENTS
from lockstep.cluster.snapshot import HostSnapshot, PlaceSnapshot
from lockstep.core.balancer import Why
from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.metrics import AdapterUse, merged
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.hosts.values import ReplicaPhase, ReplicaStatus, ReplicaUse
from lockstep.server.metrics import HELP, _Page, host_families, model_families, place_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Of a model that answered one prompt twice, the second time mostly from the cache."""
    engine = Engine(*load_model("stub://a", LoadOptions(engine=EngineOptions(num_blocks=64))))
    for _ in range(2):
        engine.submit(GenerationRequest("x" * 100, SamplingParams(max_tokens=4)))
        engine.run_until_idle()
    page = generate_latest(_Page(model_families({"m": engine.metrics()}, "vllm"))).decode()
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def test_waiting_requests_and_prompt_tokens_are_counted_by_reason_and_source(samples: Samples) -> None:
    assert samples["vllm:num_requests_waiting_by_reason", (("reason", "capacity"),)] == 0
    assert samples["vllm:num_requests_waiting_by_reason", (("reason", "deferred"),)] == 0
    assert samples["vllm:prompt_tokens_by_source_total", (("source", "local_compute"),)] == 104
    assert samples["vllm:prompt_tokens_by_source_total", (("source", "local_cache_hit"),)] == 96
    assert samples["vllm:prompt_tokens_total", ()] == 200


def test_settings_of_the_cache_are_labels(samples: Samples) -> None:
    [labels] = [dict(labels) for name, labels in samples if name == "vllm:cache_config_info"]
    assert labels["num_gpu_blocks"] == "64"
    assert labels["block_size"] == "16"


def test_adapters_of_open_requests_are_labels_of_each_model(samples: Samples) -> None:
    assert not any(name == "vllm:lora_requests_info" for name, _ in samples)
    plain = Engine(*load_model("stub://a", LoadOptions(engine=EngineOptions(num_blocks=64)))).metrics()
    first = dataclasses.replace(plain, adapters=AdapterUse(4, ("billing", "legal"), ()))
    second = dataclasses.replace(plain, adapters=AdapterUse(4, ("billing",), ("tax",)))
    page = generate_latest(_Page(model_families({"a": merged([first, second]), "b": plain}, "vllm"))).decode()
    [line] = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
    labels = 'max_lora="4",model_name="a",running_lora_adapters="billing,legal",waiting_lora_adapters="tax"'
    assert line == f'vllm:lora_requests_info{{engine="0",{labels}}} 1.0'


def test_requests_are_counted_by_their_parameters(samples: Samples) -> None:
    assert samples["vllm:request_params_n_count", ()] == 2
    assert samples["vllm:request_params_max_tokens_sum", ()] == 8
    assert samples["vllm:request_prefill_kv_computed_tokens_sum", ()] == 104
    assert samples["vllm:inter_token_latency_seconds_count", ()] == 2 * 3
    assert samples["vllm:admission_rejections_total", ()] == samples["vllm:corrupted_requests_total", ()] == 0


def test_every_metric_is_described() -> None:
    engine = Engine(*load_model("stub://a", LoadOptions(engine=EngineOptions(num_blocks=64))))
    snapshot = engine.metrics()
    names = {*snapshot.gauges, *snapshot.counters, *snapshot.histograms, *snapshot.labelled_gauges}
    with_adapters = dataclasses.replace(snapshot, adapters=AdapterUse(1, (), ()))
    assert names | {*snapshot.labelled_counters, *with_adapters.facts} <= set(HELP)


A = HostSnapshot("a", "10.0.0.1", True, False, {"CPU": 4.0, "memory": 8e9}, {"CPU": 1.0, "memory": 2e9}, 2)
READY = ReplicaStatus("stub://router", 1, ReplicaPhase.READY, "", "a", "id-a", "10.0.0.1", 5001, 101, 100, 3)


def hosts_page(hosts: tuple[HostSnapshot, ...], places: tuple[PlaceSnapshot, ...]) -> dict[str, float]:
    """Samples by name and labels, as Prometheus' parser reads them; it refuses one that comes twice."""
    page = generate_latest(_Page([*host_families(hosts, "l:cluster"), *place_families(places, "l:cluster")])).decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not sample.name.startswith("process_"):
                key = f"{sample.name} {' '.join(f'{k}={v}' for k, v in sorted(sample.labels.items()))}"
                assert key not in found
                found[key] = sample.value
    return found


def test_hosts_are_reported_by_name_and_resource() -> None:
    told = hosts_page((A, replace(A, name="b", is_there=False, is_drained=True, num_replicas=0, free={})), ())
    assert told["l:cluster_host_there host=a"] == told["l:cluster_host_drained host=b"] == 1
    assert told["l:cluster_host_there host=b"] == told["l:cluster_host_drained host=a"] == 0
    assert told["l:cluster_host_replicas host=a"] == 2
    assert told["l:cluster_host_resources host=a resource=memory"] == 8e9
    assert told["l:cluster_host_resources_free host=a resource=CPU"] == 1


def test_a_host_that_came_back_under_its_name_is_one_host() -> None:
    told = hosts_page((A, replace(A, is_there=False)), ())
    assert told["l:cluster_host_there host=a"] == 1


def test_a_replica_has_one_state_and_its_counts() -> None:
    use = ReplicaUse(num_retried=2)
    use.routed[Why.PREFIX] = 5
    use.mark_available(0.0)
    use.mark_unavailable(1.0)
    use.mark_available(3.5)
    told = hosts_page((), (PlaceSnapshot.of(READY, ["router"], use, num_running=4, num_cached_blocks=9),))
    states = {key: value for key, value in told.items() if "replica_state" in key}
    assert [key for key, value in states.items() if value] == [
        "l:cluster_replica_state host=a model_name=router replica=1 state=ready"
    ]
    assert len(states) == len(ReplicaPhase)
    assert told["l:cluster_replica_running host=a model_name=router replica=1"] == 4
    assert told["l:cluster_replica_cached_blocks host=a model_name=router replica=1"] == 9
    routed = {
        why.value: told[f"l:cluster_replica_routed_total model_name=router replica=1 why={why.value}"] for why in Why
    }
    assert routed == {"session": 0, "prefix": 5, "load": 0, "turn": 0}
    counted = {"retried": 2, "starts": 3, "losses": 1, "away_seconds": 2.5}
    for name, count in counted.items():
        assert told[f"l:cluster_replica_{name}_total model_name=router replica=1"] == count


def test_a_group_that_goes_gives_its_name_to_the_one_that_comes() -> None:
    """While a manifest is replaced, both have the model."""
    leaving = replace(READY, key="stub://before", state=ReplicaPhase.LEAVING, host="b")
    for places in ((leaving, READY), (READY, leaving)):
        told = hosts_page((), tuple(PlaceSnapshot.of(place, ["router"]) for place in places))
        assert told["l:cluster_replica_state host=a model_name=router replica=1 state=ready"] == 1
        assert not any("host=b" in key for key in told)


def test_the_manual_has_each_of_them_and_no_other() -> None:
    manual = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text()
    rows = re.findall(r"^\| (`(?:host|replica)_.*?`) \| (.*?) \|", manual, flags=re.MULTILINE)
    named = {
        (f"l:cluster_{name}", tuple(sorted(re.findall(r"`(\w+)`", labels))))
        for names, labels in rows
        for name in re.findall(r"`(\w+)`", names)
        if name not in EVENTS
    }
    told = hosts_page((A,), (PlaceSnapshot.of(READY, ["router"], ReplicaUse()),))
    parts = (key.split(" ") for key in told)
    assert named == {(name, tuple(label.partition("=")[0] for label in labels)) for name, *labels in parts}


def test_metrics_without_hosts_have_no_host_families() -> None:
    assert hosts_page((), ()) == {}
