"""What an answer cost: OpenAI's `usage`, and our `lockstep` beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.engine.outputs import RequestOutput

MS = 1_000.0


def usage_of(outputs: Sequence[RequestOutput], num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Tokens over all prompts; a prompt counts once, whatever its `n`."""
    return usage_of_counts(
        sum(output.num_prompt_tokens for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(output.num_output_tokens for output in outputs),
        num_reasoning_tokens,
    )


def usage_of_counts(
    num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int, num_reasoning_tokens: int = 0
) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def extension_of(
    request_id: str, session_id: str | None, outputs: Sequence[RequestOutput], warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Where the time went. Of several prompts: the longest wait, the earliest token, the rate of all together."""
    ttfts_s = [output.timings.ttft_s for output in outputs if output.timings.ttft_s is not None]
    total_s = max((output.timings.total_s for output in outputs), default=0.0)
    num_tokens = sum(output.num_output_tokens for output in outputs)
    return {
        "request_id": request_id,
        "queue_ms": round(MS * max((output.timings.queue_s for output in outputs), default=0.0), 3),
        "ttft_ms": round(MS * min(ttfts_s), 3) if ttfts_s else None,
        "tokens_per_second": round(num_tokens / total_s, 3) if total_s > 0 else None,
        "preemptions": sum(output.num_preemptions for output in outputs),
        "session_id": session_id,
        **({"warnings": warnings} if warnings else {}),
    }
