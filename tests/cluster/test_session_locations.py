"""Where sessions are is asked of the worker, as seldom as many who want to know allow."""

from __future__ import annotations

import asyncio

from lockstep.cluster.cluster import Cluster
from lockstep.cluster.sessions import Sessions, StoredTokens
from lockstep.cluster.snapshot import SessionSnapshot
from tests.cluster.clusters import clustered, say
from tests.cluster.support import worker_of

TWO = "cluster: c\nmodels:\n  m: {source: 'stub://m'}\n  other: {source: 'stub://o'}\n"
LONG = "hello " * 20


def session_in(cluster: Cluster) -> SessionSnapshot:
    [session] = cluster.sessions()
    return session


async def test_a_session_of_two_models_reports_the_tokens_of_both() -> None:
    async with clustered(TWO) as cluster:
        await say(cluster, LONG, "m", session="s")
        await cluster.locate_sessions()
        one = session_in(cluster).num_tokens
        await say(cluster, LONG, "other", session="s")
        await cluster.locate_sessions()
        session = session_in(cluster)
        assert (one > 0, session.num_tokens, session.place, session.num_stored_tokens) == (True, 2 * one, "device", 0)


async def test_concurrent_location_requests_share_queries() -> None:
    async with clustered(TWO) as cluster:
        await say(cluster, LONG, "m", session="s")
        first = worker_of(cluster)._open.next_id()
        await asyncio.gather(*(cluster.locate_sessions() for _ in range(50)))
        assert 2 <= worker_of(cluster)._open.next_id() - first - 1 <= 4, "one question, and perhaps the next"
        assert session_in(cluster).num_tokens > 0


async def test_without_sessions_locate_sessions_sends_no_request() -> None:
    async with clustered(TWO) as cluster:
        first = worker_of(cluster)._open.next_id()
        await cluster.locate_sessions()
        assert worker_of(cluster)._open.next_id() == first + 1


async def test_cancelled_caller_does_not_end_the_query_of_others() -> None:
    async with clustered(TWO) as cluster:
        await say(cluster, LONG, "m", session="s")
        leaving, staying = (asyncio.create_task(cluster.locate_sessions()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await staying
        assert leaving.cancelled()
        assert session_in(cluster).num_tokens > 0
        await cluster.locate_sessions(limit_s=0.0)
        assert session_in(cluster).num_tokens > 0, "what is remembered stays"


def test_stored_tokens_without_tier_counts_have_no_location() -> None:
    """As one that began anew does for each model that it loads: they are not nowhere."""
    sessions = Sessions()
    sessions.store("s", "m", StoredTokens(96, 0, 0), now_s=1.0)
    [told] = sessions.snapshot(now_s=2.0)
    assert (told.place, told.num_stored_tokens, told.num_host_tokens, told.num_disk_tokens) == (None, 96, None, None)
    sessions.store("s", "m", StoredTokens(96, 64, 96), now_s=3.0)
    [told] = sessions.snapshot(now_s=4.0)
    assert (told.place, told.num_stored_tokens, told.num_host_tokens, told.num_disk_tokens) == ("host", 96, 64, 96)
