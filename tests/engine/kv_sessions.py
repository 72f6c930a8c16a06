"""Sessions of the embedded model whose KV is stored and restored: prompts, requests and results."""

from __future__ import annotations

import random
from typing import Any

from lockstep.engine.engine import Engine
from lockstep.engine.kv_transfer import KVTransfer
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import GenerationRequest
from lockstep.executors.sampling_params import SamplingParams

BLOCK = 32
OWNER = "m"


def prompt(number: int, length: int = 150) -> tuple[int, ...]:
    rng = random.Random(number)
    return tuple(rng.randrange(300, 4000) for _ in range(length))


def ask(tokens: tuple[int, ...], session: str | None = None, max_tokens: int = 6, **fields: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(tokens, params, session_id=session, session_owner=OWNER, **fields)


def answer(engine: Engine, request: GenerationRequest) -> RequestOutput:
    request_id = engine.submit(request)
    engine.run_until_idle()
    output = engine.result(request_id)
    assert output is not None
    assert output.error is None
    return output


def tokens_of(output: RequestOutput) -> tuple[int, ...]:
    return tuple(output.completions[0].token_ids)


def kv_of(engine: Engine) -> KVTransfer:
    assert engine.sessions.kv is not None
    return engine.sessions.kv


def hashes_of(engine: Engine, session: str) -> tuple[bytes, ...]:
    """Block hashes that a session will need again."""
    kv = kv_of(engine)
    [hashes] = [record.hashes for record in kv.store.records(kv.environment) if record.session_id == session]
    return hashes


def leave(engine: Engine) -> None:
    """Evict all sessions from the device after storing their blocks."""
    engine.sessions.sweep()
    assert kv_of(engine).store.flush(10.0)
