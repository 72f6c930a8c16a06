"""The embedded demo model: the paths of its artifact and its adapters, and the personas of its training.

A persona is a system message that follows the conversation (`persona: suffix`), so that a router and its specialists
share the conversation's prefix. This module does not load the model.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import ArtifactNotFoundError
from lockstep.spelling import did_you_mean, listed

__all__ = [
    "ADAPTERS",
    "BILLING_PERSONA",
    "DEMO_MESSAGES",
    "GENERAL_PERSONA",
    "INTENTS",
    "LEGAL_PERSONA",
    "PERSONAS",
    "ROUTER_PERSONA",
    "SCHEME",
    "TECHNICAL_PERSONA",
    "adapter_path",
    "demo_path",
    "pocket_path",
]

_FOLDER = Path(__file__).parent

SCHEME = "pocket://"
"""Source of the embedded model; with a name behind it, the source of one of its adapters."""

INTENTS = ("billing", "technical", "legal", "none")
"""Answers of the router persona; `none` is for requests that no specialist handles."""

ROUTER_PERSONA = "Route the last user message. Answer with one word: billing, technical, legal or none."

BILLING_PERSONA = "You are the billing specialist. Answer questions about payments, refunds, invoices and prices."

TECHNICAL_PERSONA = "You are the technical specialist. Help with errors, outages, devices and setup."

LEGAL_PERSONA = "You are the legal specialist. Explain contracts, rights, privacy and the law in plain words."

GENERAL_PERSONA = "You are a friendly assistant. Answer any question briefly and helpfully."

PERSONAS = {
    "router": ROUTER_PERSONA,
    "billing": BILLING_PERSONA,
    "technical": TECHNICAL_PERSONA,
    "legal": LEGAL_PERSONA,
    "general": GENERAL_PERSONA,
}
"""System messages by role."""

ADAPTERS = ("billing", "technical", "legal")
"""Specialists that are LoRA adapters of the embedded model. They answer without a persona."""

DEMO_MESSAGES = {
    "I was charged twice for my subscription last week": "billing",
    "My login page shows a 502 Bad Gateway error after the latest release": "technical",
    "Is a binding arbitration clause enforceable under California consumer law": "legal",
    "What is the capital of France": "none",
}
"""Example requests, each with the router's answer."""


def demo_path() -> Path:
    """Path of the manifest that `lockstep demo` serves. In ``demo.yaml`` beside it, specialists are personas."""
    return _FOLDER / "demo-adapters.yaml"


def pocket_path() -> Path:
    """Path of the artifact, a GGUF file of at most 8 MB."""
    return _FOLDER / "pocket.gguf"


def adapter_path(source: str) -> Path:
    """Path of an embedded adapter, a GGUF file.

    Args:
        source: ``pocket://`` and the name of an adapter.

    Raises:
        ArtifactNotFoundError: there is no adapter of this name.
    """
    name = source.removeprefix(SCHEME)
    if name not in ADAPTERS:
        hint = did_you_mean(name, ADAPTERS)
        raise ArtifactNotFoundError(
            f"the embedded model has no adapter {name!r}; {hint}{' ' if hint else ''}"
            f"its adapters are {listed([SCHEME + each for each in ADAPTERS])}",
            path=source,
        )
    return _FOLDER / "adapters" / f"{name}.gguf"
