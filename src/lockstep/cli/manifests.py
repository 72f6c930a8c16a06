"""Manifests of the command line: `lockstep check`, and reading from files and pipes with the process's environment."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.artifacts.task import MERGE
from lockstep.cli import options as flags
from lockstep.engine.options import LoadOptions
from lockstep.errors import ConfigError, ManifestError, UsageError

if TYPE_CHECKING:
    from lockstep.cluster.backend import Backend, OneModel
    from lockstep.cluster.manifest import Manifest
    from lockstep.cluster.placement import Placement


STANDARD_INPUT = "standard input"
"""Name of a piped manifest in errors."""
BackendName = Annotated[
    str | None,
    typer.Option(
        metavar="auto|stub|pocket|SOURCE",
        help="Models behind the manifest's names: auto is their own sources, stub is stubs without files, pocket is "
        "the embedded model, and SOURCE is one model (a path, hf://, pocket://, stub://).",
        show_default="auto",
    ),
]


def read_manifest(path: Path) -> Manifest:
    """Read a manifest from a file. It may refer to environment variables of this process.

    Raises:
        UsageError: the file cannot be read.
        ManifestError: the manifest has faults.
    """
    from lockstep.cluster.manifest_file import parse
    from lockstep.yaml_reading import read_text

    return parse(read_text(path, "the manifest"), str(path), environment=os.environ)


def read_standard_input() -> Manifest:
    """Read a manifest from standard input, with the errors of `read_manifest`."""
    from lockstep.cluster.manifest_file import parse
    from lockstep.yaml_reading import MAX_BYTES, text_of

    text = text_of(sys.stdin.buffer.read(MAX_BYTES + 1), f"the manifest {STANDARD_INPUT}")
    return parse(text, STANDARD_INPUT, environment=os.environ)


def backend_of(name: str | None) -> Backend | OneModel:
    """Backend of the value of --backend; UsageError, with the valid values, if there is none."""
    from lockstep.cluster.backend import Backend, OneModel
    from lockstep.cluster.manifest_keys import check_source
    from lockstep.pocket import SCHEME as EMBEDDED
    from lockstep.spelling import did_you_mean

    names = [each.value for each in Backend]
    if name is None or name in names:
        return Backend(name or "auto")
    if name == EMBEDDED:
        return Backend.POCKET
    try:
        check_source(name)
    except ConfigError as error:
        raise UsageError(f"--backend {error}") from None
    model = name.split(MERGE)[0]
    is_path = os.path.dirname(model) or model.endswith(".gguf") or Path(model).expanduser().exists()
    if "://" not in name and not is_path:
        known = (
            f"it must be {', '.join(names)} or the source of one model (a path, hf://org/name, pocket://, stub://NAME)"
        )
        raise UsageError(f"--backend is {name!r}; {'; '.join(filter(None, (known, did_you_mean(name, names))))}")
    return OneModel(name)


EXIT_REFUSED = 2

ManifestFile = Annotated[Path, typer.Argument(metavar="FILE", help="Manifest file; - reads standard input.")]


def check(
    file: ManifestFile,
    backend: BackendName = None,
    cache_dir: flags.CacheDir = None,
    as_json: flags.Json = False,
    debug: flags.Debug = False,
) -> None:
    """Report every fault of a manifest, or the placement of its models; exit code 2 if it cannot boot."""
    from lockstep.cluster.placement import place, text_of

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
        print(text_of(placement))
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
    return {
        "name": name,
        "cluster": placement.declared.cluster,
        "backend": backend,
        "would_boot": not placement.refusals,
        "problems": [],
        "refusals": list(placement.refusals),
        "warnings": list(placement.warnings),
        "models": [_model(entry.id, placement) for entry in placement.declared.entries],
        "budgets": [asdict(budget) for budget in placement.table.budgets],
        "hosts": _hosts(placement),
    }


def _hosts(placement: Placement) -> dict[str, Any] | None:
    """Effective values of ``hosts:``, except ``replicas``; None: all models run on this machine."""
    from lockstep.cluster.manifest_hosts import HOSTS, TLS

    hosts = placement.declared.hosts
    if hosts is None:
        return None
    keys = {key: how.attribute or key for key, how in (*HOSTS.items(), *TLS.items())}
    tls = {key: getattr(hosts, keys[key]) or None for key in TLS}
    plain = {key: getattr(hosts, keys[key]) for key in HOSTS if key not in ("replicas", "tls")}
    return {**plain, "routing": hosts.routing.value, "tls": tls if hosts.tls_ca else None}


def _model(id_: str, placement: Placement) -> dict[str, Any]:
    declared, served, row = placement.declared.entry(id_), placement.served.entry(id_), placement.row(id_)
    size = "unknown" if row is None else row.origin
    demand = placement.demands.get(id_)
    return {
        "id": id_,
        "set": declared.set,
        "tier": declared.tier.value,
        "served_tier": served.tier.value,
        "source": served.source,
        "adapter": served.adapter,
        "task": placement.tasks.get(id_),
        "size": None if size is None else str(size),
        "resident_bytes": None if row is None else row.gpu_bytes,
        "memory_bytes": None if row is None else row.ram_bytes,
        "shares_with": None if row is None else row.shares_with,
        "replicas": None if demand is None else asdict(demand),
        "verdict": "unknown" if row is None else row.verdict.value,
    }
