"""Worker processes that die, hang or are left alone: real processes, real signals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.manifest import Manifest
from lockstep.cluster.replica_state import MAX_BACKOFF_S, MAX_LOST_LOADS
from lockstep.cluster.state import ClusterOptions
from lockstep.engine.kv_tiers import KVStoreOptions
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import ArtifactNotFoundError, RequestFailedError, UnavailableError, WorkerLostError
from lockstep.executors.sampling_params import SamplingParams
from lockstep.pocket import pocket_path
from lockstep.worker.health import HealthLimits
from lockstep.worker.lifecycle import LoadState
from lockstep.worker.link import ThreadLink, WorkerOptions
from lockstep.worker.messages import TrialOptions
from tests.cluster.clusters import clustered, say
from tests.cluster.clusters import model_of as state_of
from tests.cluster.support import (
    ENDLESS,
    NAME,
    answer,
    call,
    model_of,
    one_model,
    running,
    served,
    settled,
    worker_of,
)
from tests.waiting import ENDLESS_MS, HANG_S, eventually
from tests.worker.support import broken_steps

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="worker processes need a Unix system")


def pid_of(model: Cluster) -> int:
    assert model.worker_pid is not None
    return model.worker_pid


def is_replaced(model: Cluster, pid: int) -> bool:
    """Whether another worker is there in the place of this one."""
    return model.worker_pid not in (pid, None)


def is_alive(pid: int) -> bool:
    """Whether it runs; one that only waits to be collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_killed_worker_ends_open_requests_and_is_restarted() -> None:
    async with served("stub://alpha?step_ms=20", "process") as model:
        asked = call("Hello there", SamplingParams(max_tokens=16, temperature=0.0))
        before = (await answer(model, asked)).completions
        tasks = [asyncio.create_task(answer(model, call("x", ENDLESS))) for _ in range(20)]
        await running(model, 20)
        os.kill(pid_of(model), signal.SIGKILL)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, WorkerLostError), outcome
            assert "signal 9 (SIGKILL)" in str(outcome)
            assert "send the request again" in str(outcome)
            assert outcome.retry_after_s >= 1.0
        assert model.health().reason == "the device worker is being restarted"
        assert model.card(None).tier == "loading"
        assert (await answer(model, asked)).completions == before, "who comes meanwhile waits for the next worker"
        assert model.health().ready
        await settled(model)


async def test_a_worker_comes_back_when_there_are_files_to_open_again(caplog: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with served("stub://alpha", "process") as model:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            os.kill(pid_of(model), signal.SIGKILL)
            await eventually(lambda: "did not restart" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await answer(model, call("abc"))).text == "[stub:alpha] ok len=3 max=40"
    assert "no worker process can be started: [Errno 24] Too many open files" in caplog.text


async def test_requests_do_not_wait_for_a_worker_that_restarts_late() -> None:
    async with served("stub://alpha", "process", LATE) as model:
        first = pid_of(model)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: is_replaced(model, first))
        waiting = asyncio.create_task(answer(model, call("abc")))
        os.kill(pid_of(model), signal.SIGKILL)
        await eventually(lambda: model.worker_pid is None)
        with pytest.raises(UnavailableError, match="being restarted") as refused:
            await answer(model, call("abc"))
        assert HANG_S / 2 < refused.value.retry_after_s <= HANG_S + 5
        with pytest.raises(UnavailableError):
            await waiting


async def test_a_session_cannot_be_ended_while_its_stored_kv_is_unknown() -> None:
    """It would stay in the store, which the next worker has again."""
    load = LoadOptions(EngineOptions(num_blocks=64))
    options = ClusterOptions(
        kv=KVStoreOptions(host_bytes=1 << 20), load=load, worker=WorkerOptions("process", health=LATE)
    )
    cluster = Cluster(Manifest.of_model("stub://alpha", (NAME,)), options)
    await asyncio.wait_for(cluster.start(), HANG_S)
    try:
        await answer(cluster, call("hello " * 20, session_id="s"))
        first = pid_of(cluster)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: is_replaced(cluster, first))
        os.kill(pid_of(cluster), signal.SIGKILL)
        await eventually(lambda: cluster.worker_pid is None)
        await cluster.locate_sessions()
        [session] = cluster.sessions()
        assert (session.place, session.num_stored_tokens, session.state) == (None, None, "idle")
        with pytest.raises(UnavailableError, match="the session's stored KV is not known yet; try again"):
            await cluster.end_session("s")
        assert len(cluster.sessions()) == 1
    finally:
        await asyncio.wait_for(cluster.close(), HANG_S)


LATE = HealthLimits(first_delay_s=HANG_S, max_delay_s=HANG_S)
COLD = """
cluster: two
models:
  warm: {source: 'stub://warm?load_ms=100', priority: critical}
  cold: {source: 'stub://cold?load_ms=300', tier: standby}
"""


async def test_loads_that_were_lost_with_their_workers_are_no_failures_of_the_models() -> None:
    async with clustered(COLD, kind="process") as cluster:
        asked = [asyncio.create_task(say(cluster, "hello", name)) for name in ("cold", "cold")]
        for _ in range(3):
            await eventually(lambda: state_of(cluster, "cold").state == "loading" and cluster.worker_pid is not None)
            pid = pid_of(cluster)
            os.kill(pid, signal.SIGKILL)
            await eventually(partial(is_replaced, cluster, pid))
        assert [said.model for said in await asyncio.gather(*asked)] == ["cold", "cold"], "they went on waiting"
        assert (await say(cluster, "hello", "warm")).model == "warm"
        states = {change.after for change in cluster.snapshot().transitions}
        assert "failed" not in states
        assert [replica.failure for replica in cluster.snapshot().replicas] == [None, None]


async def test_model_loaded_for_requests_is_reloaded_by_the_next_worker() -> None:
    async with clustered(COLD, kind="process") as cluster:
        await say(cluster, "hello", "cold")
        os.kill(pid_of(cluster), signal.SIGKILL)
        await eventually(lambda: [model.state for model in cluster.snapshot().models] == ["loading"] * 2)
        await eventually(lambda: [model.state for model in cluster.snapshot().models] == ["resident"] * 2)


@pytest.mark.slow
async def test_model_whose_loads_repeatedly_end_workers_is_marked_failed() -> None:
    soon = HealthLimits(first_delay_s=0.01, max_delay_s=0.01)
    async with clustered(COLD.replace("load_ms=300", f"load_ms={ENDLESS_MS}"), kind="process", health=soon) as cluster:
        asked = asyncio.create_task(say(cluster, "hello", "cold"))
        pid = 0
        for _ in range(MAX_LOST_LOADS + 1):
            await eventually(partial(is_replaced, cluster, pid))
            await eventually(lambda: state_of(cluster, "warm").state == "resident")
            assert (await say(cluster, "hello", "warm")).model == "warm", "it comes before what ends workers"
            await eventually(lambda: is_loading(cluster))
            pid = pid_of(cluster)
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"signal 9 .* while it loaded the model, as 5 times before") as told:
            await asked
        assert told.value.retry_after_s == MAX_BACKOFF_S
        assert state_of(cluster, "cold").state == "failed"
        assert (await say(cluster, "hello", "warm")).model == "warm"


def is_loading(cluster: Cluster) -> bool:
    """Whether it has begun a load, and was not only told to."""
    found = map(worker_of(cluster).lifecycle.replica, [replica.key for replica in cluster.snapshot().replicas])
    return any(replica is not None and replica.state is LoadState.LOADING for replica in found)


@contextmanager
def stopped(model: Cluster) -> Iterator[int]:
    """Let the worker hang, and be impatient with this one alone: another may be slow as the machine is."""
    pid, pulse = pid_of(model), worker_of(model).lifecycle.pulse
    os.kill(pid, signal.SIGSTOP)
    pulse.limits = HealthLimits(silence_s=1.0, load_s=1.0)
    try:
        yield pid
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGCONT)


async def test_a_worker_that_hangs_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with served("stub://alpha?step_ms=20", "process") as model:
        task = asyncio.create_task(answer(model, call("x", ENDLESS)))
        await running(model, 1)
        await eventually(lambda: worker_of(model).lifecycle.pulse.last_report.startswith("it last reported 1 running"))
        with (
            stopped(model) as pid,
            pytest.raises(WorkerLostError, match=r"SIGKILL\) after \d+ s without a message while it answered"),
        ):
            await task
        assert (await answer(model, call("abc"))).text == "[stub:alpha] ok len=3 max=40"
        assert not is_alive(pid)
    [told] = [record.getMessage() for record in caplog.records if "hangs" in record.getMessage()]
    assert f"killing the device worker (process {pid}), which hangs" in told
    assert "1 running and 0 waiting requests" in told
    assert "it has alpha loaded" in told


async def test_a_worker_that_reports_nothing_after_its_start_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    async with served("stub://alpha", "process") as model:
        first = pid_of(model)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: is_replaced(model, first))
        with stopped(model) as second:
            await eventually(lambda: model.worker_pid != second)
        assert (await answer(model, call("abc"))).text == "[stub:alpha] ok len=3 max=40"
        assert not is_alive(second)
    assert "without a message since its start; it has reported nothing" in caplog.text


async def test_a_worker_that_dies_over_its_first_load_is_a_failed_start() -> None:
    model = model_of(f"stub://alpha?load_ms={ENDLESS_MS}", "process")
    starting = asyncio.create_task(model.start())
    await eventually(lambda: model.worker_pid is not None)
    pid = pid_of(model)
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(WorkerLostError, match=r"signal 11 \(SIGSEGV\) while it loaded the model"):
        await starting
    assert not is_alive(pid)


async def test_a_failed_reload_is_reported_and_retried(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(pocket_path(), path)
    load = LoadOptions(EngineOptions(num_blocks=256), cache_dir=tmp_path / "cache")
    worker = WorkerOptions("process", trial=TrialOptions(enabled=False))
    model = one_model(str(path), load=load, worker=worker)
    await model.start()
    path.rename(tmp_path / "elsewhere")
    os.kill(pid_of(model), signal.SIGKILL)
    await eventually(lambda: model.card(None).tier == "failed")
    with pytest.raises(UnavailableError, match=r"could not be loaded again: .*no such file or directory"):
        await answer(model, call("abc"))
    (tmp_path / "elsewhere").rename(path)
    await eventually(lambda: model.health().ready)
    assert (await answer(model, call("abc"))).completions
    await model.close()


async def test_unknown_artifact_is_tried_before_its_load(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(pocket_path(), path)
    load = LoadOptions(EngineOptions(num_blocks=256), cache_dir=tmp_path / "cache")
    stages: list[str] = []
    worker = WorkerOptions("process")
    model = one_model(str(path), load=load, worker=worker, progress=lambda _, stage, fraction: stages.append(stage))
    await model.start()
    await model.close()
    assert stages.index("trial") < stages.index("ready")


async def test_worker_process_ignores_sigint_and_sigterm() -> None:
    async with served("stub://alpha", "process") as model:
        pid = pid_of(model)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        assert (await answer(model, call("abc"))).text == "[stub:alpha] ok len=3 max=40"
        assert model.worker_pid == pid


async def test_closing_ends_the_process_also_under_load() -> None:
    model = model_of("stub://alpha?step_ms=20", "process")
    await model.start()
    pid = pid_of(model)
    tasks = [asyncio.create_task(answer(model, call("x", ENDLESS))) for _ in range(5)]
    await running(model, 5)
    await model.close()
    assert not is_alive(pid)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, UnavailableError)


@pytest.mark.slow
async def test_closing_ends_a_process_that_listens_to_nothing() -> None:
    model = model_of("stub://alpha", "process")
    await model.start()
    pid = pid_of(model)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(model.close(), HANG_S)
    assert not is_alive(pid)


async def test_a_worker_that_does_not_answer_is_not_ready() -> None:
    async with served("stub://alpha", "process", HealthLimits(answer_s=1.5)) as model:
        os.kill(pid_of(model), signal.SIGSTOP)
        try:
            await eventually(lambda: not model.health().ready)
            assert "has not answered" in model.health().reason
        finally:
            os.kill(pid_of(model), signal.SIGCONT)
        await eventually(lambda: model.health().ready)


async def test_a_step_without_end_while_requests_wait_is_not_ready() -> None:
    async with served("stub://alpha?step_ms=1500", "process", HealthLimits(step_s=0.2)) as model:
        task = asyncio.create_task(answer(model, call("x", ENDLESS)))
        await eventually(lambda: not model.health().ready)
        assert "no step was completed" in model.health().reason
        task.cancel()
        await eventually(lambda: model.health().ready)


PARENT = """
import asyncio
from lockstep.worker.link import WorkerOptions
from tests.cluster.support import one_model, running

async def main():
    model = one_model({source!r}, worker=WorkerOptions("process"))
    await model.start()
    from lockstep.engine.request import GenerationRequest
    stream = model.stream(GenerationRequest("x"))
    task = asyncio.create_task(anext(stream))
    if {is_idle}:
        await task
    else:
        await running(model, 1)
    print(model.worker_pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "in a step"])
async def test_a_worker_whose_server_was_killed_ends_too(is_idle: bool) -> None:
    source = "stub://alpha" if is_idle else f"stub://alpha?step_ms={ENDLESS_MS}"
    program = PARENT.format(source=source, is_idle=is_idle)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        assert is_alive(pid)
        parent.kill()
        await eventually(lambda: not is_alive(pid))


async def test_a_defect_in_the_step_loop_ends_requests_and_the_worker_but_not_the_server() -> None:
    async with served("stub://alpha?step_ms=20", "thread") as model:
        task = asyncio.create_task(answer(model, call("x", ENDLESS)))
        await running(model, 1)
        link = worker_of(model).lifecycle.link
        assert isinstance(link, ThreadLink)
        with broken_steps(), pytest.raises(RequestFailedError, match="the device worker failed: ZeroDivisionError"):
            await task
        await eventually(lambda: worker_of(model).lifecycle.link is not link and model.health().ready)
        assert (await answer(model, call("abc"))).text == "[stub:alpha] ok len=3 max=40"
        await settled(model)


async def test_unloading_frees_the_name_for_another_load(tmp_path: Path) -> None:
    async with served("stub://alpha", "process") as model:
        worker, key = worker_of(model), model.snapshot().replicas[0].key
        await worker.unload(key)
        assert worker.loaded(key) is None
        with pytest.raises(ArtifactNotFoundError):
            await worker.load(key, str(tmp_path / "absent.gguf"), LoadOptions())
        await worker.load(key, "stub://beta", LoadOptions(EngineOptions(num_blocks=64)))
        assert (await answer(model, call("abc"))).text == "[stub:beta] ok len=3 max=40"
        assert await worker.reset_prefix_cache() == 1, "a block of the answer"


async def test_leaving_a_load_lets_it_go_and_frees_it() -> None:
    async with served("stub://alpha", "process") as model:
        options = LoadOptions(EngineOptions(num_blocks=64))
        leaving = asyncio.create_task(worker_of(model).load("other", "stub://beta?load_ms=500", options))
        await asyncio.sleep(0)  # it runs until it waits
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        loaded = await worker_of(model).load("other", "stub://gamma", options)
        assert loaded.name == "gamma"
