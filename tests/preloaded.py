"""What `tests.processes` imports once for all commands that it forks; a warning at an import is an error."""

from __future__ import annotations

import importlib
import warnings

MODULES = (
    "jinja2",
    "llguidance",
    "prompt_toolkit",
    "tokenizers",
    "uvloop",
    "lockstep.cli.bench",
    "lockstep.cli.chat",
    "lockstep.cli.run",
    "lockstep.cli.serve",
    "lockstep.cli.terminal",
    "lockstep.cluster.cluster",
    "lockstep.engine.loading",
    "lockstep.server.run",
    "lockstep.worker.device",
    "lockstep.worker.supervised",
)

warnings.simplefilter("error")
for name in MODULES:
    try:
        importlib.import_module(name)
    except ImportError as error:  # which `multiprocessing` would pass over
        raise RuntimeError(f"{name} cannot be imported ahead") from error
