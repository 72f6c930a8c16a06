"""Judging of files: reads both sides, assembles the policy, and runs the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import ConfigError, EvidenceError, UsageError
from lockstep.release.decisions import with_decisions
from lockstep.release.evidence import Evidence, gather
from lockstep.release.gate import SecondBaseline, judge
from lockstep.release.mirroring import write_gate_input
from lockstep.release.observation import SIDES
from lockstep.release.policy import Layer, Policy, parsed_settings, policy_of
from lockstep.release.reading import Source, read
from lockstep.release.recordings import Recordings, is_recording, read_recordings
from lockstep.release.store import Store, open_store
from lockstep.release.triage import read_owners
from lockstep.release.verdict import Verdict
from lockstep.yaml_reading import read_plain, read_text


@dataclass(frozen=True, slots=True)
class PolicySources:
    """Sources of a policy in addition to the input file. Later sources override earlier ones."""

    file: Path | None = None
    """YAML or JSON file. The policy may be nested under ``policy:``."""
    settings: Sequence[str] = ()
    """Settings of the form ``FIELD=VALUE``."""
    owners: Path | None = None
    """File with patterns of signals and their owners."""

    def policy(self, name: str = "", fields: Mapping[str, Any] | None = None) -> Policy:
        """Policy of these sources, which override the policy in the input file.

        Args:
            name: name of the input file, for messages.
            fields: policy in the input file.

        Raises:
            EvidenceError: a source cannot be read, or has an unknown field or an invalid value.
        """
        layers = [Layer(name, fields)]
        if self.file is not None:
            layers.append(_layer_of(self.file))
        layers.append(Layer("--set", parsed_settings(self.settings)))
        if self.owners is not None:
            layers.append(Layer(str(self.owners), {"owners": read_owners(self.owners)}))
        return policy_of(*layers)


def _layer_of(path: Path) -> Layer:
    try:
        found, lines = read_plain(read_text(path, "the policy"), str(path))
    except (ConfigError, UsageError) as error:
        raise EvidenceError(str(error)) from None
    if isinstance(found, dict) and isinstance(found.get("policy"), dict):
        inner = {where.removeprefix("policy."): line for where, line in lines.items() if where.startswith("policy.")}
        return Layer(str(path), found["policy"], inner)
    return Layer(str(path), {} if found is None else found, lines)


class GateInput(NamedTuple):
    """Input of the gate after both sides were read into a store."""

    sources: list[Source]
    policy: dict[str, Any] | None
    """Policy in the input file; None: it contains none."""
    recordings: Recordings | None = None
    """Recordings among the input files; None: there are none."""


def read_sides(store: Store, paths: Sequence[Path], names: Sequence[Path] | None = None) -> GateInput:
    """Read one file with both sides, or one file or recording per side.

    Args:
        names: paths of the original files, for messages, if `paths` are copies.

    Raises:
        EvidenceError: a file cannot be read, or does not contain the expected sides.
    """
    recorded = [is_recording(path) for path in paths]
    if names is not None and any(recorded):
        name = names[recorded.index(True)]
        raise EvidenceError(f"{name}: recordings cannot be followed; use lockstep gate when the recording is complete")
    names = names or paths
    if len(paths) == 1:
        if recorded[0]:
            raise EvidenceError(f"{paths[0]}: a folder or recording has one side only; pass two: BASELINE CANDIDATE")
        source, policy = read(store, paths[0], None, names[0])
        return GateInput([source], policy)
    if any(recorded):
        recordings = read_recordings(store, list(paths))
        return GateInput(list(recordings.sources), None, recordings)
    found = [read(store, *each) for each in zip(paths, SIDES, names, strict=True)]
    return GateInput([source for source, _ in found], None)


def convert_files(paths: Sequence[Path], target: Path) -> tuple[list[Source], int]:
    """Convert input files to one file with both sides.

    Returns:
        Descriptions of the input files, and the number of pairs.

    Raises:
        EvidenceError: a file cannot be read, or does not contain the expected sides.
    """
    with open_store() as store:
        sides = read_sides(store, paths)
        num_pairs = gather(store).joining.pairs
        write_gate_input(store, target, sides.policy)
    return sides.sources, num_pairs


class Judged(NamedTuple):
    """Verdict with its policy and evidence."""

    verdict: Verdict
    policy: Policy
    evidence: Evidence
    """Evidence of the verdict. Its store is closed, but its columns remain usable."""


def judge_files(
    paths: Sequence[Path],
    sources: PolicySources = PolicySources(),
    second: Path | None = None,
    gate_input: Path | None = None,
    names: Sequence[Path] | None = None,
) -> Judged:
    """Judge one file with both sides, or one file or recording per side.

    Args:
        second: file of a second baseline, in the format of the first.
        gate_input: path for the converted input, in an existing folder; None: it is not written.
        names: paths of the original files, for messages, if `paths` are copies.

    Raises:
        EvidenceError: the files, the policy or the owners cannot be read.
        UsageError: there is a second baseline, but the first one does not have its own file.
    """
    if second is not None and len(paths) != 2:
        raise UsageError("--aa requires two files: BASELINE CANDIDATE --aa SECOND_BASELINE")
    with ExitStack() as stores:
        store = stores.enter_context(open_store())
        sides = read_sides(store, paths, names)
        rules = sources.policy(str(sides.sources[0].path), sides.policy)
        evidence = gather(store, rules)
        beside = None
        if second is not None:
            second_store = stores.enter_context(open_store())
            source = read_sides(second_store, (paths[0], second)).sources[1]
            beside = SecondBaseline(gather(second_store, rules), source)
        verdict = judge(rules, evidence, tuple(sides.sources), beside)
        if gate_input is not None:
            write_gate_input(store, gate_input, sides.policy)
    if sides.recordings is not None:
        verdict = with_decisions(verdict, sides.recordings.decisions(), sides.recordings.notes)
    return Judged(verdict, rules, evidence)
