"""`lockstep models`: what an artifact is, and whether this machine computes it deterministically."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import typer

from lockstep.artifacts.model import Artifact
from lockstep.artifacts.source import open_artifact
from lockstep.cli import options as flags
from lockstep.cli.flag_groups import with_flags
from lockstep.cli.progress import loading_progress
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.errors import MissingTokenizerError
from lockstep.executors.openvino.options import precision_summary

if TYPE_CHECKING:
    from lockstep.executors.probe import ProbeReport

models_app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@models_app.callback()
def _models(context: typer.Context) -> None:
    """Look at models on disk."""
    flags.show_help_without_command(context)


@models_app.command()
@with_flags
def info(
    model: flags.Model,
    *,
    openvino: flags.Quantize,
    cache_dir: flags.CacheDir = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """What a model on disk is, and as what it would be loaded; reads no weights."""
    with loading_progress(model) as progress:
        artifact = open_artifact(
            model, cache_dir=cache_dir, progress=lambda name, have, total: progress(name, have / max(total, 1))
        )
    facts = _facts(artifact, openvino.quantize)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):{width}}  {_shown(value)}")


@models_app.command()
@with_flags
def verify(
    model: flags.Model,
    *,
    openvino: flags.OpenVINO,
    cache_dir: flags.CacheDir = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Check on this machine that batching, chunking, swapping and reloading change no bit; exit code 1 if one does."""
    from lockstep.engine.loading import verify_model

    options = LoadOptions(EngineOptions(max_num_seqs=1), openvino, cache_dir, probe=False)
    with loading_progress(model) as progress:
        report = verify_model(model, options, progress)
    if as_json:
        print(json.dumps(_report_json(report), indent=2))
    else:
        _print_report(model, report)
    if not report.deterministic:
        raise typer.Exit(1)


def _facts(artifact: Artifact, quantize: str | None) -> dict[str, Any]:
    config = artifact.config
    tensors = [artifact.weights[name] for name in artifact.weights.names()]
    num_parameters = sum(_size(tensor.shape) for tensor in tensors)
    facts: dict[str, Any] = {
        "name": artifact.name,
        "path": str(artifact.path),
        "format": artifact.format,
        "architecture": config.architecture,
        "parameters": num_parameters or None,
        "bytes": artifact.num_bytes,
        "encodings": dict(sorted(Counter(tensor.encoding.value for tensor in tensors).items())),
        "loaded_as": precision_summary(artifact.weights, quantize) or "exported",
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": f"{config.num_heads} ({config.num_kv_heads} key-value)",
        "head_dim": config.head_dim,
        "vocabulary": config.vocab_size,
        "max_model_len": config.max_model_len,
        "kv_bytes_per_token_f16": 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim,
        "rope_scaling": None if config.rope_scaling is None else config.rope_scaling.kind,
        "tied_embeddings": config.tied_embeddings,
        "fingerprint": artifact.fingerprint,
        "sampling_defaults": dict(artifact.sampling_defaults),
    }
    try:
        parts = artifact.load_tokenizer()
    except MissingTokenizerError:
        return facts | {"tokenizer": None}
    return facts | {
        "tokenizer": f"{parts.tokenizer.get_vocab_size()} tokens",
        "end_tokens": {str(i): parts.tokenizer.id_to_token(i) for i in parts.end_token_ids},
        "chat_template": parts.chat_template is not None,
    }


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {part}" for key, part in value.items()) or "none"
    return str(value)


def _report_json(report: ProbeReport) -> dict[str, Any]:
    cases = [{"name": case.name, "passed": case.passed, "detail": case.detail} for case in report.cases]
    return {"deterministic": report.deterministic, "cases": cases}


def _print_report(model: str, report: ProbeReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "same bytes", "detail", title=f"determinism of {model}", title_justify="left")
    for case in report.cases:
        table.add_row(case.name, "yes" if case.passed else "NO", case.detail)
    Console().print(table)
    print(f"deterministic: {str(report.deterministic).lower()}")
