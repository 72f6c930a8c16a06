"""`lockstep collect-env`: facts about the machine for a bug report. It sends no data and shows no secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.cli import options as flags
from lockstep.version import __version__

PACKAGES = (
    *("numpy", "tokenizers", "jinja2", "llguidance", "msgspec", "huggingface-hub", "fastapi", "uvicorn"),
    *("uvloop", "httptools", "httpx2", "pydantic", "prometheus-client", "typer", "rich", "psutil", "platformdirs"),
    *("prompt-toolkit", "opentelemetry-sdk", "openai", "torch", "transformers", "llama-cpp-python"),
)
MAX_CACHE_FILES = 100_000
"""Maximum number of files that are counted in a cache."""
_VARIABLES = re.compile(
    r"LOCKSTEP_\w+|HF_\w+|OPENAI_(BASE_URL|API_KEY)|OTEL_\w+|(OMP|OPENBLAS|MKL)_NUM_THREADS|XDG_CACHE_HOME"
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|HEADERS", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MASKED = "(set, not shown)"


def collect_env(as_json: flags.Json = False, debug: flags.Debug = False) -> None:
    """Print versions, machine, limits, caches and settings for a bug report."""
    facts = gather(os.environ)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
        return
    for title, section in facts.items():
        print(f"{title}:")
        for name, value in section.items():
            print(f"  {name}: {_shown(value)}")


def gather(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """All sections; a fact that is not available on this machine is None."""
    return {
        "lockstep": {
            "version": __version__,
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "core": "compiled" if is_compiled() else "interpreted",
            "kernels": _kernels(),
        },
        "packages": _packages(),
        "system": _system(),
        "processor": _processor(),
        "memory": _memory(),
        "caches": _caches(),
        "environment": variables(environ),
    }


def is_compiled() -> bool:
    """True if the modules of the scheduler are compiled, as in binary wheels."""
    from lockstep.core import scheduler

    return not (scheduler.__file__ or "").endswith(".py")


def _kernels() -> str:
    """Instruction sets of the native library that this processor supports, the fastest first, and its bits version."""
    from lockstep.executors.native.library import native_library

    library = native_library()
    if isinstance(library, str):
        return f"none: {library}"
    return f"{', '.join(library.usable)}; bits version {library.bits_version}"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that affect Lockstep, sorted. Values of secrets are masked."""
    chosen = sorted(name for name in environ if _VARIABLES.fullmatch(name))
    return {name: MASKED if _SECRET.search(name) else _plain(environ[name]) for name in chosen}


def _plain(value: str) -> str:
    """A value without credentials in URLs and without the home directory in paths."""
    return _without_home(_CREDENTIALS.sub("***", value))


def _without_home(path: str) -> str:
    home = str(Path.home())
    return path.replace(home, "~") if len(home) > 1 else path


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _system() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "in_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "stdout_encoding": sys.stdout.encoding,
    }


def _processor() -> dict[str, Any]:
    import psutil

    from lockstep.executors.machine import available_cores, instruction_set, processor_name

    return {
        "model": processor_name(),
        "instructions": instruction_set(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "usable_cores": available_cores(),
        "cgroup_cpu_max": _first_line(Path("/sys/fs/cgroup/cpu.max")),
    }


def _memory() -> dict[str, Any]:
    import psutil

    from lockstep.executors.machine import available_memory_bytes

    memory = psutil.virtual_memory()
    return {
        "total_bytes": memory.total,
        "available_bytes": memory.available,
        "usable_bytes": available_memory_bytes(),
        "swap_bytes": psutil.swap_memory().total,
        "cgroup_memory_max": _first_line(Path("/sys/fs/cgroup/memory.max")),
    }


def _caches() -> dict[str, Any]:
    from lockstep.artifacts.hub.cache import cache_directory
    from lockstep.engine.loading import default_cache_dir
    from lockstep.executors.native.packs import FOLDER

    packed = Path(os.environ.get("LOCKSTEP_CACHE_DIR") or default_cache_dir()).expanduser()
    return {"packed_weights": _cache(packed / FOLDER), "hub": _cache(cache_directory())}


def _cache(path: Path) -> dict[str, Any]:
    num_files = num_bytes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            num_files += 1
            try:
                num_bytes += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # deleted in the meantime
                continue
        if num_files > MAX_CACHE_FILES:
            break
    return {"path": _without_home(str(path)), "exists": path.is_dir(), "files": num_files, "bytes": num_bytes}


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().strip().split("\n")[0]
    except OSError:
        return None


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
