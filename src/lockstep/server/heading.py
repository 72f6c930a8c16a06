"""What every answer begins with: its id, its time, who answers and with what."""

from __future__ import annotations

import hashlib
import secrets
import time

from lockstep.cluster.base import ModelCard
from lockstep.server.answer import Heading
from lockstep.server.record import RequestRecord
from lockstep.server.schema import GenerationBody
from lockstep.version import __version__


def heading_of(prefix: str, card: ModelCard, body: GenerationBody, record: RequestRecord) -> Heading:
    """A new heading; ``prefix`` is the kind of its id."""
    options = body.stream_options
    is_continuous = options is not None and bool(options.continuous_usage_stats)
    has_last = None if options is None else options.include_usage
    return Heading(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created_s=int(time.time()),
        model=card.name,
        fingerprint=system_fingerprint(card),
        request_id=record.request_id,
        started_s=record.started_s,
        session_id=body.session_id,
        include_usage=is_continuous if has_last is None else has_last,
        continuous_usage=is_continuous,
        service_tier=None if body.service_tier is None else "default",
        warnings=record.warnings,
    )


def system_fingerprint(card: ModelCard) -> str:
    """Changes with our version, with where the model came from and with its context length."""
    what = f"{__version__}\0{card.root}\0{card.max_model_len}"
    return f"fp_{hashlib.sha256(what.encode()).hexdigest()[:12]}"
