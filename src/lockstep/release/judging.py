"""From files to a verdict: both sides are read, the policy is put together, and the gate judges."""

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
from lockstep.release.policy import Layer, Policy, policy_of, with_settings
from lockstep.release.reading import Source, read
from lockstep.release.recordings import Recordings, is_recording, read_recordings
from lockstep.release.store import Store, open_store
from lockstep.release.triage import read_owners
from lockstep.release.verdict import Verdict
from lockstep.yaml_reading import read_plain, read_text


@dataclass(frozen=True, slots=True)
class PolicySources:
    """Sources of a policy beside the input, later ones over earlier ones."""

    file: Path | None = None
    """YAML or JSON; the policy may stand under ``policy:``."""
    settings: Sequence[str] = ()
    """``FIELD=VALUE``."""
    owners: Path | None = None
    """Patterns of signals and their owners."""

    def policy(self, name: str = "", fields: Mapping[str, Any] | None = None) -> Policy:
        """The policy over that of the input.

        Args:
            name: what the input is called.
            fields: the policy in it.

        Raises:
            EvidenceError: a source cannot be read, or has a field or value that no policy has.
        """
        layers = [Layer(name, fields)]
        if self.file is not None:
            layers.append(_layer_of(self.file))
        layers.append(Layer("--set", with_settings(self.settings)))
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
    """Both sides of a judgement, read into a store."""

    sources: list[Source]
    policy: dict[str, Any] | None
    """The policy in the input; None: it has none."""
    recordings: Recordings | None = None
    """The recordings that were read, where the files are such."""


def read_sides(store: Store, paths: Sequence[Path], names: Sequence[Path] | None = None) -> GateInput:
    """Read one file with both sides, or a file or recording of each.

    Args:
        names: of the files in messages, if they are copies of others.

    Raises:
        EvidenceError: a file cannot be read, or is no pair of sides.
    """
    recorded = [is_recording(path) for path in paths]
    if names is not None and any(recorded):
        name = names[recorded.index(True)]
        raise EvidenceError(f"{name}: a recording, which cannot be followed; lockstep gate judges it once it is whole")
    names = names or paths
    if len(paths) == 1:
        if recorded[0]:
            raise EvidenceError(f"{paths[0]}: a folder or recording is one side; give two: BASELINE CANDIDATE")
        source, policy = read(store, paths[0], None, names[0])
        return GateInput([source], policy)
    if any(recorded):
        recordings = read_recordings(store, list(paths))
        return GateInput(list(recordings.sources), None, recordings)
    found = [read(store, *each) for each in zip(paths, SIDES, names, strict=True)]
    return GateInput([source for source, _ in found], None)


def convert_files(paths: Sequence[Path], place: Path) -> tuple[list[Source], int]:
    """Write files of both sides as one input of the gate.

    Returns:
        What the files were, and the number of pairs.

    Raises:
        EvidenceError: a file cannot be read, or is no pair of sides.
    """
    with open_store() as store:
        sides = read_sides(store, paths)
        num_pairs = gather(store).joining.pairs
        write_gate_input(store, place, sides.policy)
    return sides.sources, num_pairs


class Judged(NamedTuple):
    """A verdict with what it is of."""

    verdict: Verdict
    policy: Policy
    evidence: Evidence
    """Its store is closed; its columns stay."""


def judge_files(
    paths: Sequence[Path],
    sources: PolicySources = PolicySources(),
    second: Path | None = None,
    gate_input: Path | None = None,
    names: Sequence[Path] | None = None,
) -> Judged:
    """Judge one file with both sides, or a file or recording of each.

    Args:
        second: answers of a second baseline, of the kind of the first one's.
        gate_input: where the converted files go, in a folder that is there; None: nowhere.
        names: of the files in messages, if they are copies of others.

    Raises:
        EvidenceError: the files, the policy or the owners cannot be read.
        UsageError: a second baseline without a file of the first.
    """
    if second is not None and len(paths) != 2:
        raise UsageError("--aa goes with two files: BASELINE CANDIDATE --aa SECOND_BASELINE")
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
