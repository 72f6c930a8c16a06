"""Backends of a manifest's models: replaces their sources by stubs, the embedded model or another one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import quote, urlencode

from lockstep.cluster.manifest import Manifest, ModelEntry, Persona, Tier
from lockstep.cluster.nearest import NearestRule
from lockstep.cluster.recorded import RecordedBackend
from lockstep.executors.stub import SCHEME as STUB
from lockstep.executors.stub import StubOptions
from lockstep.pocket import GENERAL_PERSONA, PERSONAS, ROUTER_PERSONA
from lockstep.pocket import SCHEME as EMBEDDED


class Backend(StrEnum):
    """Backend that serves all models."""

    AUTO = "auto"
    """Each model is served from its own source."""
    STUB = "stub"
    """Each model, including remote ones, is replaced by a stub without files."""
    POCKET = "pocket"
    """Each model, including remote ones, is replaced by the embedded model with a persona."""


@dataclass(frozen=True, slots=True)
class OneModel:
    """Backend that serves one model under every name, including remote ones; personas come from the manifest."""

    source: str

    def __str__(self) -> str:
        return self.source


def served_by(manifest: Manifest, backend: Backend | OneModel | RecordedBackend) -> Manifest:
    """Return the manifest with the backend's sources.

    A remote model becomes a standby model. Under ``auto`` this applies only if its source is a stub, which stands in
    for its server. A stub in place of the entry model is configured with the words of the rule, wherever its source
    comes from.
    """

    def served(entry: ModelEntry) -> ModelEntry:
        if backend is not Backend.AUTO:
            entry = replace(entry, adapter=None)  # adapters belong to the sources that the backend replaces
        if isinstance(backend, RecordedBackend):
            return backend.served(entry)
        if isinstance(backend, OneModel):
            return replace(_local(entry), source=backend.source)
        if backend is Backend.POCKET:
            return _pocket(manifest, _local(entry))
        if entry.source.startswith(STUB):  # a stub already; keep its options
            return _local(entry) if backend is Backend.STUB or entry.remote is None else entry
        return replace(_local(entry), source=STUB + quote(entry.id, safe="")) if backend is Backend.STUB else entry

    return replace(manifest, entries=tuple(_routing_stub(manifest, served(entry)) for entry in manifest.entries))


def _local(entry: ModelEntry) -> ModelEntry:
    return replace(entry, tier=Tier.STANDBY, remote=None) if entry.tier is Tier.REMOTE else entry


def _routing_stub(manifest: Manifest, entry: ModelEntry) -> ModelEntry:
    """Add the possible answers to a stub that is the entry model, unless its source has them; other entries stay as
    they are."""
    routing = manifest.routing
    if routing is None or routing.entry != entry.id or entry.tier is Tier.REMOTE or not entry.source.startswith(STUB):
        return entry
    options = StubOptions.parse(entry.source)
    if isinstance(routing.rule, NearestRule):
        return entry
    *words, _ = routing.rule.constraint_words(manifest.targets)
    missing = {
        **({} if options.field else {"field": routing.rule.field_name}),
        **({} if options.ids else {"ids": ",".join(words)}),
    }
    if not missing:
        return entry
    return replace(entry, source=f"{entry.source}{'&' if '?' in entry.source else '?'}{urlencode(missing, safe=',')}")


def _pocket(manifest: Manifest, entry: ModelEntry) -> ModelEntry:
    """Replace an entry by the embedded model. A persona of the manifest is kept; the embedded personas were trained to
    follow the conversation."""
    if entry.system_prompt is not None:
        return replace(entry, source=EMBEDDED)
    is_router = manifest.routing is not None and manifest.routing.entry == entry.id
    words = ROUTER_PERSONA if is_router else PERSONAS.get(entry.id, GENERAL_PERSONA)
    return replace(entry, source=EMBEDDED, system_prompt=words, persona=Persona.SUFFIX)
