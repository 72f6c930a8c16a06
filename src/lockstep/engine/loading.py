"""Loading of models: loads the tokenizer first, since it fails early, then the weights and the KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.layout import adapter_bytes
from lockstep.artifacts.model import Adapter, Artifact, EmbeddingConfig, TokenizerParts
from lockstep.artifacts.task import Task
from lockstep.core.policy import SchedulerConfig, positions_that_fit
from lockstep.engine.adapters import AdapterSupport, OpenAdapter
from lockstep.engine.options import AdapterSource, LoadOptions, Progress, plan_config
from lockstep.engine.scoring import Scoring, scoring_of
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import ChatTemplateError, ConfigError, UnsupportedArtifactError, UsageError
from lockstep.executors.base import AdapterHost, Executor
from lockstep.executors.grammar_compiler import GrammarCompiler
from lockstep.executors.machine import available_memory_bytes
from lockstep.executors.stub import SCHEME as STUB_SCHEME
from lockstep.executors.stub import (
    StubExecutor,
    StubOptions,
    open_stub_adapter,
    stub_adapter_bytes,
    stub_tokenizer_parts,
)

if TYPE_CHECKING:
    from lockstep.artifacts.hub.source import DownloadProgress
    from lockstep.executors.probe import ProbeReport


log = logging.getLogger(__name__)

STUB_POOL_BYTES = 1 << 32
"""Pool size of a stub. Its blocks hold no data, but each is counted, so a larger pool would take too long."""
CORRECT_TEMPLATE = "correct the template, or omit it to use the model's own"
MAX_PROBE_BLOCKS = 256
"""Maximum number of blocks for the probe, enough for its largest batch with blocks of 32 tokens."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor with its tokenizer and the sampling defaults of the artifact."""

    name: str
    source: str
    fingerprint: str
    """Digest of the artifact's content."""
    executor: Executor
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    """Compiler of constraints for this model's vocabulary."""
    sampling_defaults: Mapping[str, float | int]
    weights_bytes: int | None = None
    """Memory of the packed weights, including mapped files; None: a stub, which has no weights."""
    task: Task = "generate"
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    """How the model makes vectors."""
    adapters: AdapterSupport | None = None
    """How the model computes with adapters; None: it was loaded without."""

    @property
    def vocab_size(self) -> int:
        return self.executor.geometry.vocab_size

    @property
    def scoring(self) -> Scoring | None:
        """Kind of the scores of pairs of texts; None: the model generates text."""
        return scoring_of(self.task, self.executor.geometry.num_stages)

    def text_limit(self, config: SchedulerConfig) -> int:
        """Maximum tokens of prompt and output together; without text as the answer, of what the pool holds at once."""
        geometry = self.executor.geometry
        limit = geometry.text_limit(config.max_model_len)
        if self.task == "generate":
            return limit
        limit = min(limit, geometry.text_limit(positions_that_fit(config)))
        longest = self.embedding.max_tokens
        return limit if longest is None else min(limit, longest + 1)

    def close(self) -> None:
        self.executor.close()


def load_model(
    source: str, options: LoadOptions | None = None, progress: Progress | None = None
) -> tuple[LoadedModel, SchedulerConfig]:
    """Load a model and derive its scheduler's configuration, as an ``Engine`` needs them. The caller closes the model.

    Args:
        source: a path, ``hf://org/name``, ``pocket://`` or ``stub://NAME``.
        options: load options and limits.

    Raises:
        ArtifactError: the artifact cannot be served.
        ChatTemplateError: ``options.chat_template`` is not valid Jinja, or fails on every conversation.
        ConfigError: the limits do not fit the model.
        UsageError: an option names something that this machine does not have.
    """
    options = options or LoadOptions()
    report = progress or (lambda stage, fraction: None)
    load = _load_stub if source.startswith(STUB_SCHEME) else _load_artifact
    loaded, config = load(source, options, report)
    try:
        report("ready", 1.0)
    except BaseException:  # an interrupt: the model has threads and mapped files
        loaded.close()
        raise
    return loaded, config


def _load_artifact(source: str, options: LoadOptions, report: Progress) -> tuple[LoadedModel, SchedulerConfig]:
    report("open", 0.0)
    from lockstep.artifacts.embedding import check_encoder_task
    from lockstep.artifacts.source import open_artifact
    from lockstep.executors.native.executor import load_executor

    cache_dir = options.cache_dir or default_cache_dir()
    artifact = open_artifact(source, cache_dir=cache_dir, progress=download_stage(report))
    task = options.task or artifact.task
    if artifact.config.bidirectional:
        check_encoder_task(artifact.config, task)
    tokenizer = load_tokenizer(artifact.load_tokenizer(), options)
    own = replace(options.executor, cache_dir=cache_dir)
    executor = load_executor(artifact, own, report, tokenizer.separator_id)
    try:
        support = _adapter_support(
            executor, options, adapter_opener(artifact, cache_dir), partial(adapter_bytes, artifact.config)
        )
        free_bytes = available_memory_bytes() - executor.geometry.mapped_bytes - (support.max_bytes if support else 0)
        config = plan_config(options.engine, executor.geometry, max(0, free_bytes))
        executor.allocate(config.num_blocks, config.num_host_blocks)
    except BaseException:
        executor.close()
        raise
    loaded = LoadedModel(
        name=artifact.name,
        source=source,
        fingerprint=artifact.fingerprint,
        executor=executor,
        tokenizer=tokenizer,
        grammars=_grammars(tokenizer, executor),
        sampling_defaults=artifact.sampling_defaults,
        weights_bytes=executor.geometry.weights_bytes,
        task=task,
        embedding=artifact.embedding or EmbeddingConfig(),
        adapters=support,
    )
    return loaded, config


def _adapter_support(
    executor: Executor, options: LoadOptions, open_: OpenAdapter, bytes_of: Callable[[int], int]
) -> AdapterSupport | None:
    """Open the adapters of the options; None: the model is loaded without any.

    Raises:
        ArtifactError: an adapter cannot be used with this model.
        ConfigError: this kind of model has no adapters.
        UsageError: an adapter is larger than a slot.
    """
    if not options.has_adapters:
        return None
    if not isinstance(executor, AdapterHost) or executor.geometry.num_stages > 1:
        raise ConfigError("this model cannot have LoRA adapters; only models that generate text can")
    engine = options.engine
    opened = [checked_adapter(open_(each.name, each.path), each) for each in options.adapters]
    rank = engine.max_lora_rank
    support = AdapterSupport(executor, open_, engine.max_loras, rank, bytes_of(rank), opened)
    for adapter in opened:
        support.check(adapter)
    return support


def checked_adapter(adapter: Adapter, source: AdapterSource) -> Adapter:
    """Raise ArtifactError if an opened adapter has another content than expected."""
    if source.fingerprint and adapter.fingerprint != source.fingerprint:
        raise UnsupportedArtifactError(
            f"the adapter has fingerprint {adapter.fingerprint}; expected is {source.fingerprint}; "
            "its files were changed meanwhile, so apply them again",
            path=source.path,
        )
    return adapter


def open_adapters(source: str, adapters: Sequence[AdapterSource], cache_dir: Path | None = None) -> tuple[Adapter, ...]:
    """Open adapters of a model that is not loaded.

    Raises:
        ArtifactError: the model cannot be served, or an adapter cannot be used with it.
    """
    if not adapters:
        return ()
    open_: OpenAdapter = open_stub_adapter
    if not source.startswith(STUB_SCHEME):
        from lockstep.artifacts.source import open_artifact

        cache_dir = cache_dir or default_cache_dir()
        open_ = adapter_opener(open_artifact(source, cache_dir=cache_dir), cache_dir)
    return tuple([checked_adapter(open_(each.name, each.path), each) for each in adapters])


def with_room_for(options: LoadOptions, adapters: Sequence[Adapter]) -> LoadOptions:
    """Return load options with a slot for each of the adapters, so that no request waits for one."""
    if not adapters:
        return options
    num_loaded = len({adapter.fingerprint for adapter in adapters})
    rank = max(adapter.rank for adapter in adapters)
    engine = replace(options.engine, enable_lora=True, max_loras=num_loaded, max_lora_rank=rank)
    return replace(options, engine=engine)


def adapter_opener(artifact: Artifact, cache_dir: Path) -> OpenAdapter:
    """Return the function that opens adapters of an artifact."""
    from lockstep.artifacts.adapter import open_adapter

    def open_named(name: str, path: str) -> Adapter:
        return replace(open_adapter(path, artifact, cache_dir=cache_dir), name=name)

    return open_named


def _load_stub(source: str, options: LoadOptions, report: Progress) -> tuple[LoadedModel, SchedulerConfig]:
    stub = StubOptions.parse(source)
    executor = StubExecutor(stub)
    config = plan_config(options.engine, executor.geometry, STUB_POOL_BYTES)
    tokenizer = load_tokenizer(stub_tokenizer_parts(stub.name), options)
    loaded = LoadedModel(
        stub.name,
        source,
        f"stub-{stub.name}",
        executor,
        tokenizer,
        _grammars(tokenizer, executor),
        {},
        adapters=_adapter_support(executor, options, open_stub_adapter, stub_adapter_bytes),
    )
    return loaded, config


def _grammars(tokenizer: Tokenizer, executor: Executor) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.vocabulary, executor.geometry.vocab_size, tokenizer.end_token_ids)


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """Results of verifying a model on this machine."""

    report: ProbeReport
    digest: str
    """Digest from `model_digest`; equal on every machine."""


def verify_model(source: str, options: LoadOptions, progress: Progress | None = None) -> ModelCheck:
    """Check on this machine that the model computes the same bytes in every batch.

    Raises:
        LockstepError: the model cannot be loaded.
    """
    if source.startswith(STUB_SCHEME):
        raise UsageError(f"{source}: a stub computes nothing that can be verified")
    from lockstep.executors.model_digest import model_digest
    from lockstep.executors.probe import thorough_probe

    engine = replace(options.engine, num_blocks=MAX_PROBE_BLOCKS, host_kv_memory_bytes=None)
    options = replace(options, engine=engine)
    model, config = load_model(source, options, progress)

    def reload() -> Executor:
        return load_model(source, options)[0].executor

    try:
        digest = model_digest(model.executor, config.num_blocks)
        return ModelCheck(thorough_probe(model.executor, config.num_blocks, config.num_host_blocks, reload), digest)
    finally:
        model.close()


def download_stage(report: Progress) -> DownloadProgress:
    """Report a download as a stage of loading."""
    return lambda name, have, total: report(f"download {name}", have / max(total, 1))


def load_tokenizer(parts: TokenizerParts, options: LoadOptions) -> Tokenizer:
    """Create the tokenizer and try its chat template.

    If a template from the options fails, so does the load. If the artifact's own template fails, a warning is logged,
    as completions do not need it.
    """
    if options.chat_template is not None:
        tokenizer = Tokenizer(replace(parts, chat_template=options.chat_template))
        try:
            tokenizer.check_chat_template()
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{error}; {CORRECT_TEMPLATE}") from None
        return tokenizer
    tokenizer = Tokenizer(parts)
    if tokenizer.has_chat_template:
        try:
            tokenizer.check_chat_template()
        except ChatTemplateError as error:
            log.warning(
                "the model's own chat template fails, so chats are rejected and only completions work; "
                "use --chat-template FILE to replace it (%s)",
                error,
            )
    return tokenizer


def default_cache_dir() -> Path:
    """Folder for this user's caches, by the platform's convention."""
    import platformdirs

    return platformdirs.user_cache_path("lockstep")
