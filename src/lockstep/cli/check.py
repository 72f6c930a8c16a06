"""`lockstep check FILE`: every fault of a manifest, or the placement that it would boot to."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options as flags
from lockstep.cli.manifests import STANDARD_INPUT, BackendName, backend_of, read_manifest, read_standard_input
from lockstep.engine.options import LoadOptions
from lockstep.errors import ManifestError

if TYPE_CHECKING:
    from lockstep.cluster.budget import Budget
    from lockstep.cluster.placement import Placement

EXIT_REFUSED = 2

ManifestFile = Annotated[Path, typer.Argument(metavar="FILE", help="A manifest; - reads standard input.")]


def check(
    file: ManifestFile,
    backend: BackendName = None,
    cache_dir: flags.CacheDir = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Tell every fault of a manifest, or where its models would be; exit code 2 if it would not boot."""
    from lockstep.cluster.placement import lines_of, place

    served_by = backend_of(backend)
    is_piped = str(file) == "-"
    try:
        manifest = read_standard_input() if is_piped else read_manifest(file)
    except ManifestError as error:
        if not as_json:
            raise
        problems = [{"line": each.line, "where": each.where, "message": each.message} for each in error.problems]
        _print_json({"name": error.name, "would_boot": False, "problems": problems})
        raise typer.Exit(EXIT_REFUSED) from None
    placement = place(manifest, served_by, LoadOptions(cache_dir=cache_dir), os.environ)
    if as_json:
        _print_json(_facts(STANDARD_INPUT if is_piped else str(file), str(served_by), placement))
    else:
        print("\n".join(lines_of(placement)))
        sys.stdout.flush()
        for warning in placement.warnings:
            print(f"lockstep: warning: {warning}", file=sys.stderr)
        for refusal in placement.refusals:
            print(f"lockstep: error: {refusal}", file=sys.stderr)
    if placement.refusals:
        raise typer.Exit(EXIT_REFUSED)


def _print_json(facts: dict[str, Any]) -> None:
    print(json.dumps(facts, ensure_ascii=False, indent=2))


def _facts(name: str, backend: str, placement: Placement) -> dict[str, Any]:
    table = placement.table
    return {
        "name": name,
        "cluster": placement.declared.cluster,
        "backend": backend,
        "would_boot": not placement.refusals,
        "problems": [],
        "refusals": list(placement.refusals),
        "warnings": list(placement.warnings),
        "models": [_model(entry.id, placement) for entry in placement.declared.entries],
        "budgets": [
            _budget(table.budgets.gpu, table.gpu_needed_bytes),
            _budget(table.budgets.ram, table.ram_needed_bytes),
        ],
    }


def _model(id_: str, placement: Placement) -> dict[str, Any]:
    declared, served, row = placement.declared.entry(id_), placement.served.entry(id_), placement.row(id_)
    size = "unknown" if row is None else row.origin
    return {
        "id": id_,
        "set": declared.set,
        "tier": declared.tier.value,
        "served_tier": served.tier.value,
        "source": served.source,
        "size": None if size is None else str(size),
        "resident_bytes": None if row is None else row.gpu_bytes,
        "memory_bytes": None if row is None else row.ram_bytes,
        "shares_with": None if row is None else row.shares_with,
        "verdict": "unknown" if row is None else row.verdict.value,
    }


def _budget(budget: Budget, needed_bytes: int) -> dict[str, Any]:
    return {
        "name": budget.name,
        "declared_bytes": budget.declared_bytes,
        "effective_bytes": budget.effective_bytes,
        "needed_bytes": needed_bytes,
    }
