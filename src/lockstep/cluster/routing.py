"""Routing: builds the request of each hop, and decides which model answers next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import fields, replace

from lockstep.cluster.dispatch import DispatchRule
from lockstep.cluster.manifest import Manifest, ModelEntry, Persona, Routing
from lockstep.cluster.nearest import NearestRule, Scores, Vector, decide
from lockstep.engine.request import Conversation, GenerationRequest, Prompt
from lockstep.errors import InvalidParameterError
from lockstep.executors.constraint import Constraint
from lockstep.executors.sampling_params import SamplingParams

_DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in fields(SamplingParams)}


@dataclass(frozen=True, slots=True)
class DispatchDecision:
    """Routing decision that follows from the entry model's answer."""

    intent: str | None
    """Value read from the answer; None: no value was found."""
    target: str | None
    """Id of the model that answers next; None: the entry model's answer is returned."""
    is_fallback: bool = False
    """True if the target is the fallback because the rule selects no model."""


class Router:
    """Routing of one manifest, with derived values computed once."""

    def __init__(self, manifest: Manifest, routing: Routing) -> None:
        assert isinstance(routing.rule, DispatchRule), "`of` creates the router of each kind"
        self.entry = routing.entry
        self._rule = routing.rule
        self._fallback = manifest.fallback
        self._ids = manifest.targets
        words = routing.rule.constraint_words(self._ids)
        choices = (*words, *(f"{routing.rule.field_name}={word}" for word in words))
        self._params = SamplingParams(
            temperature=0.0,
            # No tokenizer has more tokens than bytes; one more for the end.
            max_tokens=1 + max(len(choice.encode()) for choice in choices),
            constraint=Constraint.choice(choices),
        )
        self._decisions = {choice: self._decided(choice) for choice in choices}
        """Decision for each answer that the entry model may give."""
        self._targets = tuple((choice, decision.target) for choice, decision in self._decisions.items())

    @staticmethod
    def of(manifest: Manifest) -> Router | NearestRouter | None:
        """Return the routing of a manifest; None: requests are not routed."""
        routing = manifest.routing
        if routing is None:
            return None
        if isinstance(routing.rule, NearestRule):
            return NearestRouter(routing.entry, routing.rule, manifest.fallback)
        return Router(manifest, routing)

    def question(self, call: GenerationRequest) -> GenerationRequest:
        """Request for the entry model's hop: greedy, and constrained to the words of the rule.

        Raises:
            InvalidParameterError: the prompt is token ids, which are valid for one model only.
        """
        return replace(
            call,
            model=self.entry,
            prompt=_conversation(call.prompt),
            params=self._params,
            truncate_prompt_tokens=None,
            prompt_logprobs=None,
            shown_specials=(),
        )

    def decide(self, answer: str) -> DispatchDecision:
        """Decide which model answers next."""
        return self._decisions.get(answer) or self._decided(answer)

    def _decided(self, answer: str) -> DispatchDecision:
        value = self._rule.read(answer)
        target = None if value is None else self._rule.target_of(value, self._ids)
        if target is not None:
            return DispatchDecision(value, target)
        return DispatchDecision(value, self._fallback, is_fallback=self._fallback is not None)

    def foresee(self, beginning: str) -> str | None:
        """Target of the routing decision, as soon as the beginning of the entry's answer determines it; None: it does
        not yet."""
        possible = {target for choice, target in self._targets if choice.startswith(beginning)}
        return possible.pop() if beginning and len(possible) == 1 else None


class NearestRouter:
    """Routing by nearest examples, with the vectors of the examples once they have been computed.

    Args:
        entry: id of the embedding model.
        fallback: id of the model that answers if no example is similar enough.
    """

    def __init__(self, entry: str, rule: NearestRule, fallback: str | None) -> None:
        self.entry = entry
        self.rule = rule
        self._fallback = fallback
        self._vectors: tuple[str, Sequence[Vector]] | None = None

    def vectors_of(self, fingerprint: str) -> Sequence[Vector] | None:
        """Vectors of the examples by the artifact with this fingerprint; None: they have not been computed."""
        return self._vectors[1] if self._vectors is not None and self._vectors[0] == fingerprint else None

    def remember(self, fingerprint: str, vectors: Sequence[Vector]) -> None:
        """Set the vectors of the examples."""
        self._vectors = fingerprint, vectors

    def decide(self, examples: Sequence[Vector], message: Vector) -> tuple[DispatchDecision, Scores]:
        """Decide which model answers a message, and return the scores of all models."""
        found = decide(self.rule, examples, message)
        if found.target is not None:
            return DispatchDecision(found.target, found.target), found.scores
        return DispatchDecision(None, self._fallback, is_fallback=True), found.scores


def addressed(call: GenerationRequest, entry: ModelEntry) -> GenerationRequest:
    """Return a call with a model's persona, its adapter, its priority, and its sampling defaults where the call sets
    none."""
    return replace(
        call,
        model=entry.id,
        adapter="" if entry.adapter is None else entry.id,
        prompt=_with_persona(call.prompt, entry),
        params=_with_defaults(call.params, entry.sampling),
        priority=call.priority + entry.priority,
    )


def _with_persona(prompt: Prompt, entry: ModelEntry) -> Prompt:
    """Add the persona to a conversation; a plain prompt stays as it is."""
    words = entry.system_prompt
    if words is None or not isinstance(prompt, Conversation):
        return prompt
    own: Mapping[str, Any] = {"role": "system", "content": words}
    messages: Sequence[Mapping[str, Any]] = prompt.messages
    if entry.persona is Persona.SUFFIX:
        last = len(messages) - prompt.continue_final  # a message to be continued stays last
        return replace(prompt, messages=[*messages[:last], own, *messages[last:]])
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        # Many templates take one system message, and only as the first.
        return replace(prompt, messages=[{**first, "content": f"{words}\n\n{first['content']}"}, *messages[1:]])
    return replace(prompt, messages=[own, *messages])


def _with_defaults(params: SamplingParams, sampling: Mapping[str, float | int]) -> SamplingParams:
    if not sampling:
        return params
    missing: dict[str, Any] = {
        name: value for name, value in sampling.items() if getattr(params, name) == _DEFAULTS[name]
    }
    return replace(params, **missing) if missing else params


def _conversation(prompt: Prompt) -> Conversation:
    if isinstance(prompt, Conversation):
        return replace(prompt, reasoning="off", add_generation_prompt=True, continue_final=False)
    if isinstance(prompt, str):
        return Conversation([{"role": "user", "content": prompt}], reasoning="off")
    raise InvalidParameterError(
        "the prompt is token ids, which are valid for one model only; name a model, or send text", param="prompt"
    )
