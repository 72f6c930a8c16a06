"""Histograms count like Prometheus; durations are those of the engine's clock."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from lockstep.core.request import FinishReason
from lockstep.engine.engine import Engine
from lockstep.engine.metrics import HISTOGRAMS, EngineMetrics, Histogram, MetricsSnapshot, SequenceSpan
from lockstep.engine.queues import MAX_COMMANDS
from lockstep.engine.request import GenerationRequest
from lockstep.errors import QueueFullError
from lockstep.executors.sampling_params import SamplingParams
from tests.engine.conftest import MakeEngine


def test_bounds_are_inclusive_and_the_last_bucket_is_open() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert (snapshot.counts, snapshot.count, snapshot.sum) == ((2, 2, 1), 5, 104.0)


def test_all_bounds_ascend() -> None:
    assert all(list(bounds) == sorted(set(bounds)) for bounds in HISTOGRAMS.values())


def test_a_finished_sequence_is_observed_up_to_its_last_phase() -> None:
    metrics = EngineMetrics()
    metrics.observe_finished(SequenceSpan(10.0, 11.0, 13.0, 17.0, 5, 3, 2, 8), FinishReason.STOP, 17.0)
    metrics.observe_finished(SequenceSpan(10.0, None, None, 0.0, 5, 0, 0, 8), FinishReason.ABORT, 12.0)
    sums = {name: (h.count, h.sum) for name, h in metrics.histograms().items()}
    assert sums["e2e_request_latency_seconds"] == (2, 9.0)
    assert sums["request_queue_time_seconds"] == (1, 1.0)
    assert sums["request_inference_time_seconds"] == (1, 6.0)
    assert sums["request_prefill_kv_computed_tokens"] == (1, 3.0)
    assert sums["request_params_max_tokens"] == (2, 16.0)
    assert sums["request_prefill_time_seconds"] == (1, 2.0)
    assert sums["request_decode_time_seconds"] == (1, 4.0)
    assert sums["request_time_per_output_token_seconds"] == (1, 2.0)
    assert metrics.finished == {"stop": 1, "abort": 1}


def submit(engine: Engine, prompt: str, max_tokens: int = 4, n: int = 1, ignore_eos: bool = False) -> int:
    return engine.submit(GenerationRequest(prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos)))


def by_label(snapshot: MetricsSnapshot, name: str) -> tuple[str, dict[str, float]]:
    metric = {**snapshot.labelled_gauges, **snapshot.labelled_counters}[name]
    return metric.label, dict(metric.values)


def test_prompt_tokens_have_one_of_two_sources(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for _ in range(2):
        submit(engine, "x" * 100)
        engine.run_until_idle()
    snapshot = engine.metrics()
    expected = {"local_compute": 104.0, "local_cache_hit": 96.0}
    assert by_label(snapshot, "prompt_tokens_by_source") == ("source", expected)
    assert (snapshot.counters["prompt_tokens"], snapshot.counters["prompt_tokens_cached"]) == (200, 96)
    computed = snapshot.histograms["request_prefill_kv_computed_tokens"]
    assert (computed.count, computed.sum) == (2, 104)


def test_a_recomputed_prompt_is_not_a_cache_hit(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=16, preemption="recompute")
    for index in range(12):
        submit(engine, f"{index:02}" + "x" * 58, max_tokens=40)
    engine.run_until_idle()
    snapshot = engine.metrics()
    assert snapshot.counters["num_preemptions"] > 0
    assert by_label(snapshot, "prompt_tokens_by_source")[1] == {"local_compute": 720, "local_cache_hit": 0}


def test_request_parameters_are_counted_once_per_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    submit(engine, "hello", 7, n=3, ignore_eos=True)
    submit(engine, "hello", 2)
    engine.run_until_idle()
    histograms = engine.metrics().histograms
    sums = {name: (histograms[name].count, histograms[name].sum) for name in histograms}
    assert sums["request_params_n"] == (2, 4.0)
    assert sums["request_max_num_generation_tokens"] == (2, 9.0)
    assert sums["request_params_max_tokens"] == (4, 23.0)
    assert sums["inter_token_latency_seconds"][0] == 3 * 6 + 1


def test_waiting_requests_have_one_of_two_reasons(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    ids = [submit(engine, "hello") for _ in range(3)]
    assert by_label(engine.metrics(), "num_requests_waiting_by_reason") == ("reason", {"capacity": 0, "deferred": 3})
    engine.step()
    ids.append(submit(engine, "hello"))
    busy = engine.metrics()
    assert by_label(busy, "num_requests_waiting_by_reason") == ("reason", {"capacity": 2, "deferred": 1})
    assert busy.gauges["num_requests_waiting"] == 3
    for request_id in ids:
        engine.abort(request_id)
    assert engine.metrics().gauges["num_requests_waiting"] == 3, "a cancellation is nobody who waits"
    engine.step()
    idle = engine.metrics()
    assert not any(idle.gauges.values())
    assert not any(value for metric in idle.labelled_gauges.values() for value in metric.values.values())


def test_refusals_of_full_queues_and_faulty_rows_are_counted(make_engine: MakeEngine) -> None:
    engine = make_engine("stub://alpha?nan_every=3", max_num_queued_reqs=2)
    for _ in range(5):
        submit(engine, "hello", 1)
    engine.run_until_idle()
    asked = submit(engine, "hello", 1)
    for _ in range(MAX_COMMANDS):
        engine.abort(asked)
    with pytest.raises(QueueFullError, match=f"{MAX_COMMANDS} commands already wait"):
        submit(engine, "hello", 1)
    engine.run_until_idle()
    submit(engine, "hello", 1)
    engine.run_until_idle()
    counters = engine.metrics().counters
    assert counters["admission_rejections"] == 3 + 1
    assert counters["corrupted_requests"] == 1


def test_a_snapshot_crosses_processes_and_has_the_cache_config(make_engine: MakeEngine) -> None:
    engine = make_engine(num_blocks=77)
    submit(engine, "hello")
    engine.run_until_idle()
    snapshot = engine.metrics()
    assert snapshot.info["cache_config_info"].items() >= {"block_size": "16", "num_gpu_blocks": "77"}.items()
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=MetricsSnapshot) == snapshot
