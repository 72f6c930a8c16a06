"""Lockstep: an LLM serving runtime whose answers are bitwise identical, alone or batched.

    from lockstep import LLM, SamplingParams

    with LLM("pocket://") as llm:
        for output in llm.chat([{"role": "user", "content": "I was charged twice."}], SamplingParams(max_tokens=64)):
            print(output.text)

Names are imported when they are first used, so that importing the package takes little time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.core.request import FinishReason
    from lockstep.engine.engine import Engine
    from lockstep.engine.llm import LLM, AsyncEngine
    from lockstep.engine.loading import load_model
    from lockstep.engine.options import AdapterSource, EngineOptions, LoadOptions
    from lockstep.engine.outputs import Completion, RequestOutput, StepOutputs, TokenOutput
    from lockstep.engine.request import GenerationRequest
    from lockstep.errors import LockstepError
    from lockstep.executors.constraint import Constraint
    from lockstep.executors.options import ExecutorOptions
    from lockstep.executors.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AdapterSource",
    "AsyncEngine",
    "Completion",
    "Constraint",
    "Engine",
    "EngineOptions",
    "ExecutorOptions",
    "FinishReason",
    "GenerationRequest",
    "LoadOptions",
    "LockstepError",
    "RequestOutput",
    "SamplingParams",
    "StepOutputs",
    "TokenOutput",
    "__version__",
    "load_model",
]

_HOMES = {
    "LLM": "lockstep.engine.llm",
    "AdapterSource": "lockstep.engine.options",
    "AsyncEngine": "lockstep.engine.llm",
    "Completion": "lockstep.engine.outputs",
    "Constraint": "lockstep.executors.constraint",
    "Engine": "lockstep.engine.engine",
    "EngineOptions": "lockstep.engine.options",
    "FinishReason": "lockstep.core.request",
    "GenerationRequest": "lockstep.engine.request",
    "LoadOptions": "lockstep.engine.options",
    "LockstepError": "lockstep.errors",
    "ExecutorOptions": "lockstep.executors.options",
    "RequestOutput": "lockstep.engine.outputs",
    "SamplingParams": "lockstep.executors.sampling_params",
    "StepOutputs": "lockstep.engine.outputs",
    "TokenOutput": "lockstep.engine.outputs",
    "load_model": "lockstep.engine.loading",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
