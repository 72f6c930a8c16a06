"""Models on this disk: `lockstep models` describes a model and checks its determinism on this machine; `lockstep pull`,
`list` and `rm` manage the cache of the Hugging Face hub."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli.flag_groups import show_help_without_command, with_flags
from lockstep.cli.progress import loading_progress
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import MissingTokenizerError, UsageError
from lockstep.shown import aligned, size

if TYPE_CHECKING:
    from lockstep.artifacts.hub.cache import CachedModel
    from lockstep.artifacts.hub.source import DownloadProgress, HubSource
    from lockstep.artifacts.model import Artifact
    from lockstep.engine.loading import ModelCheck


_TYPICAL_CONTEXT = 8192
"""Tokens of the context whose memory is shown."""

models_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@models_app.callback()
def _models(context: typer.Context) -> None:
    """Inspect models on disk."""
    show_help_without_command(context)


@models_app.command()
@with_flags
def info(
    model: flags.Model,
    *,
    executor: flags.Quantize,
    cache_dir: flags.CacheDir = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Describe a model on disk and its form after loading, without reading its weights."""
    from lockstep.artifacts.source import open_artifact

    with loading_progress(model) as progress:
        artifact = open_artifact(
            model, cache_dir=cache_dir, progress=lambda name, have, total: progress(name, have / max(total, 1))
        )
    facts = _facts(artifact, executor.quantize)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    print(aligned((name.replace("_", " "), _shown(value)) for name, value in facts.items()))


@models_app.command()
@with_flags
def verify(
    model: flags.Model,
    *,
    executor: flags.Executor,
    cache_dir: flags.CacheDir = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Check on this machine that batching, chunking, swapping and reloading change no bit; exit code 1 if one does.

    It also prints a digest, which is the same on every machine.
    """
    from lockstep.engine.loading import verify_model

    options = LoadOptions(EngineOptions(max_num_seqs=1), executor, cache_dir)
    with loading_progress(model) as progress:
        found = verify_model(model, options, progress)
    if as_json:
        print(json.dumps(_report_json(found), indent=2))
    else:
        _print_report(model, found)
    if not found.report.deterministic:
        raise typer.Exit(1)


def _facts(artifact: Artifact, quantize: str | None) -> dict[str, Any]:
    from lockstep.executors.native.packs import loaded_form

    config = artifact.config
    tensors = [artifact.weights[name] for name in artifact.weights.names()]
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    encodings, loaded_bytes = loaded_form(artifact, quantize)
    facts: dict[str, Any] = {
        "name": artifact.name,
        "path": str(artifact.path),
        "format": artifact.format,
        "task": artifact.task,
        "architecture": config.architecture,
        "parameters": num_parameters or None,
        "bytes": artifact.num_bytes,
        "encodings": dict(sorted(Counter(tensor.encoding.value for tensor in tensors).items())),
        "loaded_as": encodings,
        "loaded_bytes": loaded_bytes,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_heads} ({config.num_kv_heads} key-value)",
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "max_model_len": config.max_model_len,
        **_memory_facts(artifact),
        "rope_scaling": None if config.rope_scaling is None else config.rope_scaling.kind,
        "tied_embeddings": config.tied_embeddings,
        "fingerprint": artifact.fingerprint,
        "sampling_defaults": dict(artifact.sampling_defaults),
    }
    facts |= _vector_facts(artifact)
    try:
        parts = artifact.load_tokenizer()
    except MissingTokenizerError:
        return facts | {"tokenizer": None}
    return facts | {
        "tokenizer": f"{parts.tokenizer.get_vocab_size()} tokens",
        "end_tokens": {str(i): parts.tokenizer.id_to_token(i) for i in parts.end_token_ids},
        "chat_template": parts.chat_template is not None,
    }


def _memory_facts(artifact: Artifact) -> dict[str, Any]:
    """Facts about the memory of a sequence, with keys and values in float16."""
    from lockstep.cluster.resolve import DEFAULT_KV_BYTES
    from lockstep.executors.kv_costs import activation_bytes_per_token, kv_costs

    config = artifact.config
    if config.bidirectional:
        return {"activation_bytes_per_token_f16": activation_bytes_per_token(config)}
    costs = kv_costs(config)
    num_tokens = min(_TYPICAL_CONTEXT, config.max_model_len)
    taken = costs.bytes_of(num_tokens)
    facts: dict[str, Any] = {"kv_bytes_per_token_f16": costs.groups[0].bytes_per_token}
    if len(costs.groups) > 1:
        facts["kv_groups"] = [
            {"layers": group.num_layers, "window": group.window or None, "bytes_per_token": group.bytes_per_token}
            for group in costs.groups
        ]
    if costs.state_bytes:
        facts |= {"state_bytes": costs.state_bytes, "snapshot_every_tokens": costs.snapshot_interval}
    return facts | {
        "kv_bytes_of_context": {str(num_tokens): taken},
        "contexts_in_default_pool": DEFAULT_KV_BYTES // taken,
    }


def _vector_facts(artifact: Artifact) -> dict[str, Any]:
    """Facts about the vectors of an embedding model, or the scores of a reranker; empty for a model of text."""
    config, embedding = artifact.config, artifact.embedding
    if artifact.task == "generate" or embedding is None:
        return {}
    longest = min(config.max_model_len, embedding.max_tokens or config.max_model_len)
    facts: dict[str, Any] = {"longest_text": longest}
    if artifact.task == "rerank":
        kind = "a classifier" if config.num_labels else "the logits of two answers"
        return facts | {"scores": kind, "labels": config.num_labels or None}
    dense = [f"{layer.size} {layer.activation}".strip() for layer in config.head]
    return facts | {
        "vector_size": config.head[-1].size if config.head else config.hidden_size,
        "pooling": embedding.pooling,
        "normalize": embedding.normalize,
        "dense_layers": dense,
        "prompts": dict(embedding.prompts),
        "default_prompt": embedding.default_prompt,
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return (
            "; ".join(map(_shown, value))
            if value and isinstance(value[0], dict)
            else ", ".join(map(str, value)) or "none"
        )
    if isinstance(value, dict):
        return (
            ", ".join(f"{key}: {part if isinstance(part, str) else _shown(part)}" for key, part in value.items())
            or "none"
        )
    return str(value)


def _report_json(found: ModelCheck) -> dict[str, Any]:
    cases = [{"name": case.name, "passed": case.passed, "detail": case.detail} for case in found.report.cases]
    return {"deterministic": found.report.deterministic, "digest": found.digest, "cases": cases}


def _print_report(model: str, found: ModelCheck) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "same bytes", "detail", title=f"determinism of {model}", title_justify="left")
    for case in found.report.cases:
        table.add_row(case.name, "yes" if case.passed else "NO", case.detail)
    Console().print(table)
    print(f"deterministic: {str(found.report.deterministic).lower()}")
    print(f"digest: {found.digest}")


Source = Annotated[str, typer.Argument(help="Source: hf://org/name, optionally with @revision or #file.gguf.")]
_DAY_S = 86400.0


def pull(source: Source, as_json: flags.Json = False, debug: flags.Debug = False) -> None:
    """Download a model from the Hugging Face hub into the hub's cache, or update it there."""
    from lockstep.artifacts.hub.download import pull as fetch

    named = _hub_source(source)
    with _download_progress(str(named)) as progress:
        path = fetch(named, progress)
    if as_json:
        print(json.dumps({"source": str(named), "path": str(path)}, ensure_ascii=False))
    else:
        print(path)


def list_models(as_json: flags.Json = False, debug: flags.Debug = False) -> None:
    """List the models in the hub's cache that can be served."""
    from lockstep.artifacts.hub.cache import cache_directory, cached_models
    from lockstep.artifacts.hub.source import SCHEME

    models = cached_models()
    if as_json:
        print(json.dumps([asdict(model) for model in models], ensure_ascii=False, indent=2))
        return
    if models:
        _print_table(models)
    else:
        print(f"No models in {cache_directory()}; to download one: lockstep pull {SCHEME}org/name", file=sys.stderr)
    _print_packs()


def _print_packs() -> None:
    """Print number, size and folder of the packed weights, if there are any."""
    from lockstep.engine.loading import default_cache_dir
    from lockstep.executors.native.packs import FOLDER, stored_packs

    packs = stored_packs(default_cache_dir())
    if packs:
        total = size(sum(pack.num_bytes for pack in packs))
        print(f"Packed weights: {len(packs)} files, {total}, in {default_cache_dir() / FOLDER}")


def rm(
    source: Source,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Delete without confirmation.")] = False,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Delete a model, one revision of it or one GGUF file from the hub's cache."""
    from lockstep.artifacts.hub.cache import cache_directory, plan_removal, remove_leftovers
    from lockstep.engine.loading import default_cache_dir
    from lockstep.executors.native.packs import remove_orphans

    named = _hub_source(source)
    strategy = plan_removal(named)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("rm needs a confirmation, but standard input is not a terminal; add --yes")
        typer.confirm(f"Delete {named} and free {size(strategy.expected_freed_size)}?", abort=True, err=True)
    strategy.execute()
    freed = strategy.expected_freed_size + remove_leftovers(named)
    freed += remove_orphans(default_cache_dir(), cache_directory().absolute())
    if as_json:
        print(json.dumps({"source": str(named), "freed_bytes": freed}))
    else:
        print(f"Deleted {named}: {size(freed)} freed.")


def _hub_source(text: str) -> HubSource:
    """Source of a text with or without the scheme ``hf://``; UsageError for a path."""
    from lockstep.artifacts.hub.source import SCHEME, match_hub_source, parse_hub_source

    named = match_hub_source(text)
    if named is None or text.startswith(SCHEME):
        return parse_hub_source(text)
    if Path(text).exists():
        raise UsageError(f"{text} is a path on this disk; for the model on the hub write {SCHEME}{text}")
    return named


def _print_table(models: list[CachedModel]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "revision", "task", "format", box=None, pad_edge=False, header_style="bold")
    table.add_column("size", justify="right")
    table.add_column("last used")
    now = time.time()
    for model in models:
        taken, used = size(model.num_bytes), _ago(now - model.last_used_s)
        table.add_row(model.source, model.revision, model.task or "", model.format, taken, used)
    console = Console()
    # A pipe gets whole names of any length, because another program reads them.
    console.print(table, soft_wrap=not console.is_terminal, width=None if console.is_terminal else 1000)


def _ago(seconds: float) -> str:
    if seconds < _DAY_S:
        return "today"
    days = int(seconds // _DAY_S)
    return f"{days} day{'s' if days > 1 else ''} ago"


@contextmanager
def _download_progress(name: str) -> Iterator[DownloadProgress]:
    """Callback that draws bytes, speed and remaining time; it does nothing if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda file, have, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda file, have, total: bars.update(task, description=file, completed=have, total=total)
