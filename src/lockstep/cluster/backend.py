"""Whom the models of a manifest are served by: their own sources, stubs, or the embedded model. Pure."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from urllib.parse import quote, urlencode

from lockstep.cluster.manifest import Entry, Manifest, Persona, Tier
from lockstep.executors.stub import SCHEME as STUB
from lockstep.pocket import GENERAL_PERSONA, PERSONAS, ROUTER_PERSONA

POCKET = "pocket://"


class Backend(StrEnum):
    """Where answers come from."""

    AUTO = "auto"
    """Every model by its source."""
    STUB = "stub"
    """Every model a fake without files, the remote ones too."""
    POCKET = "pocket"
    """Every model the embedded one with its persona, the remote ones too."""


def targets_of(manifest: Manifest) -> tuple[str, ...]:
    """Ids that the routing's rule may name, in order of definition."""
    routing = manifest.routing
    return () if routing is None else tuple(e.id for e in manifest.entries if e.set == routing.rule.set)


def served_by(manifest: Manifest, backend: Backend) -> Manifest:
    """The manifest with sources that the backend has; a remote model becomes one that is loaded when it is needed."""
    if backend is Backend.AUTO:
        return manifest
    change = _stub if backend is Backend.STUB else _pocket
    return replace(manifest, entries=tuple(change(manifest, _local(entry)) for entry in manifest.entries))


def _local(entry: Entry) -> Entry:
    return replace(entry, tier=Tier.STANDBY, remote=None) if entry.tier is Tier.REMOTE else entry


def _stub(manifest: Manifest, entry: Entry) -> Entry:
    """What is a stub already keeps its options."""
    if entry.source.startswith(STUB):
        return entry
    source = STUB + quote(entry.id, safe="")
    routing = manifest.routing
    if routing is not None and routing.entry == entry.id:
        *words, _ = routing.rule.constraint_words(targets_of(manifest))
        answers = {"field": routing.rule.field_name, "ids": ",".join(words)}
        source += "?" + urlencode(answers, safe=",")
    return replace(entry, source=source)


def _pocket(manifest: Manifest, entry: Entry) -> Entry:
    """A persona that the manifest writes stands; the embedded ones were trained to follow the conversation."""
    if entry.system_prompt is not None:
        return replace(entry, source=POCKET)
    is_router = manifest.routing is not None and manifest.routing.entry == entry.id
    words = ROUTER_PERSONA if is_router else PERSONAS.get(entry.id, GENERAL_PERSONA)
    return replace(entry, source=POCKET, system_prompt=words, persona=Persona.SUFFIX)
