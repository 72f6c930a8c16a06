"""Backends of a manifest's models: their own sources, stubs, the embedded model, or any other one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote, urlencode

from lockstep.cluster.manifest import Entry, Manifest, Persona, Tier
from lockstep.cluster.recorded import RecordedBackend
from lockstep.executors.stub import SCHEME as STUB
from lockstep.executors.stub import StubOptions
from lockstep.pocket import GENERAL_PERSONA, PERSONAS, ROUTER_PERSONA

POCKET = "pocket://"


class Backend(StrEnum):
    """Source of all answers."""

    AUTO = "auto"
    """Every model by its source."""
    STUB = "stub"
    """Every model a fake without files, the remote ones too."""
    POCKET = "pocket"
    """Every model the embedded one with its persona, the remote ones too."""


@dataclass(frozen=True, slots=True)
class OneModel:
    """A backend of one model behind every name, the remote ones too; their personas are the manifest's."""

    source: str

    def __str__(self) -> str:
        return self.source


def served_by(manifest: Manifest, backend: Backend | OneModel | RecordedBackend) -> Manifest:
    """The manifest with sources that the backend has.

    A remote model becomes one that is loaded when it is needed; under ``auto`` only where its source is a stub, which
    stands for its server. A stub in the entry's place knows the words of the rule, wherever it comes from.
    """

    def served(entry: Entry) -> Entry:
        if isinstance(backend, RecordedBackend):
            return backend.served(entry)
        if isinstance(backend, OneModel):
            return replace(_local(entry), source=backend.source)
        if backend is Backend.POCKET:
            return _pocket(manifest, _local(entry))
        if entry.source.startswith(STUB):  # is one already, and keeps its options
            return _local(entry) if backend is Backend.STUB or entry.remote is None else entry
        return replace(_local(entry), source=STUB + quote(entry.id, safe="")) if backend is Backend.STUB else entry

    return replace(manifest, entries=tuple(_routing_stub(manifest, served(entry)) for entry in manifest.entries))


def _local(entry: Entry) -> Entry:
    return replace(entry, tier=Tier.STANDBY, remote=None) if entry.tier is Tier.REMOTE else entry


def _routing_stub(manifest: Manifest, entry: Entry) -> Entry:
    """Give a stub that routes its possible answers, unless its source has them; other entries stay as they are."""
    routing = manifest.routing
    if routing is None or routing.entry != entry.id or entry.tier is Tier.REMOTE or not entry.source.startswith(STUB):
        return entry
    options = StubOptions.parse(entry.source)
    *words, _ = routing.rule.constraint_words(manifest.targets)
    missing = {
        **({} if options.field else {"field": routing.rule.field_name}),
        **({} if options.ids else {"ids": ",".join(words)}),
    }
    if not missing:
        return entry
    return replace(entry, source=f"{entry.source}{'&' if '?' in entry.source else '?'}{urlencode(missing, safe=',')}")


def _pocket(manifest: Manifest, entry: Entry) -> Entry:
    """A persona that the manifest writes stands; the embedded ones were trained to follow the conversation."""
    if entry.system_prompt is not None:
        return replace(entry, source=POCKET)
    is_router = manifest.routing is not None and manifest.routing.entry == entry.id
    words = ROUTER_PERSONA if is_router else PERSONAS.get(entry.id, GENERAL_PERSONA)
    return replace(entry, source=POCKET, system_prompt=words, persona=Persona.SUFFIX)
