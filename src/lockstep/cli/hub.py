"""`lockstep pull`, `list` and `rm`: models of the Hugging Face hub on this disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.artifacts.hub.source import SCHEME, HubSource, human_size, match_hub_source, parse_hub_source
from lockstep.cli import options as flags
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.artifacts.hub.cache import CachedModel
    from lockstep.artifacts.hub.source import DownloadProgress

Source = Annotated[str, typer.Argument(help="hf://org/name, with @revision or #file.gguf where they are needed.")]
_DAY_S = 86400.0


def pull(source: Source, as_json: flags.Json = False, debug: flags.Debug = False) -> None:
    """Bring a model from the Hugging Face hub into its cache, or the cached one up to date."""
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

    models = cached_models()
    if as_json:
        print(json.dumps([asdict(model) for model in models], ensure_ascii=False, indent=2))
    elif models:
        _print_table(models)
    else:
        print(f"No models in {cache_directory()}; lockstep pull {SCHEME}org/name brings one.", file=sys.stderr)


def rm(
    source: Source,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Delete a model, one revision of it or one GGUF file from the hub's cache."""
    from lockstep.artifacts.hub.cache import plan_removal, remove_leftovers

    named = _hub_source(source)
    strategy = plan_removal(named)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("rm asks before it deletes, and nobody is at the terminal: add --yes")
        typer.confirm(f"Delete {named} and free {human_size(strategy.expected_freed_size)}?", abort=True, err=True)
    strategy.execute()
    freed = strategy.expected_freed_size + remove_leftovers(named)
    if as_json:
        print(json.dumps({"source": str(named), "freed_bytes": freed}))
    else:
        print(f"Deleted {named}: {human_size(freed)} freed.")


def _hub_source(text: str) -> HubSource:
    """With or without the scheme; a path is never meant here, and is told so."""
    named = match_hub_source(text)
    if named is None or text.startswith(SCHEME):
        return parse_hub_source(text)
    if Path(text).exists():
        raise UsageError(f"{text} is a path on this disk; for the model on the hub write {SCHEME}{text}")
    return named


def _print_table(models: list[CachedModel]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "revision", "format", box=None, pad_edge=False, header_style="bold")
    table.add_column("size", justify="right")
    table.add_column("last used")
    now = time.time()
    for model in models:
        size, used = human_size(model.num_bytes), _ago(now - model.last_used_s)
        table.add_row(model.source, model.revision, model.format, size, used)
    console = Console()
    # A pipe gets whole names whatever their length: another program reads them.
    console.print(table, soft_wrap=not console.is_terminal, width=None if console.is_terminal else 1000)


def _ago(seconds: float) -> str:
    if seconds < _DAY_S:
        return "today"
    days = int(seconds // _DAY_S)
    return f"{days} day{'s' if days > 1 else ''} ago"


@contextmanager
def _download_progress(name: str) -> Iterator[DownloadProgress]:
    """Bytes, speed and remaining time on the terminal; silent where nobody looks."""
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
