"""A cluster of one model: what `lockstep serve MODEL` serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.cluster.base import Accepted, Call, EventStream, Health, ModelCard
from lockstep.cluster.prompting import generation_request
from lockstep.engine.llm import AsyncEngine
from lockstep.engine.loading import LoadOptions
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import InvalidParameterError, LockstepError, ModelNotFoundError, UnavailableError


@dataclass(frozen=True, slots=True)
class SingleModelOptions:
    """Which model, and under which names."""

    source: str
    names: tuple[str, ...]
    """The served name, then aliases."""
    load: LoadOptions = field(default_factory=LoadOptions)


class SingleModel:
    """Implements `lockstep.cluster.base.Cluster`."""

    def __init__(self, options: SingleModelOptions) -> None:
        self._options = options
        self._engine: AsyncEngine | None = None
        self._created_s = int(time.time())
        self._num_open = 0

    def cards(self) -> tuple[ModelCard, ...]:
        options, engine = self._options, self._engine
        model = None if engine is None else engine.model
        return (
            ModelCard(
                name=options.names[0],
                aliases=options.names[1:],
                root=options.source,
                created_s=self._created_s,
                tier="loading" if engine is None else "resident",
                max_model_len=None if engine is None else engine.engine.config.max_model_len,
                deterministic=None if model is None or model.probe is None else model.probe.deterministic,
                has_chat_template=None if model is None else model.tokenizer.has_chat_template,
            ),
        )

    def card(self, name: str | None) -> ModelCard:
        if name is not None and name not in self._options.names:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model")
        return self.cards()[0]

    def tokenizer(self, name: str | None) -> Tokenizer:
        self.card(name)
        return self._loaded().model.tokenizer

    async def stream(self, call: Call) -> EventStream:
        card = self.card(call.model)
        engine = self._loaded()
        if call.session_id is not None:
            raise InvalidParameterError("session_id is not served here", param="session_id")
        request = generation_request(engine.model.tokenizer, engine.engine.config.max_model_len, call)
        self._num_open += 1
        try:
            stream = engine.engine.stream(request)
            yield Accepted(card.name, tuple(request.prompt))  # type: ignore[arg-type]  # tokens by now
            async for output in stream:
                yield output
        finally:
            self._num_open -= 1

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        return {} if self._engine is None else {self._options.names[0]: self._engine.metrics()}

    def health(self) -> Health:
        return Health(False, "the model is loading") if self._engine is None else Health(True, "")

    async def check(self) -> str:
        try:
            self._loaded().engine.scheduler.check()
        except AssertionError as error:
            return str(error)
        return ""

    async def reset_prefix_cache(self) -> int:
        return self._loaded().engine.scheduler.reset_prefix_cache()

    @property
    def num_open(self) -> int:
        return self._num_open

    async def start(self) -> None:
        self._engine = await asyncio.to_thread(AsyncEngine, self._options.source, self._options.load)

    def abort_all(self, error: LockstepError) -> None:
        if self._engine is not None:
            self._engine.engine.abandon(error)

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _loaded(self) -> AsyncEngine:
        if self._engine is None:
            raise UnavailableError("the model is loading", retry_after_s=2.0)
        return self._engine
