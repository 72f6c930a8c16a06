"""Slow test files: lists the files of a test run that exceed the time limit of the default suite.

    make test-times

It reads a report of `pytest --junitxml`. It exits with 1 and lists each file over `LIMIT_S` that is not `KNOWN`. It
also lists known files that have become faster, so that the list gets shorter. Measure on two quiet cores, because the
seconds are wall time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 8.0
"""Maximum seconds of a test file. `--dist loadfile` distributes whole files, so the longest one limits two workers."""
KNOWN = frozenset(
    {
        "tests/cli/test_models_hub.py",
        "tests/cli/test_models.py",
        "tests/cli/test_ps.py",
        "tests/cli/test_replay_why.py",
        "tests/cli/test_serve.py",
        "tests/cli/test_serve_manifest.py",
        "tests/cli/test_terminal.py",
        "tests/cluster/test_remote.py",
        "tests/cluster/test_supervision.py",
        "tests/determinism/test_constrained.py",
        "tests/determinism/test_same_bytes.py",
        "tests/documents/test_pages.py",
        "tests/executors/native/test_golden_logits.py",
        "tests/executors/test_rejection_sampling.py",
        "tests/hosts/test_own_cluster.py",
        "tests/hosts/test_ray_runtime.py",
        "tests/replay/render/test_replay_page.py",
        "tests/replay/test_live.py",
        "tests/server/responses/test_routes.py",
        "tests/server/test_app_openapi.py",
        "tests/server/test_promises.py",
        "tests/server/test_run.py",
        "tests/server/tools/test_forced_calls.py",
    }
)
"""Files that were over the limit when it was set. Only tests that start Ray nodes, and the documents, may be added."""


def seconds_by_file(report: Path, root: Path = ROOT) -> dict[str, float]:
    """Seconds of each test file including set-up and teardown, longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[_file_of(case.get("classname", ""), root)] += float(case.get("time", 0.0))
    return dict(sorted(seconds.items(), key=lambda each: (-each[1], each[0])))


def _file_of(class_name: str, root: Path) -> str:
    """Path of `tests.cli.test_ps` or `tests.cli.test_ps.TestClass`; a name without a file is returned unchanged."""
    parts = class_name.split(".")
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[:end]) + ".py"
        if (root / path).is_file():
            return path
    return class_name


def lines_about(seconds: Mapping[str, float], known: frozenset[str] = KNOWN) -> tuple[list[str], bool]:
    """Lines to print, and True if an unknown file is over the limit."""
    over = {name: took for name, took in seconds.items() if took > LIMIT_S}
    lines = [f"{took:7.1f} s  {name}{'' if name in known else '  over the limit'}" for name, took in over.items()]
    lines += [
        f"{seconds[name]:7.1f} s  {name}  is within {LIMIT_S:g} s: remove it from KNOWN"
        for name in sorted(known & seconds.keys() - over.keys())
    ]
    lines += [f"      ? s  {name}  was not run: it was removed or renamed" for name in sorted(known - seconds.keys())]
    return lines, not over.keys() <= known


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tools.slow_tests REPORT.xml", file=sys.stderr)
        return 2
    lines, is_wrong = lines_about(seconds_by_file(Path(arguments[0])))
    print("\n".join(lines))
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
