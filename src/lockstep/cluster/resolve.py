"""Artifact resolution: opens the sources of a manifest, identifies them by content, and counts their bytes.

It reads files and may download them from the hub, so it runs on its own thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.artifacts.embedding import check_encoder_task
from lockstep.artifacts.hub.source import SCHEME as HUB
from lockstep.artifacts.hub.source import HubSource, match_hub_source, parse_hub_source
from lockstep.artifacts.layout import adapter_bytes
from lockstep.artifacts.model import Adapter, ModelConfig, TokenizerParts
from lockstep.artifacts.source import open_artifact
from lockstep.artifacts.task import MERGE, Task
from lockstep.cluster.budget import BudgetTable, Footprint, Machine, Need, Origin, check, effective_budgets, predict
from lockstep.cluster.manifest import Manifest, ModelEntry, Resources, Tier
from lockstep.cluster.replica_state import ReplicaSpec
from lockstep.engine.adapters import OpenAdapter
from lockstep.engine.chat_template import ChatTemplate
from lockstep.engine.loading import CORRECT_TEMPLATE, adapter_opener, default_cache_dir, download_stage
from lockstep.engine.options import (
    AdapterSource,
    EngineOptions,
    LoadOptions,
    Progress,
    check_limits,
    check_sizes,
    plan_config,
)
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError, ConfigError
from lockstep.executors.base import Geometry
from lockstep.executors.machine import available_memory_bytes, machine_memory_bytes
from lockstep.executors.stub import (
    DECLARED_BYTES,
    StubOptions,
    open_stub_adapter,
    read_answers,
    stub_adapter_bytes,
    stub_tokenizer_parts,
)
from lockstep.executors.stub import SCHEME as STUB
from lockstep.hosts.values import GroupOptions
from lockstep.worker.messages import Loaded

DEFAULT_KV_BYTES = 512 * 1024**2
"""Size of a replica's KV pool if nothing sets it; a pool is never larger than its replica can use."""
STUB_BLOCKS = 8192
"""Number of KV blocks of a stub, whose blocks hold nothing: enough for 16 full contexts."""
KEY_DIGITS = 12
LoadProgress = Callable[[str, str, float], None]
"""Called with a model's id, the stage of its load, and the completed fraction of that stage, 0 to 1."""


@dataclass(frozen=True, slots=True)
class OpenedManifest:
    """Manifest whose models can be loaded."""

    manifest: Manifest
    """Manifest with the sources that the backend uses."""
    specs: Mapping[str, ReplicaSpec]
    """Load specifications by model id; remote models have none."""
    needs: tuple[Need, ...]
    """Needs of all models, in order of definition."""
    table: BudgetTable
    sources: Mapping[str, OpenedSource] = field(default_factory=dict, repr=False)
    adapters: Mapping[str, Adapter] = field(default_factory=dict, repr=False)
    """Opened adapters by the ids of their models."""

    def adapter_of(self, entry: ModelEntry) -> Adapter | None:
        """Opened adapter of an entry that is part of this manifest, too; None: there is none."""
        return self.adapters.get(entry.id) if entry in self.manifest.entries else None


def open_manifest(
    manifest: Manifest,
    base: LoadOptions,
    held_bytes: int = 0,
    progress: LoadProgress | None = None,
    *,
    is_alone: bool | None = None,
    known: OpenedManifest | None = None,
) -> OpenedManifest:
    """Open every source that is not remote.

    Args:
        manifest: manifest with the sources that the backend uses.
        base: load options; a model's own ``engine`` block overrides them.
        held_bytes: memory of the loaded models, which a replacing manifest may reuse.
        progress: reports each source, and its download from the hub, under the first of its models.
        is_alone: result of `has_device_alone` for the whole manifest, if this is a part of it; None: it is whole.
        known: manifest whose sources and adapters are used as they were opened; None: all are opened.

    Raises:
        ArtifactError: a source cannot be served; the message names the model.
        ConfigError: a remote model has no base URL, or an ``engine`` block does not suit its model or this machine.
        ChatTemplateError: a ``chat_template`` is not valid Jinja, or fails for every conversation.
    """
    for entry in manifest.entries:
        if entry.tier is Tier.REMOTE and entry.remote is None:
            raise ConfigError(
                f"{entry.id}: a remote model needs remote.base_url with --backend auto; "
                "set it, or use --backend stub or pocket"
            )
    first_ids = {entry.source: entry.id for entry in reversed(manifest.entries) if entry.tier is not Tier.REMOTE}
    opened = {} if known is None else known.sources
    sources = {
        source: opened.get(source) or OpenedSource.open(source, base, first_ids[source], progress)
        for source in sorted(first_ids)
    }
    adapters = {
        entry.id: (known and known.adapter_of(entry)) or sources[entry.source].open_adapter(entry.id, entry.adapter)
        for entry in manifest.entries
        if entry.adapter is not None and entry.source in sources
    }
    is_alone = has_device_alone(manifest) if is_alone is None else is_alone
    return weigh(manifest, sources, base, held_bytes, is_alone, adapters)


def weigh(
    manifest: Manifest,
    sources: Mapping[str, OpenedSource],
    base: LoadOptions,
    held_bytes: int,
    is_alone: bool,
    adapters: Mapping[str, Adapter] = {},
) -> OpenedManifest:
    """Decide how each model is loaded, and how much it needs of each budget; see `open_manifest`.

    Args:
        sources: opened sources of all models that are not remote.
        adapters: opened adapters by the ids of their models.
    """
    engine = replace(base.engine, order=base.engine.order or "priority")
    num_replicas = sum(_group_of(manifest, source).num for source in sources)
    base = replace(base, engine=engine if is_alone else _with_pools(engine, manifest.resources, num_replicas))
    specs: dict[str, ReplicaSpec] = {}
    footprints: dict[str, Footprint] = {}
    for entry in manifest.entries:
        if entry.tier is not Tier.REMOTE:
            options = sources[entry.source].options(entry, base, is_alone, _adapters_of(manifest, entry, adapters))
            _check_rank(entry, options.engine, adapters.get(entry.id))
            group = _group_of(manifest, entry.source, entry.variant)
            footprint = sources[entry.source].footprint(entry, options)
            footprint = replace(footprint, resident_bytes=footprint.resident_bytes * group.num)
            is_hosted = manifest.hosts is not None
            spec = _spec(entry, sources[entry.source], options, footprint, group, is_hosted)
            footprints.setdefault(spec.key, footprint)
            specs[entry.id] = spec
    needs = tuple(
        Need(e.id, e.tier, specs[e.id].key, footprints[specs[e.id].key]) if e.id in specs else Need(e.id, e.tier)
        for e in manifest.entries
    )
    budgets = effective_budgets(manifest.resources, machine_of(manifest, held_bytes))
    return OpenedManifest(manifest, specs, needs, check(needs, budgets), sources, adapters)


def _adapters_of(manifest: Manifest, entry: ModelEntry, adapters: Mapping[str, Adapter]) -> tuple[AdapterSource, ...]:
    """Adapters of the replica that a model shares with others, in order of definition."""
    sharing = [
        each
        for each in manifest.entries
        if each.id in adapters and (each.source, each.variant) == (entry.source, entry.variant)
    ]
    return tuple([AdapterSource(each.id, each.adapter or "", adapters[each.id].fingerprint) for each in sharing])


def _check_rank(entry: ModelEntry, engine: EngineOptions, adapter: Adapter | None) -> None:
    if adapter is not None and adapter.rank > engine.max_lora_rank:
        raise ConfigError(
            f"{entry.id}: the adapter has rank {adapter.rank}, more than max_lora_rank ({engine.max_lora_rank}); raise "
            "--max-lora-rank, or max_lora_rank in `engine:` of all models of this source"
        )


def local_part(manifest: Manifest) -> Manifest:
    """Return the part of a manifest that needs no download. A source whose files are missing locally stays in it.

    Args:
        manifest: manifest with the sources that the backend uses.
    """
    return replace(
        manifest,
        entries=tuple(e for e in manifest.entries if e.tier is Tier.REMOTE or not must_be_fetched(e.source)),
    )


def must_be_fetched(source: str, *, is_online: bool = True) -> bool:
    """True if a source is on the hub and is not certainly cached on this machine.

    Args:
        is_online: see `lockstep.artifacts.hub.cache.find_cached`.
    """
    from lockstep.artifacts.hub.cache import find_cached

    named = on_hub(source)
    return named is not None and find_cached(named, is_online=is_online) is None


def on_hub(source: str) -> HubSource | None:
    """Hub repository of a source's model, decided as when it is opened; None: the model is at a path, embedded or a
    stub."""
    source = source.split(MERGE)[0]
    if source.startswith(HUB):
        return parse_hub_source(source)
    if "://" in source or source.endswith((".gguf", ".safetensors")):
        return None
    try:
        path = Path(source).expanduser()
        is_path = path.exists() or path.parent.exists()
    except (OSError, RuntimeError):  # RuntimeError: "~user" names no user
        return None
    return None if is_path else match_hub_source(source)


def has_device_alone(manifest: Manifest) -> bool:
    """True if there is one replica and no budget. Its KV pool then takes the free memory that its load finds, and only
    the load itself limits it."""
    replicas = {(entry.source, entry.variant) for entry in manifest.entries if entry.tier is not Tier.REMOTE}
    return len(replicas) == 1 and manifest.resources == Resources() and manifest.hosts is None


def machine_of(manifest: Manifest, held_bytes: int = 0) -> Machine | None:
    """Machine to whose memory budgets are reduced; None: budgets are not reduced. That is so if sizes are fictitious,
    if there is only one replica, or if the budgets span several hosts, each of which Ray fills up to its own memory.

    Args:
        manifest: manifest with the sources that the backend uses.
    """
    is_real = any(not entry.source.startswith(STUB) for entry in manifest.entries if entry.tier is not Tier.REMOTE)
    is_shared = is_real and not has_device_alone(manifest) and manifest.hosts is None
    return Machine(available_memory_bytes() + held_bytes) if is_shared else None


def corrected(opened: OpenedManifest, loaded: Mapping[str, Loaded]) -> OpenedManifest:
    """Check the needs again with the sizes that loads have measured.

    Args:
        loaded: measurements of the last loads of replicas, by key.
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
class OpenedSource:
    """One opened source."""

    source: str
    fingerprint: str
    file_bytes: int
    parts: Any
    """Function that reads the tokenizer's parts."""
    max_model_len: int
    is_stub: bool
    task: Task = "generate"
    encoder: ModelConfig | None = None
    """Configuration of an encoder, whose pool holds activations of texts; None: a decoder or a stub."""
    open_adapter: OpenAdapter = open_stub_adapter
    bytes_of_rank: Callable[[int], int] = stub_adapter_bytes
    """Memory of an adapter of a given rank."""

    @classmethod
    def open(
        cls, source: str, base: LoadOptions, model: str = "", progress: LoadProgress | None = None
    ) -> OpenedSource:
        """Open a source and report its progress under a model's id; ArtifactError: it cannot be served."""
        from lockstep.executors.native.weights import packed_growth

        if source.startswith(STUB):
            stub = StubOptions.parse(source)
            read_answers(stub)
            parts = partial(stub_tokenizer_parts, stub.name)
            return cls(source, source, DECLARED_BYTES, parts, stub.max_model_len, is_stub=True)
        report: Progress = (lambda stage, fraction: None) if progress is None else partial(progress, model)
        report("open", 0.0)
        cache_dir = base.cache_dir or default_cache_dir()
        artifact = open_artifact(source, cache_dir=cache_dir, progress=download_stage(report))
        report("open", 1.0)
        return cls(
            source,
            artifact.fingerprint,
            artifact.num_bytes + packed_growth(artifact.bytes_by_encoding),
            artifact.load_tokenizer,
            artifact.config.max_model_len,
            is_stub=False,
            task=artifact.task,
            encoder=artifact.config if artifact.config.bidirectional else None,
            open_adapter=adapter_opener(artifact, cache_dir),
            bytes_of_rank=partial(adapter_bytes, artifact.config),
        )

    def options(
        self, entry: ModelEntry, base: LoadOptions, is_alone: bool, adapters: tuple[AdapterSource, ...] = ()
    ) -> LoadOptions:
        """Options with which a model of this source is loaded. Whatever is known to make the load fail is rejected
        here. The KV pool of a stub is fictitious and counted in blocks.

        Args:
            adapters: adapters of the replica.
        """
        engine = base.engine
        if self.encoder is not None and "enable_lora" not in entry.engine:
            engine = replace(engine, enable_lora=False)
        if self.is_stub and engine.num_blocks is None and not is_alone:
            engine = replace(engine, num_blocks=STUB_BLOCKS)
        template = base.chat_template if entry.chat_template is None else entry.chat_template
        task = entry.task or base.task or self.task
        engine = replace(engine, **entry.engine)
        options = replace(base, engine=engine, chat_template=template, task=task, adapters=adapters)
        try:
            if self.encoder is not None:
                check_encoder_task(self.encoder, task)
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

    def footprint(self, entry: ModelEntry, options: LoadOptions) -> Footprint:
        """Memory that a replica needs with these options."""
        reserved = self.reserved_bytes(options)
        if self.is_stub:
            return predict((entry.size_bytes or DECLARED_BYTES) + reserved, 0, 0)
        engine = options.engine
        device_bytes, host_bytes = engine.kv_cache_memory_bytes or 0, engine.host_kv_memory_bytes or 0
        if self.encoder is not None:
            device_bytes, host_bytes = min(device_bytes, activation_bytes(self.encoder, options)), 0
        footprint = predict(entry.size_bytes, self.file_bytes, device_bytes, host_bytes)
        return replace(footprint, resident_bytes=footprint.resident_bytes + reserved)

    def reserved_bytes(self, options: LoadOptions) -> int:
        """Memory that a load reserves for adapters."""
        engine = options.engine
        return engine.max_loras * self.bytes_of_rank(engine.max_lora_rank) if options.has_adapters else 0


def activation_bytes(config: ModelConfig, options: LoadOptions) -> int:
    """Size of an encoder's pool as its load would plan it on an idle machine, which is less than its share if its texts
    are short. Keys and values in int8 count as float16."""
    from lockstep.executors.kv_costs import activation_bytes_per_token
    from lockstep.executors.native.forward import BLOCK_TOKENS

    element_bytes = 4 if options.executor.kv_cache_precision == "f32" else 2
    stages = config.num_layers + 1
    geometry = Geometry(
        block_size=BLOCK_TOKENS * stages,
        bytes_per_block=BLOCK_TOKENS * activation_bytes_per_token(config, element_bytes),
        num_layers=config.num_layers,
        max_model_len=config.max_model_len * stages + 1,
        vocab_size=config.vocab_size,
        num_stages=stages,
    )
    return plan_config(options.engine, geometry, machine_memory_bytes()).num_blocks * geometry.bytes_per_block


def _with_pools(engine: EngineOptions, resources: Resources, num_replicas: int) -> EngineOptions:
    """Set pool sizes to each replica's share of the budgets, so that they are known in advance. Sizes that the operator
    set stay."""

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
    """Group options of a source, or of one variant of it, on all hosts together."""
    hosts = manifest.hosts
    if hosts is None:
        return GroupOptions()
    ids = [e.id for e in manifest.entries if e.source == source and variant in (None, e.variant)]
    wanted = hosts.demand(ids)
    return GroupOptions(wanted.num, wanted.resources, wanted.spread, hosts.routing, hosts.max_imbalance)


def _spec(
    entry: ModelEntry,
    source: OpenedSource,
    options: LoadOptions,
    footprint: Footprint,
    group: GroupOptions,
    is_hosted: bool,
) -> ReplicaSpec:
    """Load specification of an entry. With several hosts its key includes the group's placement and adapters: a
    manifest that changes them creates a new group, and the old group is drained. On one machine the adapters of a
    loaded replica can change, but whether it has room for any cannot."""
    own: tuple[object, ...] = (source.fingerprint, entry.variant)
    if options.has_adapters:
        adapters = [(each.name, each.fingerprint) for each in options.adapters] if is_hosted else []
        own = (*own, "adapters", adapters)
    placed = (group.num, sorted(group.resources.items()), group.spread, group.policy.value, group.max_imbalance)
    facts = own if group == GroupOptions() else (*own, *placed)
    digest = hashlib.blake2b(repr(facts).encode()).hexdigest()[:KEY_DIGITS]

    def measure(loaded: Loaded) -> int:
        if source.is_stub:  # its weights are fictitious
            return footprint.resident_bytes
        assert loaded.weights_bytes is not None, "only a stub has no measured weights"
        weights = loaded.weights_bytes + loaded.adapter_bytes
        return group.num * (weights + loaded.config.num_blocks * loaded.geometry.bytes_per_block)

    def tokenizer() -> Tokenizer:
        parts: TokenizerParts = source.parts()
        template = options.chat_template
        return Tokenizer(parts if template is None else replace(parts, chat_template=template))

    return ReplicaSpec(digest, source.source, options, footprint.resident_bytes, tokenizer, measure, group)
