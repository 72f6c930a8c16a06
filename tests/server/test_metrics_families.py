"""Every metric of a snapshot reaches the page, under vLLM's name and with its labels."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.engine.engine import Engine
from lockstep.engine.loading import load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams
from lockstep.server.metrics import HELP, _Page, model_families

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def samples() -> Samples:
    """Of a model that answered one prompt twice, the second time mostly from the cache."""
    from prometheus_client import generate_latest

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


def test_what_waits_and_where_prompts_came_from(samples: Samples) -> None:
    assert samples["vllm:num_requests_waiting_by_reason", (("reason", "capacity"),)] == 0
    assert samples["vllm:num_requests_waiting_by_reason", (("reason", "deferred"),)] == 0
    assert samples["vllm:prompt_tokens_by_source_total", (("source", "local_compute"),)] == 104
    assert samples["vllm:prompt_tokens_by_source_total", (("source", "local_cache_hit"),)] == 96
    assert samples["vllm:prompt_tokens_total", ()] == 200


def test_settings_of_the_cache_are_labels(samples: Samples) -> None:
    [labels] = [dict(labels) for name, labels in samples if name == "vllm:cache_config_info"]
    assert labels["num_gpu_blocks"] == "64"
    assert labels["block_size"] == "16"


def test_requests_are_counted_by_what_they_asked_for(samples: Samples) -> None:
    assert samples["vllm:request_params_n_count", ()] == 2
    assert samples["vllm:request_params_max_tokens_sum", ()] == 8
    assert samples["vllm:request_prefill_kv_computed_tokens_sum", ()] == 104
    assert samples["vllm:inter_token_latency_seconds_count", ()] == 2 * 3
    assert samples["vllm:admission_rejections_total", ()] == samples["vllm:corrupted_requests_total", ()] == 0


def test_every_metric_is_described() -> None:
    engine = Engine(*load_model("stub://a", LoadOptions(engine=EngineOptions(num_blocks=64))))
    snapshot = engine.metrics()
    names = {*snapshot.gauges, *snapshot.counters, *snapshot.histograms, *snapshot.labelled_gauges}
    assert names | {*snapshot.labelled_counters, *snapshot.info} <= set(HELP)
