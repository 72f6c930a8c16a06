"""The Python API: provides `LLM` for scripts and `AsyncEngine` for asyncio programs. Each owns a loaded model and its
engine.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from lockstep.artifacts.task import Pooling
from lockstep.engine.draft_prices import speculator_for
from lockstep.engine.engine import Engine, Observer, OutputStream
from lockstep.engine.generation import Sink
from lockstep.engine.input_processing import with_input_name
from lockstep.engine.loading import load_model
from lockstep.engine.metrics import MetricsSnapshot
from lockstep.engine.options import LoadOptions, Progress
from lockstep.engine.outputs import RequestOutput, TokenOutput
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.engine.scoring import cut, score_requests, scores_of
from lockstep.errors import ConfigError, InvalidParameterError, RequestError, RequestFailedError, UsageError
from lockstep.executors.sampling_params import SamplingParams

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
Messages = Sequence[Message]
LAST_TASK_S = 10.0
"""Seconds to wait for the current task when the process ends."""

Result = TypeVar("Result")


class LLM:
    """A model with a blocking API. Several prompts share one continuous batch.

    An interrupt (Ctrl-C) ends a call after the current step. Its requests are aborted, and the model stays usable.
    Calls from several threads run one after the other.

    Args:
        model: a path, ``hf://org/name``, ``pocket://`` or ``stub://NAME``.
        options: load options and limits.
        progress: called for each stage of loading.
        observer: called after each step with its plan, result and events.

    Raises:
        LockstepError: the model cannot be loaded; the message states why.
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
            drafter = speculator_for(self.model, config, (options or LoadOptions()).engine.speculative_config)
            self.engine = Engine(self.model, config, observer=observer, drafter=drafter)
            self._task_thread = TaskThread(f"lockstep-{self.model.name}")
        except BaseException:
            self.model.close()
            raise

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Complete one or several prompts, each a text or token ids. Returns one output per prompt, in order.

        Raises:
            RequestError: a prompt or parameter is invalid; the other requests are aborted.
            LockstepError: the error that ended an accepted request.
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
        """Answer one or several conversations, using the model's chat template.

        Args:
            template_kwargs: additional template variables, e.g. ``enable_thinking``.
            reasoning: ``auto`` separates reasoning from content if the template has tags for it; ``off`` never does.

        Raises:
            InvalidParameterError, ChatTemplateError: see `Tokenizer.render_chat`.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        return self._run([_chat_request(each, params, template_kwargs, reasoning) for each in conversations])

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | Literal["model"] = "model",
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Embed one or several prompts: [number of prompts, size], a vector of each prompt.

        Args:
            pooling: ``mean`` over all tokens, the first (``cls``) or the ``last`` token, or as the ``model`` does.
            normalize: whether each vector is divided by its length.
            dimensions: number of elements to keep from the start of each vector; None: all.
            prompt_name: name of one of the model's prompts, which is put before each text; empty: none; None: the
                model's default.
            truncate_prompt_tokens: number of tokens that are kept from the start of a longer text; -1: as many as the
                model takes; None: a text that is too long is refused.

        Raises:
            InvalidParameterError: there is no text, the vectors have fewer dimensions, or the model has no such prompt.
            PromptTooLongError: a text is too long for the model. `param` names it.
        """
        batch: Any = [prompts] if _is_one_prompt(prompts) else prompts
        if not batch:
            raise InvalidParameterError("prompts is empty; at least one is needed", param="prompts")
        calls = [
            GenerationRequest(
                prompt, pooling=pooling, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens
            )
            for prompt in batch
        ]
        names = ["prompts"] if batch[0] is prompts else [f"prompts[{index}]" for index in range(len(calls))]
        return cut(np.stack([_vector(output) for output in self._run(calls, names)]), dimensions, normalize)

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """Score how relevant each document is to a query: 0 to 1, a logit if the reranker's files demand it, or the
        cosine of an embedding model, whose prompts ``query`` and ``document`` are put before the texts.

        Args:
            instruction: what relevance means, for a reranker that reads one; None: its default.
            truncate_prompt_tokens: number of tokens that are kept of a longer pair, or of each text for an embedding
                model; -1: as many as the model takes; None: what is too long is refused.

        Raises:
            InvalidParameterError: the model gives no scores, or takes no instruction.
            PromptTooLongError: a query and a document are too long for the model. `param` names the document.
        """
        scoring = self.model.scoring
        calls = score_requests(self.model.name, scoring, query, documents, instruction, truncate_prompt_tokens)
        outputs = self._run([call for _, call in calls], [name for name, _ in calls])
        is_raw = self.model.tokenizer.parts.has_raw_scores
        return scores_of(scoring, [_vector(output) for output in outputs], is_raw=is_raw)

    def stream(self, request: GenerationRequest) -> Generator[TokenOutput]:
        """Yield the output of each step. Leaving the loop, or an interrupt in it, aborts the request.

        Raises:
            RequestError: the request is invalid.
            LockstepError: the error that ended the request after it was accepted.
        """
        task = Task[list[int]](lambda task: self._serve([request], task.emitted.put, task))
        try:
            self._task_thread.submit(task)
            while (output := task.emitted.get()) is not None:
                if output.error is not None:
                    raise output.error
                yield output
        except BaseException:
            self._task_thread.stop(task)
            raise
        task.result()

    def _run(self, requests: Sequence[GenerationRequest], names: Sequence[str] = ()) -> list[RequestOutput]:
        """Run requests to their ends. Errors about the prompt of one with a name have its name."""
        outputs: dict[int, RequestOutput] = {}

        def collect(output: TokenOutput) -> None:
            if output.request is not None:
                outputs[output.request_id] = output.request

        ids = self._task_thread.run(lambda task: self._serve(requests, collect, task, names))
        for request_id in ids:
            error = outputs[request_id].error
            if error is not None:
                raise error
        return [outputs[request_id] for request_id in ids]

    def _serve(
        self, requests: Sequence[GenerationRequest], sink: Sink, task: Task[list[int]], names: Sequence[str] = ()
    ) -> list[int]:
        """Process requests, as many at once as the queue accepts, and return their ids. Runs on the model's thread."""
        engine, waiting, ids = self.engine, deque(requests), list[int]()
        try:
            while (waiting or engine.has_work) and not task.is_stopped:
                room = engine.num_free_places
                while waiting and (room >= waiting[0].params.n or not engine.has_work):
                    room -= waiting[0].params.n
                    try:
                        ids.append(engine.submit(waiting.popleft(), sink))
                    except RequestError as error:
                        at = len(ids)
                        raise with_input_name(error, names[at], requests[at].prompt) if names else error from None
                engine.step()
        finally:  # stopped, or a prompt was invalid: queued requests must not run with the next call
            for request_id in ids:
                engine.abort(request_id)
            engine.drain()
        return ids

    def close(self) -> None:
        """Free the model. It cannot be used afterwards. Calling this again has no effect."""
        if self._task_thread.is_alive:
            self._task_thread.run(lambda task: self.model.close())
        self._task_thread.end()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncEngine:
    """A model with an asyncio API. Its steps run in a separate thread.

    Loading blocks, so create it before the event loop starts or in ``asyncio.to_thread``. Close it, or use it as a
    context manager: requests that are still open then end with ``abort``.
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
        drafter = speculator_for(self.model, config, (options or LoadOptions()).engine.speculative_config)
        self.engine = Engine(self.model, config, observer=observer, drafter=drafter)
        self._thread = threading.Thread(target=self._loop, name=f"lockstep-{self.model.name}", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestOutput:
        """Complete a prompt and return the whole answer. Cancelling the task aborts the request."""
        return await self.engine.submit_async(self._request(prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> OutputStream:
        """Stream the answer with ``async for``. Leaving the loop aborts the request."""
        return self.engine.stream(self._request(prompt, params))

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | Literal["model"] = "model",
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Embed a prompt: [size]; see `LLM.embed`."""
        request = self._checked(
            GenerationRequest(
                prompt, pooling=pooling, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens
            )
        )
        vector = _vector(await self.engine.submit_async(request))
        kept: npt.NDArray[np.float32] = cut(vector[np.newaxis], dimensions, normalize)[0]
        return kept

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
        """Stream the answer to a conversation; see `LLM.chat`."""
        return self.engine.stream(self._checked(_chat_request(messages, params, template_kwargs, reasoning)))

    def submit(self, request: GenerationRequest, callback: Sink | None = None) -> int:
        """Queue a request from any thread; see `Engine.submit`."""
        return self.engine.submit(self._checked(request), callback)

    def abort(self, request_id: int) -> None:
        self.engine.abort(request_id)

    def metrics(self) -> MetricsSnapshot:
        return self.engine.metrics()

    def close(self) -> None:
        """Abort open requests, stop the thread, free the model. Can be called again; it resumes after an interrupt."""
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
        except Exception:  # a bug: every open request has already failed with this error
            log.exception("the engine's thread failed")
        finally:  # done here, since the wait for this thread may be interrupted
            self.model.close()


class Task(Generic[Result]):
    """Work for a `TaskThread`, with its result and the outputs that it emits."""

    def __init__(self, work: Callable[[Task[Result]], Result]) -> None:
        self._work = work
        self.is_stopped = False
        """True once no caller waits for the rest. Long work checks this regularly."""
        self.emitted: SimpleQueue[TokenOutput | None] = SimpleQueue()
        """Outputs of the work, then None when it has ended. Waiting for it is one native call: an interrupt comes
        before or after it, so no output is lost."""
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work. Called on the task thread."""
        try:
            self._results.append(self._work(self))
        except BaseException as error:  # raised by `result` in the waiting thread
            self._error = error
        finally:
            self.emitted.put(None)

    def result(self) -> Result:
        """Return the result of the work, or raise its error."""
        error, self._error = self._error, None
        if error is None:
            return self._results.pop()
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


class TaskThread:
    """One thread that runs tasks in the order of submission. It ends with the last reference to this object, or with
    the process.

    Python raises KeyboardInterrupt, and any other exception of a signal handler, between any two instructions of the
    main thread. Work that must not be interrupted halfway, such as a step, runs here: an interrupt then only ends the
    wait.
    """

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_run_tasks, args=(self._tasks,), name=name, daemon=True)
        self._is_ended = False
        self._pid = os.getpid()
        weakref.finalize(self, _end, self._tasks, self._thread)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True while tasks can run: the thread has not been ended, and the process is not a fork.

        `Thread.is_alive` is not used: it takes a lock, and returns False for ever after an interrupt there.
        """
        return not self._is_ended and os.getpid() == self._pid

    def end(self) -> None:
        """End the thread after the queued tasks. Calling this again completes an end that was interrupted."""
        self._is_ended = True
        _end(self._tasks, self._thread)

    def submit(self, task: Task[Any]) -> None:
        """Queue a task.

        Raises:
            UsageError: the task could never run.
        """
        if threading.current_thread() is self._thread:
            raise UsageError("a callback or observer of a model cannot wait for the model; call it later")
        if not self.is_alive:
            raise UsageError("this model is closed, or was loaded before the process was forked; load it again")
        self._tasks.put(task)

    def run(self, work: Callable[[Task[Result]], Result]) -> Result:
        """Run the work and wait for its result. An interrupt stops the work; a second one also ends the wait for the
        stop."""
        task = Task(work)
        try:
            self.submit(task)
            task.emitted.get()
        except BaseException:
            self.stop(task)
            raise
        return task.result()

    def stop(self, task: Task[Any]) -> None:
        """Stop a task, even if its submission was interrupted, and wait until it and those before it have ended."""
        task.is_stopped = True
        if self.is_alive and threading.current_thread() is not self._thread:
            last: Task[None] = Task(lambda task: None)
            self._tasks.put(last)
            last.emitted.get()


def _run_tasks(tasks: SimpleQueue[Task[Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # frees its result


def _end(tasks: SimpleQueue[Task[Any] | None], thread: threading.Thread) -> None:
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(LAST_TASK_S)


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
        raise ConfigError(f"{count} prompts, but {len(params)} sampling parameters; pass one, or one per prompt")
    return params
