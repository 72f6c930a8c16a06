"""The Python API: `LLM` for scripts, `AsyncEngine` for asyncio programs. Both own a loaded model and its engine."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.engine.engine import Engine, Observer
from lockstep.engine.generation import Sink
from lockstep.engine.loading import load_model
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.options import LoadOptions, Progress
from lockstep.engine.output_rules import Pooling, unit_vectors
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.queues import OutputStream
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.threads import Aside, Task
from lockstep.errors import ConfigError, RequestFailedError, UsageError
from lockstep.executors.sampling_params import SamplingParams

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Messages = Sequence[Message]


class LLM:
    """A model that answers while the caller waits. Several prompts share one continuous batch.

    An interrupt (Ctrl-C) ends a call with the step under way: its requests are gone, and the model is as it was. Calls
    from several threads take turns.

    Args:
        model: a path, ``hf://org/name``, ``pocket://`` or ``stub://NAME``.
        options: how to load it and within what limits.
        progress: told about the stages of loading.
        observer: called after each step with its plan, result and events.

    Raises:
        LockstepError: the model cannot be loaded; the message says why.
    """

    def __init__(
        self,
        model: str,
        options: LoadOptions | None = None,
        *,
        progress: Progress | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.model, config = load_model(model, options, progress)
        try:
            self.engine = Engine(self.model, config, observer=observer)
            self._aside = Aside(f"lockstep-{self.model.name}")
        except BaseException:
            self.model.close()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one prompt or several, each text or token ids; one output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is refused; nothing runs on then.
            LockstepError: what ended a request that had been accepted.
        """
        batch = [prompts] if _is_one_prompt(prompts) else list(prompts)
        each = _one_per(params, len(batch))
        return self._run([GenerationRequest(prompt, p) for prompt, p in zip(batch, each, strict=True)])  # type: ignore[arg-type]  # a list of prompts by the test above

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: str = "auto",
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template.

        Args:
            template_kwargs: further variables of the template, e.g. ``enable_thinking``.
            reasoning: ``auto`` keeps thoughts apart where the template has tags for them, ``off`` never does.

        Raises:
            InvalidParameterError, ChatTemplateError: see `Tokenizer.render_chat`.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        return self._run([_chat_request(each, params, template_kwargs, reasoning) for each in conversations])

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "mean", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """[number of prompts, hidden_size]: the hidden states of each prompt as one vector.

        Args:
            pooling: ``mean`` over all positions, or the ``last`` one.
            normalize: whether each vector is divided by its length.
        """
        batch: Any = [prompts] if _is_one_prompt(prompts) else prompts
        outputs = self._run([GenerationRequest(prompt, pooling=pooling) for prompt in batch])
        vectors = np.stack([_vector(output) for output in outputs])
        return unit_vectors(vectors) if normalize else vectors

    def stream(self, request: GenerationRequest) -> Generator[TokenOutput]:
        """Stream what each step brings; leaving the loop, or an interrupt in it, aborts the request.

        Raises:
            RequestError: the request is refused.
            LockstepError: what ended it after it had been accepted.
        """
        task = Task[TokenOutput, list[int]](lambda task: self._serve([request], task.news.put, task))
        try:
            self._aside.begin(task)
            while (output := task.news.get()) is not None:
                if output.error is not None:
                    raise output.error
                yield output
        except BaseException:
            self._aside.stop(task)
            raise
        task.result()

    def _run(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}

        def collect(output: TokenOutput) -> None:
            if output.request is not None:
                outputs[output.request_id] = output.request

        ids = self._aside.do(lambda task: self._serve(requests, collect, task))
        for request_id in ids:
            error = outputs[request_id].error
            if error is not None:
                raise error
        return [outputs[request_id] for request_id in ids]

    def _serve(self, requests: Sequence[GenerationRequest], sink: Sink, task: Task[Any, list[int]]) -> list[int]:
        """Answer requests, as many at once as the queue takes; returns their ids. On the model's thread."""
        engine, waiting, ids = self.engine, deque(requests), list[int]()
        try:
            while (waiting or engine.has_work) and not task.is_stopped:
                room = engine.num_free_places
                while waiting and (room >= waiting[0].params.n or not engine.has_work):
                    room -= waiting[0].params.n
                    ids.append(engine.submit(waiting.popleft(), sink))
                engine.step()
        finally:  # stopped, or a prompt was refused: what was queued must not run with the next call
            for request_id in ids:
                engine.abort(request_id)
            engine.drain()
        return ids

    def close(self) -> None:
        """Free the model; using it afterwards is an error. Calling it again does nothing."""
        if self._aside.is_alive:
            self._aside.do(lambda task: self.model.close())
        self._aside.end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncEngine:
    """A model that answers an asyncio program; a thread of its own runs the steps.

    Loading blocks, so make it before the loop starts or in ``asyncio.to_thread``. Close it, or use it as a context
    manager: requests that are still open then end with ``abort``.
    """

    def __init__(
        self,
        model: str,
        options: LoadOptions | None = None,
        *,
        progress: Progress | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.model, config = load_model(model, options, progress)
        self.engine = Engine(self.model, config, observer=observer)
        self._thread = threading.Thread(target=self._loop, name=f"lockstep-{self.model.name}", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """The whole answer; cancelling the task aborts the request."""
        return await self.engine.submit_async(self._request(prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> OutputStream:
        """``async for`` over the answer as it comes; leaving the loop aborts the request."""
        return self.engine.stream(self._request(prompt, params))

    async def embed(
        self, prompt: Prompt, *, pooling: Pooling = "mean", normalize: bool = True
    ) -> npt.NDArray[np.float32]:
        """[hidden_size]: the hidden states of a prompt as one vector; see `LLM.embed`."""
        request = self._checked(GenerationRequest(prompt, pooling=pooling))
        vector = _vector(await self.engine.submit_async(request))
        return unit_vectors(vector[None])[0] if normalize else vector

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: str = "auto",
    ) -> RequestOutput:
        """Answer a conversation; see `LLM.chat`."""
        request = _chat_request(messages, params, template_kwargs, reasoning)
        return await self.engine.submit_async(self._checked(request))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        reasoning: str = "auto",
    ) -> OutputStream:
        """Answer a conversation as it comes; see `LLM.chat`."""
        return self.engine.stream(self._checked(_chat_request(messages, params, template_kwargs, reasoning)))

    def submit(self, request: GenerationRequest, callback: Sink | None = None) -> int:
        """Queue a request from any thread; see `Engine.submit`."""
        return self.engine.submit(self._checked(request), callback)

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)

    def metrics(self) -> MetricsSnapshot:
        return self.engine.metrics()

    def close(self) -> None:
        """End what is open, stop the thread, free the model. Calling it again does nothing, or what is left of it."""
        self.engine.stop()
        self._thread.join()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> GenerationRequest:
        return self._checked(GenerationRequest(prompt, params or SamplingParams()))

    def _checked(self, request: GenerationRequest) -> GenerationRequest:
        if self.engine.is_stopped:
            raise UsageError("this engine is closed")
        return request

    def _loop(self) -> None:
        try:
            self.engine.run()
        except Exception:  # a defect of ours, which every open request was told
            log.exception("the engine's thread broke")
        finally:  # here, since a wait for this thread may be interrupted
            self.model.close()


def _chat_request(
    messages: Messages, params: SamplingParams | None, template_kwargs: Mapping[str, Any] | None, reasoning: str
) -> GenerationRequest:
    return GenerationRequest(Conversation(messages, template_kwargs or {}, reasoning), params or SamplingParams())


def _vector(output: RequestOutput) -> npt.NDArray[np.float32]:
    if output.embedding is None:
        raise RequestFailedError("the request ended before its vector was complete")
    return output.embedding


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _one_per(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"{count} prompts, but {len(params)} parameters; give one for all or one for each")
    return params
