"""Completions as bytes: the chunks of a stream, and the whole answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.engine.outputs import RequestOutput
from lockstep.engine.tokenizer import Tokenizer
from lockstep.server.answer import Answer, Heading, encode, frame
from lockstep.server.choices import Choice
from lockstep.server.logprobs import completion_logprobs, prompt_entries, prompt_logprobs

_TEXT_TAIL = b',"logprobs":null,"finish_reason":null}]'


class CompletionEncoder:
    """Implements `lockstep.server.answer.Encoder`.

    Args:
        num_choices: of each prompt.
        echoes: the text that each prompt's choices begin with; empty strings where nothing is echoed.
    """

    def __init__(
        self,
        heading: Heading,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        echoes: Sequence[str],
        has_echo: bool,
        has_logprobs: bool,
        tells_ids: bool,
        tells_prompt_logprobs: bool,
    ) -> None:
        self.heading = heading
        self._tokenizer = tokenizer
        self._num_choices = num_choices
        self._echoes = echoes
        self._has_echo = has_echo
        self._has_logprobs = has_logprobs
        self._tells_ids = tells_ids
        self._tells_prompt_logprobs = tells_prompt_logprobs
        self._head = heading.chunk_head("text_completion")
        self._text_heads = [
            b"data: " + self._head + b',"choices":[{"index":%d,"text":' % index
            for index in range(num_choices * len(echoes))
        ]
        self._text_tail = _TEXT_TAIL + heading.chunk_usage() + b"}\n\n"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        return b""

    def chunk(self, choice: Choice, extension: dict[str, Any] | None) -> bytes:
        opening = b""
        if not choice.has_begun:
            choice.has_begun = True
            echo = self._echo(choice)
            opening = self._frame(choice, {"text": echo}, is_echo=True) if echo else b""
        if choice.is_plain:
            tail = self._text_tail
            if self.heading.continuous_usage:
                tail = _TEXT_TAIL + self.heading.chunk_usage(choice.usage) + b"}\n\n"
            return opening + self._text_heads[choice.index] + encode(choice.text) + tail
        frames = [opening]
        if choice.text or choice.entries or choice.token_ids:
            told: dict[str, Any] = {"text": choice.text}
            if choice.entries:
                told["logprobs"] = completion_logprobs(choice.entries, len(self._echo(choice)))
            if choice.token_ids:
                told["token_ids"] = choice.token_ids
            frames.append(self._frame(choice, told))
        if choice.finish_reason is not None:
            ending = {"text": "", "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            frames.append(self._frame(choice, ending, extension))
        return b"".join(frames)

    def usage_chunk(self, usage: dict[str, Any], extension: dict[str, Any]) -> bytes:
        return frame(self._head + b',"choices":[],' + encode({"usage": usage, "lockstep": extension})[1:])

    def whole(self, answer: Answer) -> bytes:
        heading = self.heading
        outputs = answer.outputs
        body: dict[str, Any] = {
            "id": heading.id,
            "object": "text_completion",
            "created": heading.created_s,
            "model": heading.model,
            "choices": [
                self._whole_choice(choice, outputs[choice.index // self._num_choices]) for choice in answer.choices
            ],
            "usage": answer.usage,
            "system_fingerprint": heading.fingerprint,
            **heading.told_tier,
            "lockstep": answer.extension,
        }
        return encode(body)

    def _whole_choice(self, choice: Choice, output: RequestOutput) -> dict[str, Any]:
        echo, prompt_ids, of_prompt = self._echo(choice), output.prompt_token_ids, output.prompt_logprobs
        logprobs = None
        if self._has_logprobs:
            logprobs = completion_logprobs(choice.entries, len(echo))
            if self._has_echo and of_prompt is not None:
                before = completion_logprobs(prompt_entries(self._tokenizer, prompt_ids, of_prompt))
                logprobs = {key: before[key] + logprobs[key] for key in logprobs}
        told: dict[str, Any] = {
            "index": choice.index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._tells_ids:
            told |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt_ids}
        if self._tells_prompt_logprobs and of_prompt is not None:
            told["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt_ids, of_prompt)
        return told

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self._num_choices]

    def _frame(
        self, choice: Choice, told: dict[str, Any], extension: dict[str, Any] | None = None, *, is_echo: bool = False
    ) -> bytes:
        usage = choice.usage_before if is_echo else choice.usage
        told = {"index": choice.index, "logprobs": None, "finish_reason": None, **told}
        more = b"" if extension is None else b',"lockstep":' + encode(extension)
        return frame(self._head + b',"choices":[' + encode(told) + b"]" + self.heading.chunk_usage(usage) + more + b"}")
