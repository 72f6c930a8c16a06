"""What every test may rely on."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy is imported: of small matrices, two threads only wait

import pytest
from hypothesis import HealthCheck, settings

from lockstep.executors.machine import available_cores
from tests.waiting import Gate
from tools.slow_tests import KNOWN

NUM_LISTED_FILES = 30
"""Files whose durations a run prints at its end."""
settings.register_profile("lockstep", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("lockstep")  # no example is timed, and a failing one says how to have it again


def pytest_configure() -> None:
    """What the processes that tests start inherit.

    Ctrl-C reaches them, also where the tests themselves run in a shell's background. And the package is compiled once,
    not by each of some two hundred processes, also where the environment says that no bytecode be written.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that none is left to one worker alone at the end.

    Somebody watches the slow ones, and they may take long.
    """
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in KNOWN)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what `tests/documents` has run of the pages, and the files that took longest."""
    sums: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
        for name, tally in getattr(report, "user_properties", ()):
            if name == "documents" and report.when == "call":
                sums.update(tally)
    if sums:
        terminalreporter.write_line(
            f"documents: {sums['commands']} commands and {sums['snippets']} snippets ran, "
            f"{sums['targets']} targets are there; {sums['slow']} more do with `-m slow`, "
            f"{sums['by_hand']} are run by hand, {sums['missing']} need what is not on this machine, "
            f"{sums['shown']} blocks are only shown"
        )
    if len(seconds) > NUM_LISTED_FILES:
        listed = f"{NUM_LISTED_FILES} of {len(seconds)} files, {sum(seconds.values()):,.0f} s in all"
        terminalreporter.write_line(f"seconds by file ({listed}):")
        for name, taken_s in sorted(seconds.items(), key=lambda each: -each[1])[:NUM_LISTED_FILES]:
            terminalreporter.write_line(f"  {taken_s:6.1f}  {name}")


def pytest_collection_finish() -> None:
    """Twelve thousand collected tests stay to the end: no collection of garbage visits them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Extensions report what is never released."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def share_of_cores() -> Iterator[None]:
    """Executors take the share of the cores that this process of several has, unless a test names a number of threads.

    Threads of two processes on the same cores wait for each other, small models most of all. No bit depends on it.
    """
    share = max(1, available_cores() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.executors.native.executor.available_cores", lambda: share)
        yield


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A verb that runs in this process may configure logging: it does so for its test, and for none after it."""
    root, ours = logging.getLogger(), logging.getLogger("lockstep")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds the endless steps and loads of stubs in this process until the test opens it, or ends."""
    made = Gate()
    monkeypatch.setattr("lockstep.executors.stub.time", SimpleNamespace(sleep=made.sleep))
    yield made
    made.open()
