"""Every sentence of a row of docs/coming-from.md is run, is tested elsewhere, or states nothing that could be run."""

from __future__ import annotations

from collections.abc import Mapping

from tests.coming_from import test_engines, test_nrt, test_runtime_lab
from tests.coming_from.page import ROOT, RUN, SENTENCES

MODULES = (test_engines, test_nrt, test_runtime_lab)
"""Importing them fills `RUN`."""
ELSEWHERE: Mapping[str, str] = {
    "One more request gets 429 with `Retry-After`.": "tests/server/test_admission_limits.py",
    "Ends with 504, or an error frame in a stream.": "tests/server/test_completions.py",
    "Ends with 408 when no step has computed anything of it.": "tests/engine/test_deadlines.py",
    "More sessions wait in a bounded queue.": "tests/cluster/test_sessions.py",
    "The same as `--host` and `--port`.": "tests/cli/test_serve.py",
    "The default, 1 GiB. A manifest's `host_kv_budget` replaces it.": "tests/cluster/test_resolve.py",
    "Also on disk: sessions survive a restart of the server.": "tests/server/test_sessions_survive.py",
    "Prints NRT's published figures in the last column. [Figures](#figures-beside-nrts)": "tests/bench/test_cluster.py",
    "Four prompts of 32 tokens at temperature 0, and routed requests. [Figures](#figures-beside-nrts)": (
        "tests/benchmarks/test_routed.py"
    ),
    "Replicas of a model on any machines of the Ray cluster.": "tests/hosts/test_two_hosts.py",
    "What each replica reserves.": "tests/hosts/test_values.py",
    "Lists replicas and hosts. `--drain` moves a host's work to the others.": "tests/cli/test_ps.py",
    "The next request goes to the replica that has its KV.": "tests/core/test_balancer.py",
}
"""What needs a server of its own, several hosts or a long run, and the tests that have them."""
EXPLAINED = frozenset({"Any OpenAI client works as well."})
"""Sentences that state nothing that could be run."""


def test_every_sentence_is_accounted_for() -> None:
    assert SENTENCES - RUN - ELSEWHERE.keys() - EXPLAINED == set()
    assert (ELSEWHERE.keys() | EXPLAINED) - SENTENCES == set()
    assert RUN & (ELSEWHERE.keys() | EXPLAINED) == set()


def test_tests_elsewhere_exist() -> None:
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []
