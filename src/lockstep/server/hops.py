"""Routed answers: what a client is told of the models that were asked before the one that answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.cluster.base import Accepted, Hop
from lockstep.engine.outputs import RequestOutput
from lockstep.server.usage import MS, usage_of, usage_of_counts

DISPATCH = "dispatch_to_specialist"
"""The function that a router is shown to have called."""
CALL_SUFFIX = "_router"


@dataclass(frozen=True, slots=True)
class Route:
    """How a request came to those who answer it."""

    accepted: Sequence[Accepted]
    """Of its calls, one per prompt."""
    started_s: float
    """When the request came, on the monotonic clock."""

    def told(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Members of the `lockstep` extension; none where nobody was asked before. Of several prompts the first says
        who answered, and `hops` has those of all, prompt by prompt."""
        first = self.accepted[0]
        if not first.hops:
            return {}
        hops: list[dict[str, Any]] = []
        for index, accepted in enumerate(self.accepted):
            hops += [_hop(hop) for hop in accepted.hops]
            if index < len(outputs) and accepted.hops and accepted.hops[-1].target is not None:
                hops.append(_last_hop(accepted.model, outputs[index]))
        return {
            "entry_model": first.hops[0].model,
            "final_model": first.model,
            "intent": first.hops[-1].intent,
            "latency_ms": round(MS * (time.monotonic() - self.started_s), 3),
            "hops": hops,
        }


def dispatch_calls(answer_id: str, hops: Sequence[Hop]) -> list[dict[str, Any]]:
    """The routing decisions as calls of a function; a hop whose own answer stands called nobody."""
    return [
        {
            "id": f"call_{answer_id}{CALL_SUFFIX}" + (str(index) if index else ""),
            "type": "function",
            "function": {
                "name": DISPATCH,
                "arguments": msgspec.json.encode({"intent": hop.intent, "target": hop.target}).decode(),
            },
        }
        for index, hop in enumerate(hops)
        if hop.target is not None
    ]


def is_dispatch(call_id: str, name: str) -> bool:
    """Whether a call in a conversation is one of ours, sent back as it came: no model wrote it, so none is shown it."""
    return name == DISPATCH and call_id.startswith("call_") and CALL_SUFFIX in call_id


def _hop(hop: Hop) -> dict[str, Any]:
    return {
        "model": hop.model,
        "completion": hop.completion,
        "intent": hop.intent,
        "latency_ms": round(MS * hop.latency_s, 3),
        "usage": usage_of_counts(hop.num_prompt_tokens, hop.num_cached_tokens, hop.num_output_tokens),
    }


def _last_hop(model: str, output: RequestOutput) -> dict[str, Any]:
    return {
        "model": model,
        "completion": output.text,
        "intent": None,
        "latency_ms": round(MS * output.timings.total_s, 3),
        "usage": usage_of([output]),
    }
