"""From a source to a loaded model: tokenizer first (it fails early), then weights, pool and determinism probe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.artifacts.model import Artifact, TokenizerParts
from lockstep.core.policy import SchedulerConfig
from lockstep.engine.model import LoadedModel
from lockstep.engine.options import LoadOptions
from lockstep.engine.sizing import anonymous_memory_bytes, available_memory_bytes, plan_config
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.base import Executor
from lockstep.executors.grammar_compiler import GrammarCompiler
from lockstep.executors.stub import SCHEME as STUB_SCHEME
from lockstep.executors.stub import StubExecutor, StubOptions, stub_tokenizer_parts

if TYPE_CHECKING:
    from lockstep.artifacts.hub.source import DownloadProgress
    from lockstep.executors.probe import ProbeReport

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with a stage's name and how much of it is done, 0 to 1."""
STUB_POOL_BYTES = 1 << 32
"""More is no fiction that a stub's pool could be: its blocks hold nothing, but are counted one by one."""


def load_model(
    source: str, options: LoadOptions | None = None, progress: Progress | None = None
) -> tuple[LoadedModel, SchedulerConfig]:
    """Load a model and decide its scheduler's configuration: what an ``Engine`` is made of. Whoever loads it closes it.

    Args:
        source: a path, ``hf://org/name``, ``pocket://`` or ``stub://NAME``.
        options: how to load it and within what limits.

    Raises:
        ArtifactError: the artifact cannot be served.
        ChatTemplateError: ``options.chat_template`` is not Jinja.
        ConfigError: the limits cannot work with it.
        UsageError: an option names something that this machine does not have.
    """
    options = options or LoadOptions()
    report = progress or (lambda stage, fraction: None)
    if source.startswith(STUB_SCHEME):
        loaded, config = _load_stub(source, options)
        report("ready", 1.0)
        return loaded, config
    report("open", 0.0)
    from lockstep.artifacts.source import open_artifact
    from lockstep.executors.openvino.executor import load_executor

    before_bytes = anonymous_memory_bytes()  # with the libraries imported, which are no model's
    cache_dir = options.cache_dir or default_cache_dir()
    artifact = open_artifact(source, cache_dir=cache_dir, progress=download_stage(report))
    tokenizer = _tokenizer(artifact.load_tokenizer(), options)
    executor = load_executor(artifact, replace(options.openvino, cache_dir=cache_dir), report)
    try:
        config = plan_config(options.engine, executor.geometry, available_memory_bytes())
        executor.allocate(config.num_blocks, config.num_host_blocks)
        report("probe", 0.0)
        probe = _probe(executor, config.num_blocks) if options.probe else None
    except BaseException:
        executor.close()
        raise
    loaded = _loaded(artifact.name, source, artifact.fingerprint, executor, tokenizer, artifact, config, probe)
    pool_bytes = config.num_blocks * executor.geometry.bytes_per_block
    report("ready", 1.0)
    return replace(loaded, weights_bytes=_grown_by(before_bytes, pool_bytes)), config


def _grown_by(before_bytes: int | None, pool_bytes: int) -> int | None:
    """Memory that loading took beside the pool, which is in memory as a whole from its allocation on."""
    after_bytes = anonymous_memory_bytes()
    if before_bytes is None or after_bytes is None:
        return None
    return max(0, after_bytes - before_bytes - pool_bytes)


def download_stage(report: Progress) -> DownloadProgress:
    """A download as a stage of loading."""
    return lambda name, have, total: report(f"download {name}", have / max(total, 1))


def _tokenizer(parts: TokenizerParts, options: LoadOptions) -> Tokenizer:
    """The text side; a template that was given is compiled now, so that a fault in it is not every request's."""
    if options.chat_template is None:
        return Tokenizer(parts)
    tokenizer = Tokenizer(replace(parts, chat_template=options.chat_template))
    tokenizer.check_chat_template()
    return tokenizer


def default_cache_dir() -> Path:
    """Where this user's caches lie by the platform's convention."""
    import platformdirs

    return platformdirs.user_cache_path("lockstep")


def _probe(executor: Executor, num_blocks: int) -> ProbeReport:
    from lockstep.executors.probe import quick_probe

    report = quick_probe(executor, num_blocks)
    if not report.deterministic:
        failed = ", ".join(case.name for case in report.cases if not case.passed)
        log.warning(
            "with these options the bytes of an answer depend on its company here (%s differs); "
            "`lockstep models verify` shows with which they do not",
            failed,
        )
    return report


def _load_stub(source: str, options: LoadOptions) -> tuple[LoadedModel, SchedulerConfig]:
    stub = StubOptions.parse(source)
    executor = StubExecutor(stub)
    config = plan_config(options.engine, executor.geometry, STUB_POOL_BYTES)
    executor.allocate(config.num_blocks, config.num_host_blocks)
    tokenizer = _tokenizer(stub_tokenizer_parts(stub.name), options)
    return _loaded(stub.name, source, f"stub-{stub.name}", executor, tokenizer, None, config, None), config


def _loaded(
    name: str,
    source: str,
    fingerprint: str,
    executor: Executor,
    tokenizer: Tokenizer,
    artifact: Artifact | None,
    config: SchedulerConfig,
    probe: ProbeReport | None,
) -> LoadedModel:
    return LoadedModel(
        name=name,
        source=source,
        fingerprint=fingerprint,
        executor=executor,
        tokenizer=tokenizer,
        grammars=GrammarCompiler(tokenizer.vocabulary, executor.geometry.vocab_size, tokenizer.end_token_ids),
        sampling_defaults={} if artifact is None else artifact.sampling_defaults,
        num_blocks=config.num_blocks,
        num_host_blocks=config.num_host_blocks,
        probe=probe,
    )
