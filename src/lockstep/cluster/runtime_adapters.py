"""Adapters that are loaded and unloaded at runtime: each change replaces the manifest by one with another model.

The base model and its open requests are not affected. The changes last until the next manifest is applied, or the
server ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from lockstep.cluster.backend import Backend
from lockstep.cluster.manifest import Manifest, ModelEntry
from lockstep.cluster.manifest_keys import NameShape, check_name
from lockstep.cluster.manifest_permissions import ADAPTER_REFUSED, OperatorNames, Permissions
from lockstep.cluster.models import Model
from lockstep.cluster.reload import Reloads
from lockstep.cluster.resolve import open_manifest
from lockstep.cluster.state import ClusterState
from lockstep.cluster.threads import in_thread
from lockstep.errors import ConfigError, InvalidParameterError, ModelNotFoundError, UnavailableError
from lockstep.spelling import did_you_mean, listed

MAX_NAME_CHARS = 256


class RuntimeAdapters:
    """Loads and unloads adapters of a cluster, one at a time. Used from one event loop."""

    def __init__(self, state: ClusterState, reloads: Reloads, names: OperatorNames) -> None:
        self._state = state
        self._reloads = reloads
        self._names = names
        self._lock = asyncio.Lock()

    async def load(
        self, name: str, path: str, permissions: Permissions, base: str | None = None, *, replaces: bool = False
    ) -> None:
        """Serve an adapter as a model; returns when requests can name it.

        Args:
            base: name of a model whose source the adapter belongs to; None: that of a replaced adapter, or the only
                one that accepts adapters.
            replaces: whether an adapter of this name is replaced, once its files were found to be valid. Its names, its
                persona and its place in the routing stay.

        Raises:
            InvalidParameterError: the name is taken or not valid, several bases are possible, or the sender may not
                name this path.
            LockstepError: the adapter cannot be used; nothing was changed.
        """
        async with self._lock:
            if not (permissions.any_source or self._names.may_open_adapter(path)):
                raise InvalidParameterError(f"lora_path {ADAPTER_REFUSED}", param="lora_path")
            if self._state.options.backend is not Backend.AUTO:
                raise InvalidParameterError(f"models of --backend {self._state.options.backend} have no adapters")
            manifest, known = self._state.models.declared, self._known(name, replaces)
            source = known if known is not None and base is None else self._base(base)
            entry = _adapted(source, known or ModelEntry(name, source.source), path)
            entries = tuple([entry if each is known else each for each in manifest.entries])
            await self._apply(replace(manifest, entries=entries if known else (*entries, entry)), entry.id)

    async def unload(self, name: str) -> None:
        """Stop to serve an adapter. Its open requests end normally.

        Raises:
            ModelNotFoundError: no adapter has this name.
            InvalidParameterError: the manifest routes to it.
        """
        async with self._lock:
            manifest = self._state.models.declared
            entry = next((each for each in manifest.entries if each.id == name and each.adapter is not None), None)
            if entry is None:
                known = [each.id for each in manifest.entries if each.adapter is not None]
                hint = did_you_mean(name, known) or (f"loaded are {listed(known)}" if known else "none is loaded")
                raise ModelNotFoundError(f"The lora adapter '{name}' cannot be found; {hint}", param="lora_name")
            if _is_used(manifest, entry):
                raise InvalidParameterError(
                    f"{name!r} is part of the manifest's routing; apply a manifest without it", param="lora_name"
                )
            kept = tuple([each for each in manifest.entries if each is not entry])
            await self._apply(replace(manifest, entries=kept), name)

    async def _apply(self, manifest: Manifest, changed: str) -> None:
        """Apply a manifest that differs in one adapter. Only the files of that adapter are read."""
        self._reloads.check(manifest)
        state, before = self._state, self._state.opened
        assert before is not None, "models were found"
        others = {id_: adapter for id_, adapter in before.adapters.items() if id_ != changed}
        known, held_bytes = replace(before, adapters=others), state.replicas.held_bytes
        opened = await in_thread(
            partial(open_manifest, manifest, state.options.load, held_bytes, known=known), state.system
        )
        self._reloads.check(manifest)
        if state.opened is not before:
            raise UnavailableError("another manifest was applied meanwhile; try again")
        await self._reloads.replace(manifest, None, state.weighed(opened))

    def _base(self, name: str | None) -> ModelEntry:
        """Declared entry of the model to which an adapter is added."""
        if name is not None:
            try:
                model = self._state.models.find(name)
            except ModelNotFoundError as error:
                raise ModelNotFoundError(str(error), param="base_model_name") from None
            if not _accepts_adapters(model):
                raise InvalidParameterError(_NOT_ENABLED.format(model.id), param="base_model_name")
            return model.declared
        bases: dict[str, Model] = {}
        for model in self._state.models.by_id.values():
            if model.replica is not None and _accepts_adapters(model):
                bases.setdefault(model.replica.key, model)
        if len(bases) == 1:
            return next(iter(bases.values())).declared
        if bases:
            ids = [model.id for model in bases.values()]
            raise InvalidParameterError(f"base_model_name must be one of {listed(ids, 'or')}", param="base_model_name")
        raise InvalidParameterError(_NOT_ENABLED.format("this server"), param="lora_name")

    def _known(self, name: str, replaces: bool) -> ModelEntry | None:
        """Declared entry of the adapter that is replaced; None: the name can be that of a new model."""
        models = self._state.models
        known = next((each for each in models.declared.entries if name in (each.id, *each.aliases)), None)
        if known is not None and known.adapter is None:
            raise InvalidParameterError(f"{name!r} is the name of a model that is no adapter", param="lora_name")
        if known is not None and not replaces:
            raise InvalidParameterError(
                f"The lora adapter '{name}' has already been loaded. To replace it, set 'load_inplace' to true.",
                param="lora_name",
            )
        try:
            if not self._state.options.is_fixed:
                check_name(name, NameShape.NAME)
            elif len(name) > MAX_NAME_CHARS or not name.isprintable() or name == models.declared.cluster:
                raise ConfigError(f"has more than {MAX_NAME_CHARS} characters, or some that do not print")
        except ConfigError as error:
            raise InvalidParameterError(f"lora_name {error}", param="lora_name") from None
        return known


_NOT_ENABLED = "{} was loaded without adapters; start the server with --enable-lora, or set enable_lora in `engine:`"


def _accepts_adapters(model: Model) -> bool:
    return model.replica is not None and model.replica.spec.options.has_adapters


def _adapted(base: ModelEntry, named: ModelEntry, path: str) -> ModelEntry:
    """A model of the base's replica with an adapter, and with the names, the persona and the routing of an entry."""
    return replace(
        base,
        id=named.id,
        set=named.set,
        aliases=named.aliases,
        co_activation=named.co_activation,
        promotes_on_intent=named.promotes_on_intent,
        system_prompt=named.system_prompt,
        persona=named.persona,
        sampling=named.sampling,
        adapter=path,
    )


def _is_used(manifest: Manifest, entry: ModelEntry) -> bool:
    """True if other parts of a manifest name a model."""
    routing = manifest.routing
    is_routed = routing is not None and (entry.id == routing.entry or entry.set == routing.rule.set)
    return (
        is_routed or entry.id == manifest.fallback or any(entry.id in each.co_activation for each in manifest.entries)
    )
