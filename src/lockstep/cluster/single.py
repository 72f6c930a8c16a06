"""A cluster of one model: what `lockstep serve MODEL` serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.cluster.base import Accepted, Call, EventStream, Health, ModelCard, recording_warnings
from lockstep.cluster.prompting import prepared_request
from lockstep.engine.loading import LoadOptions, Progress
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.tokenizer import Tokenizer
from lockstep.errors import LockstepError, ModelNotFoundError
from lockstep.worker.messages import Loaded
from lockstep.worker.options import WorkerOptions
from lockstep.worker.supervised import SupervisedWorker

REPLICA = "model"
"""The key of the only replica."""


@dataclass(frozen=True, slots=True)
class SingleModelOptions:
    """Which model, and under which names."""

    source: str
    names: tuple[str, ...]
    """The served name, then aliases."""
    load: LoadOptions = field(default_factory=LoadOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)


class SingleModel:
    """Implements `lockstep.cluster.base.Cluster`.

    Args:
        progress: told about the stages of the first loading.
    """

    def __init__(self, options: SingleModelOptions, progress: Progress | None = None) -> None:
        self._options = options
        self._progress = progress
        self.worker = SupervisedWorker(options.worker)
        self._created_s = int(time.time())
        self._num_open = 0
        self._known: tuple[Loaded, Tokenizer] | None = None
        """The last loading, and the text side that it told."""

    def cards(self) -> tuple[ModelCard, ...]:
        options, loaded = self._options, self.worker.loaded(REPLICA)
        probe = None if loaded is None else loaded.probe
        return (
            ModelCard(
                name=options.names[0],
                aliases=options.names[1:],
                root=options.source,
                created_s=self._created_s,
                tier=self.worker.tier(REPLICA),
                max_model_len=None if loaded is None else loaded.config.max_model_len,
                deterministic=None if probe is None else probe.deterministic,
                has_chat_template=None if loaded is None else loaded.text.chat_template is not None,
            ),
        )

    def card(self, name: str | None) -> ModelCard:
        if name is not None and name not in self._options.names:
            raise ModelNotFoundError(f"The model `{name}` does not exist.", param="model")
        return self.cards()[0]

    def tokenizer(self, name: str | None) -> Tokenizer:
        self.card(name)
        return self._text_side()[1]

    async def stream(self, call: Call) -> EventStream:
        card = self.card(call.model)
        loaded, tokenizer = self._text_side()
        self._num_open += 1
        mailbox = None
        try:
            max_model_len = loaded.config.max_model_len
            request = await prepared_request(tokenizer, max_model_len, call)
            mailbox = self.worker.submit(REPLICA, request)
            outputs = await mailbox.take()
            yield Accepted(card.name, tuple(request.prompt))  # type: ignore[arg-type]  # tokens by now
            while True:
                for output in outputs:
                    yield output
                    if output.request is not None:
                        return
                outputs = await mailbox.take()
        finally:
            self._num_open -= 1
            if mailbox is not None:
                self.worker.leave(mailbox)

    async def metrics(self) -> Mapping[str, MetricsSnapshot]:
        replicas = await self.worker.metrics()
        return {self._options.names[0]: replicas[REPLICA]} if REPLICA in replicas else {}

    def health(self) -> Health:
        reason = self.worker.trouble(REPLICA)
        return Health(not reason, reason, recording_warnings(self.worker.recording_fault))

    async def check(self) -> str:
        checked = await self.worker.check()
        return "the worker does not answer" if checked is None else checked.fault

    async def reset_prefix_cache(self) -> int:
        return await self.worker.reset_prefix_cache()

    @property
    def num_open(self) -> int:
        return self._num_open

    async def start(self) -> None:
        try:
            await self.worker.start()
            loaded = await self.worker.load(REPLICA, self._options.source, self._options.load, self._progress)
            self._known = loaded, await asyncio.to_thread(_tokenizer, loaded)
        except BaseException:
            await self.worker.close()
            raise

    def abort_all(self, error: LockstepError) -> None:
        self.worker.abort_all(error)

    async def close(self) -> None:
        await self.worker.close()

    def _text_side(self) -> tuple[Loaded, Tokenizer]:
        """What was told by the worker that serves now; what an artifact is may change with a restart."""
        loaded = self.worker.loaded(REPLICA)
        if loaded is None or self._known is None:
            raise self.worker.unavailable(REPLICA)
        if loaded is not self._known[0]:
            is_same = loaded.text == self._known[0].text
            self._known = loaded, self._known[1] if is_same else _tokenizer(loaded)
        return self._known


def _tokenizer(loaded: Loaded) -> Tokenizer:
    return Tokenizer(loaded.text.parts())
