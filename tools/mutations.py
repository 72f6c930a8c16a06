"""Mutation tests: apply thirty small defects, one at a time, and check that the tests of their package fail.

`python -m tools.mutations` copies the tree, applies one mutation after the other to the copy, and runs the tests of its
package. A mutation that no test of the package catches survived, so the tests are insufficient. A run takes about an
hour on two cores: tests whose file names match the hint run first, and the whole package runs only if these pass.

A mutation is located by a regular expression on the source text, not by a path, so files and names may change. A
pattern that does not match exactly once must be corrected.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "tools", "benchmarks", "examples", "docs", "deploy", "pyproject.toml")
TIMEOUT_S = 1200.0
"""Time limit of one package in seconds; a test that hangs counts as caught."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One defect."""

    package: str
    pattern: str
    """Regular expression that matches exactly once in the package's code; group 0 is replaced."""
    replacement: str
    """Replacement, with ``\\1`` and so on for the pattern's groups."""
    hint: str
    """Regular expression for the names of test files that should catch it; empty: no hint."""


MUTATIONS: Sequence[Mutation] = (
    # The core: chunks, budgets, queue, prefix cache, blocks, turns, fingerprint.
    Mutation("core", r"remaining if may_end else remaining - 1", "remaining", "planning|policy"),
    Mutation("core", r"max\(share, 1\)", "min(share, 1)", "planning"),
    Mutation("core", r"\(num_prompt_tokens - 1\) // self", "num_prompt_tokens // self", "caching|policy"),
    Mutation("core", r"min\((num_computed) // (self\._block_size)", r"min(-(-\1 // \2)", "caching|oracle"),
    Mutation("core", r"len\(passed\) > (\w+)\.max_skips", r"len(passed) >= \1.max_skips", "admission|planner|planning"),
    Mutation("core", r"elif \w+\.seq_id in \w+\.victims:", "elif False:", "preemption"),
    Mutation("core", r"max\((self\._served\.get\(tenant, 0\)), floor\)", r"\1", "queue"),
    Mutation("core", r"priority - (num_steps //)", r"priority + \1", "queue|decode_shares"),
    Mutation("core", r"before = least$", "pass", "decode_shares"),
    Mutation("core", r"before = clock$", "pass", "decode_shares"),
    Mutation("core", r"blake2b\(parent \+ block,", "blake2b(block,", "prefix"),
    Mutation("core", r"(refs\(block\)) > 1 ", r"\1 > 2 ", "kv"),
    Mutation("core", r"last_sampled_step = (\w+\.step) - 1", r"last_sampled_step = \1", "admission|planner|planning"),
    # Input processing.
    Mutation("engine", r"reads_cache=request\.prompt_logprobs is None", "reads_cache=True", "prompt_logprobs"),
    Mutation(
        "engine", r"(params\.logprobs is None) and not params\.bad_words", r"\1 or not params.bad_words", "bad_words"
    ),
    Mutation("engine", r"\(min\(prompt_ids\), (max\(prompt_ids\))\)", r"(\1,)", "input_processing"),
    Mutation("engine", r"\(\*ends, \*params\.stop_token_ids\)", "ends", "stops"),
    Mutation("engine", r"1 <= (len\(request\.session_id\)) <= MAX", r"1 <= \1 < MAX", "sessions|input_processing"),
    Mutation("engine", r"(len\(prompt_ids\) \* num_stages,\s+)1,", r"\g<1>2,", "pooling|embeddings"),
    Mutation("engine", r"reason is not FinishReason\.ERROR and (generation\.pooler)", r"\1", "answers"),
    # Text deltas.
    Mutation("engine", r"= min\(found\)$", "= max(found)", "stops"),
    # The device scheduler.
    Mutation("worker", r"min\(able, key=\w+\)", "able[-1]", "turns|device_scheduler"),
    Mutation(
        "worker", r"min\((\w+\.credit_us \+ \w+ \* \w+\.grant_us), \w+\.grant_us\)", r"(\1)", "turns|device_scheduler"
    ),
    Mutation("worker", r'attrgetter\("priority", "last_turn"\)', 'attrgetter("last_turn")', "turns|device_scheduler"),
    Mutation("worker", r"(\w+\.credit_us) = \w+\.grant_us(\n\s+return None)", r"\1 = \1\2", "turns|device_scheduler"),
    # Dispatch and the cluster's planner.
    Mutation("cluster", r"value is None or value\.lower\(\) == NONE_OF_THESE", "value is None", "dispatch"),
    Mutation("cluster", r"if len\(set\(words\)\) == 1", "if words", "dispatch"),
    Mutation("cluster", r"if id_ not in renamed and id_ not in", "if id_ not in", "dispatch"),
    Mutation("cluster", r"\(0, 0\) if is_overdue else ", "", "planner"),
    Mutation("cluster", r"\((\w+)\.num_lost, \*urgency", "(0, *urgency", "planner"),
    Mutation("cluster", r"(others \+ measured_bytes) <= ", r"\1 < ", "planner"),
    # A vocabulary's row, a rate, a run's price.
    Mutation(
        "artifacts", r"(_fifth_bits\(blocks\[\.\.\., )2:6(\]\), _half\(blocks, 0\), zero_point=16)", r"\g<1>1:5\2", ""
    ),
    Mutation("server", r"min\((self\._capacity), (self\._level \+ \w+)\)", r"\2", "limits|admission"),
    Mutation("replay", r"(growth = \w+ \* \(\w+ \* \(\w+) - 1\)", r"\1)", "cost|run_lengths"),
)


def place_of(package: Path, mutation: Mutation) -> tuple[Path, str]:
    """File of the package that the mutation changes, and its text with the defect."""
    found: list[tuple[Path, str]] = []
    for path in sorted((package / mutation.package).rglob("*.py")):
        text, count = re.subn(mutation.pattern, mutation.replacement, path.read_text(), flags=re.MULTILINE)
        found += [(path, text)] * count
    assert len(found) == 1, (
        f"{mutation.package}: {mutation.pattern!r} matches {len(found)} times, not once; correct the mutation"
    )
    return found[0]


def outcomes(root: Path, mutations: Sequence[Mutation]) -> Iterator[tuple[Mutation, str]]:
    """Outcome of each mutation: the test run that caught it, or that it survived."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        scratch = Path(folder)
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(root / name, scratch / name)
        for mutation in mutations:
            path, text = place_of(scratch / "src" / "lockstep", mutation)
            before = path.read_text()
            path.write_text(text)
            try:
                yield mutation, _outcome(scratch, mutation)
            finally:
                path.write_text(before)


def _outcome(scratch: Path, mutation: Mutation) -> str:
    folder = scratch / "tests" / mutation.package
    hinted = [
        path for path in sorted(folder.rglob("test_*.py")) if mutation.hint and re.search(mutation.hint, path.name)
    ]
    for tests, what in ((hinted, "its own tests"), ([folder], "the package")):
        if tests and not _passes(scratch, tests):
            return f"caught by {what}"
    return "SURVIVED"


def _passes(scratch: Path, tests: Sequence[Path]) -> bool:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(scratch / "src"), str(scratch)))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "--dist", "loadfile", *map(str, tests)]
    try:
        done = subprocess.run(
            command, cwd=scratch, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    assert done.returncode in (0, 1, 2), done.stdout[-4000:]
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="tree to mutate")
    parser.add_argument("--package", help="only mutations of this package")
    parser.add_argument("--only", type=int, help="only the mutation with this number, from 0")
    parser.add_argument("--places", action="store_true", help="only check that the patterns match")
    asked = parser.parse_args()
    chosen = MUTATIONS if asked.only is None else MUTATIONS[asked.only : asked.only + 1]
    mutations = [each for each in chosen if asked.package in (None, each.package)]
    if asked.places:
        for each in mutations:
            print(place_of(asked.root / "src" / "lockstep", each)[0].relative_to(asked.root), each.pattern)
        return
    survived = 0
    for mutation, outcome in outcomes(asked.root, mutations):
        survived += outcome == "SURVIVED"
        print(f"{mutation.package:10} {outcome:22} {mutation.pattern}  ->  {mutation.replacement}", flush=True)
    print(f"{len(mutations) - survived} of {len(mutations)} caught")


if __name__ == "__main__":
    main()
