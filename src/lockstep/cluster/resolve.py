"""Resolve a manifest's artifacts: sources opened and checked, distinguished by content, and their bytes counted.

Reads files and may fetch them from the hub, so it runs on a thread of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.artifacts.hub.source import SCHEME as HUB
from lockstep.artifacts.hub.source import HubSource, match_hub_source, parse_hub_source
from lockstep.artifacts.model import TokenizerParts
from lockstep.artifacts.source import open_artifact
from lockstep.cluster.budget import BudgetTable, Footprint, Machine, Need, Origin, check, effective_budgets, predict
from lockstep.cluster.manifest import Entry, Manifest, Resources, Tier
from lockstep.cluster.replica_state import ReplicaSpec
from lockstep.engine.chat_template import ChatTemplate
from lockstep.engine.loading import CORRECT_TEMPLATE, default_cache_dir, download_stage
from lockstep.engine.options import EngineOptions, LoadOptions, Progress, check_limits, check_sizes
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError, ConfigError
from lockstep.executors.machine import available_memory_bytes, machine_memory_bytes
from lockstep.executors.stub import DECLARED_BYTES, StubOptions, read_answers, stub_tokenizer_parts
from lockstep.executors.stub import SCHEME as STUB
from lockstep.hosts.values import GroupOptions
from lockstep.worker.messages import Loaded

DEFAULT_KV_BYTES = 512 * 1024**2
"""Of a replica's KV pool, if nothing sets it; no pool is larger than it can use."""
STUB_BLOCKS = 8192
"""Of a stub, whose blocks hold nothing: enough for 16 whole contexts."""
KEY_DIGITS = 12
LoadProgress = Callable[[str, str, float], None]
"""Called with a model's id, the stage to which its loading has come, and how much of that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A manifest whose models can be loaded."""

    manifest: Manifest
    """As the backend serves it."""
    specs: Mapping[str, ReplicaSpec]
    """By model id; none of remote ones."""
    needs: tuple[Need, ...]
    """Of every model, in order of definition."""
    table: BudgetTable


def open_manifest(
    manifest: Manifest,
    base: LoadOptions,
    held_bytes: int = 0,
    progress: LoadProgress | None = None,
    *,
    is_alone: bool | None = None,
) -> Opened:
    """Open every source that is not remote.

    Args:
        manifest: as the backend serves it.
        base: how models are loaded, where their own ``engine`` does not say otherwise.
        held_bytes: what loaded models take already, and a manifest that replaces theirs may take anew.
        progress: report about each source, under the first of its models, and while it comes from the hub.
        is_alone: as `has_device_alone` of a manifest of which this is a part; None: it is whole.

    Raises:
        ArtifactError: a source cannot be served; the message names the model.
        ConfigError: a remote model says not where it is, or an ``engine`` cannot work with its model or this machine.
        ChatTemplateError: a ``chat_template`` is not Jinja, or fails on every conversation.
    """
    for entry in manifest.entries:
        if entry.tier is Tier.REMOTE and entry.remote is None:
            raise ConfigError(
                f"{entry.id}: a remote model needs remote.base_url under the backend auto; "
                "give it, or serve with --backend stub or pocket"
            )
    first_ids = {entry.source: entry.id for entry in reversed(manifest.entries) if entry.tier is not Tier.REMOTE}
    sources = {source: Source.open(source, base, first_ids[source], progress) for source in sorted(first_ids)}
    return weigh(manifest, sources, base, held_bytes, has_device_alone(manifest) if is_alone is None else is_alone)


def weigh(
    manifest: Manifest, sources: Mapping[str, Source], base: LoadOptions, held_bytes: int, is_alone: bool
) -> Opened:
    """Decide how each model is loaded, and what it takes of which budget; as `open_manifest`.

    Args:
        sources: of all its models that are not remote, opened.
    """
    engine = replace(base.engine, order=base.engine.order or "priority")
    num_replicas = sum(_group_of(manifest, source).num for source in sources)
    base = replace(base, engine=engine if is_alone else _with_pools(engine, manifest.resources, num_replicas))
    specs: dict[str, ReplicaSpec] = {}
    footprints: dict[str, Footprint] = {}
    for entry in manifest.entries:
        if entry.tier is not Tier.REMOTE:
            options = sources[entry.source].options(entry, base, is_alone)
            group = _group_of(manifest, entry.source, entry.variant)
            footprint = sources[entry.source].footprint(entry, options.engine)
            footprint = replace(footprint, resident_bytes=footprint.resident_bytes * group.num)
            spec = _spec(entry, sources[entry.source], options, footprint, group)
            footprints.setdefault(spec.key, footprint)
            specs[entry.id] = spec
    needs = tuple(
        Need(e.id, e.tier, specs[e.id].key, footprints[specs[e.id].key]) if e.id in specs else Need(e.id, e.tier)
        for e in manifest.entries
    )
    budgets = effective_budgets(manifest.resources, machine_of(manifest, held_bytes))
    return Opened(manifest, specs, needs, check(needs, budgets))


def here(manifest: Manifest) -> Manifest:
    """The part of a manifest whose sources are on this machine, or should be; what is left out must be fetched.

    Args:
        manifest: as the backend serves it.
    """
    return replace(
        manifest,
        entries=tuple(e for e in manifest.entries if e.tier is Tier.REMOTE or not must_be_fetched(e.source)),
    )


def must_be_fetched(source: str, *, is_online: bool = True) -> bool:
    """True where a source is on the hub, and not beyond doubt on this machine.

    Args:
        is_online: as in `lockstep.artifacts.hub.cache.find_cached`.
    """
    from lockstep.artifacts.hub.cache import find_cached

    named = on_hub(source)
    return named is not None and find_cached(named, is_online=is_online) is None


def on_hub(source: str) -> HubSource | None:
    """The repository that a source names, decided as opening it does; None: it is a path, embedded or a stub."""
    if source.startswith(HUB):
        return parse_hub_source(source)
    if "://" in source or source.endswith((".gguf", ".safetensors")):
        return None
    try:
        path = Path(source).expanduser()
        is_path = path.exists() or path.parent.exists()
    except (OSError, RuntimeError):  # RuntimeError: "~user" of no user
        return None
    return None if is_path else match_hub_source(source)


def has_device_alone(manifest: Manifest) -> bool:
    """True if there is one replica, and no budget: it shares with none, so its pool has the size that its load
    finds room for, and nothing bounds it but what loading itself refuses."""
    replicas = {(entry.source, entry.variant) for entry in manifest.entries if entry.tier is not Tier.REMOTE}
    return len(replicas) == 1 and manifest.resources == Resources() and manifest.hosts is None


def machine_of(manifest: Manifest, held_bytes: int = 0) -> Machine | None:
    """The machine that budgets are cut to; None: nothing is cut, as sizes are fictitious, nobody shares, or the budgets
    are those of several hosts together, each of which Ray fills no further than it goes.

    Args:
        manifest: as the backend serves it.
    """
    is_real = any(not entry.source.startswith(STUB) for entry in manifest.entries if entry.tier is not Tier.REMOTE)
    is_shared = is_real and not has_device_alone(manifest) and manifest.hosts is None
    return Machine(available_memory_bytes() + held_bytes) if is_shared else None


def corrected(opened: Opened, loaded: Mapping[str, Loaded]) -> Opened:
    """Weigh the same by what loads have measured.

    Args:
        loaded: what the last loads of replicas measured, by key.
    """

    def weighed(need: Need) -> Need:
        known = None if need.replica is None else loaded.get(need.replica)
        if known is None or need.footprint is None:
            return need
        measured = opened.specs[need.model].measure(known)
        return replace(need, footprint=replace(need.footprint, resident_bytes=measured, origin=Origin.MEASURED))

    needs = tuple(weighed(need) for need in opened.needs)
    return replace(opened, needs=needs, table=check(needs, opened.table.budgets))


@dataclass(frozen=True, slots=True)
class Source:
    """One opened source."""

    source: str
    fingerprint: str
    file_bytes: int
    parts: Any
    """Reads the text side."""
    max_model_len: int
    is_stub: bool

    @classmethod
    def open(cls, source: str, base: LoadOptions, model: str = "", progress: LoadProgress | None = None) -> Source:
        """Open a source, and report so under a model's id; ArtifactError: it cannot be served."""
        if source.startswith(STUB):
            stub = StubOptions.parse(source)
            read_answers(stub)
            parts = partial(stub_tokenizer_parts, stub.name)
            return cls(source, source, DECLARED_BYTES, parts, stub.max_model_len, is_stub=True)
        report: Progress = (lambda stage, fraction: None) if progress is None else partial(progress, model)
        report("open", 0.0)
        artifact = open_artifact(
            source, cache_dir=base.cache_dir or default_cache_dir(), progress=download_stage(report)
        )
        report("open", 1.0)
        return cls(
            source,
            artifact.fingerprint,
            artifact.num_bytes,
            artifact.load_tokenizer,
            artifact.config.max_model_len,
            is_stub=False,
        )

    def options(self, entry: Entry, base: LoadOptions, is_alone: bool) -> LoadOptions:
        """Options by which a model of this source is loaded. What its load would refuse in the end is refused here, as
        far as it is known now; a stub's pool is a fiction, and counted in blocks."""
        engine = base.engine
        if self.is_stub and engine.num_blocks is None and not is_alone:
            engine = replace(engine, num_blocks=STUB_BLOCKS)
        template = base.chat_template if entry.chat_template is None else entry.chat_template
        options = replace(base, engine=replace(engine, **entry.engine), chat_template=template)
        try:
            check_limits(options.engine, self.max_model_len)
            if not self.is_stub:
                check_sizes(options.engine, machine_memory_bytes())
            if template is not None:
                ChatTemplate(template, None, None).check()
        except ConfigError as error:
            raise ConfigError(f"{entry.id}: {error}") from None
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{entry.id}: {error}; {CORRECT_TEMPLATE}") from None
        return options

    def footprint(self, entry: Entry, engine: EngineOptions) -> Footprint:
        if self.is_stub:
            return predict(entry.size_bytes or DECLARED_BYTES, 0, 0)
        return predict(
            entry.size_bytes, self.file_bytes, engine.kv_cache_memory_bytes or 0, engine.host_kv_memory_bytes or 0
        )


def _with_pools(engine: EngineOptions, resources: Resources, num_replicas: int) -> EngineOptions:
    """Pools of sizes that are known beforehand: each replica's share of the budgets. The operator's numbers stay."""

    def share(given: int | None, budget_bytes: int | None, default_bytes: int) -> int:
        if given is not None:
            return given
        return default_bytes if budget_bytes is None else budget_bytes // max(1, num_replicas)

    return replace(
        engine,
        kv_cache_memory_bytes=share(engine.kv_cache_memory_bytes, resources.kv_budget_bytes, DEFAULT_KV_BYTES),
        host_kv_memory_bytes=share(engine.host_kv_memory_bytes, resources.swap_bytes, 0),
    )


def _group_of(manifest: Manifest, source: str, variant: str | None = None) -> GroupOptions:
    """Replicas of a source, or of one variant of it, on all hosts together."""
    hosts = manifest.hosts
    if hosts is None:
        return GroupOptions()
    ids = [e.id for e in manifest.entries if e.source == source and variant in (None, e.variant)]
    wanted = hosts.demand(ids)
    return GroupOptions(wanted.num, wanted.resources, wanted.spread, hosts.routing, hosts.max_imbalance)


def _spec(entry: Entry, source: Source, options: LoadOptions, footprint: Footprint, group: GroupOptions) -> ReplicaSpec:
    """The load of an entry. On several hosts its key includes the placement of the group, so that a manifest which
    changes that places another group beside the old one, and the old one is drained."""
    own = (source.fingerprint, entry.variant)
    placed = (group.num, sorted(group.resources.items()), group.spread, group.policy.value, group.max_imbalance)
    facts = own if group == GroupOptions() else (*own, *placed)
    digest = hashlib.blake2b(repr(facts).encode()).hexdigest()[:KEY_DIGITS]

    def measure(loaded: Loaded) -> int:
        if source.is_stub:  # its weights are a fiction
            return footprint.resident_bytes
        assert loaded.weights_bytes is not None, "only a stub's are a fiction"
        weights = loaded.weights_bytes
        return group.num * (weights + loaded.config.num_blocks * loaded.geometry.bytes_per_block)

    def tokenizer() -> Tokenizer:
        parts: TokenizerParts = source.parts()
        template = options.chat_template
        return Tokenizer(parts if template is None else replace(parts, chat_template=template))

    return ReplicaSpec(digest, source.source, options, footprint.resident_bytes, tokenizer, measure, group)
