"""Special token guard: ensures that special tokens in a prompt come from the template, not from messages that forge
roles.

The method: a private character (the first of Unicode's private use area that occurs nowhere in the request or the
template) is inserted into every special token that a caller wrote, after its first character. The template sees the
rest unchanged, so its trims, splits and tests work. Special tokens that are still whole after rendering come from the
template. The text is then split at those tokens, the private character is removed, and the sections between them are
tokenised with special tokens disabled.

A template may also join harmless pieces to a token. So a second rendering inserts the character after *every* character
that could begin a token, and also at the start of each text if the template writes prefixes of tokens. Its tokens
certainly come from the template. If both renderings have the same tokens, the first is used, else the second. Ordinary
messages contain no special token, and their prompt is tokenised as one text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from lockstep.engine.chat_template import ChatTemplate
from lockstep.errors import ChatTemplateError, InvalidParameterError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

MAX_NESTING = 100

_PRIVATE = range(0xE000, 0xF900)
_MORE_PRIVATE = range(0xF0000, 0xFFFFE)

Transform = Callable[[str, bool], str]
"""Function of (text, whether it is the assistant's) that returns the new text."""


class SpecialTokenGuard:
    """Finds the special tokens of a template and prevents callers from forging them.

    Guarded in every message: special tokens, the tokens that end a sequence, and added tokens that occur in the
    template (e.g. ``<tool_response>``). Messages of the assistant may contain the latter, and words that the template
    itself searches for, e.g. ``</think>``: the model wrote them, and they separate no messages. The same holds for the
    tokens around tool calls if the template does not write calls and they are part of the assistant's content. A token
    of one character cannot be guarded.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, end_token_ids: Sequence[int]) -> None:
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if len(token.content) > 1}
        strong = {i: token for i, token in added.items() if token.special or i in end_token_ids}
        weak = {i: token for i, token in added.items() if i not in strong and token.content in template.source}
        self._ids: dict[str, int] = {token.content: i for i, token in chain(strong.items(), weak.items())}
        self._template = template
        self._tokens: dict[str, AddedToken] = {t.content: t for t in chain(strong.values(), weak.values())}
        self._literal = frozenset(token.content for token in chain(strong.values(), weak.values()) if not token.special)
        """Tokens that remain active when special tokens are disabled."""
        ends = {token.content for i, token in strong.items() if i in end_token_ids}
        calls = set() if "tool_calls" in template.source else {text for text in self._tokens if "tool_call" in text}
        spoken = {token.content for token in weak.values()} | ((template.cut_words | calls) - ends)
        self._anyone = _pattern(self._tokens)
        self._assistant = _pattern(text for text in self._tokens if text not in spoken)
        self._begins = _pattern({text[0] for text in self._tokens})
        heads = tuple({text[:length] for text in self._tokens for length in range(1, len(text))})
        self._may_be_completed = any(literal.endswith(heads) for literal in template.literals)
        """True if the template writes prefixes of tokens, as in ``'<|' + message.role``, which a message must not
        complete."""
        self._used = frozenset(template.source)
        self._normalizer = tokenizer.normalizer if any(token.normalized for token in strong.values()) else None

    def render(
        self, context: dict[str, object], now: datetime | None, *, continue_final: bool = False
    ) -> tuple[str, str | None]:
        """Render a conversation.

        Args:
            context: the template's checked variables.
            now: time for ``strftime_now``.
            continue_final: end with the content of the last message.

        Returns:
            The text, and the private character that marks the callers' special tokens, for `split`. None: every special
            token in the text comes from the template.

        Raises:
            ChatTemplateError: the template failed or does not show that content.
        """
        end = self._mark_end(context) if continue_final else ""
        text, private = self._rendered(context, now)
        if end:
            text, mark, _ = text.rpartition(end)
            if not mark:
                raise ChatTemplateError(
                    "the chat template does not show the last message's content, so the answer cannot continue it",
                    param="continue_final_message",
                )
            text = text.replace(end, "")
        return text, private

    def split(self, text: str, private: str) -> Iterator[int | Sequence[Sequence[str]]]:
        """Split a rendered text at the special tokens that come from the template.

        Yields:
            The id of such a token; or, for the text between two of them, the ways to tokenise it in pieces without
            special tokens, best first. The first way whose tokens are not `is_forged` is right.
        """
        cut = 0
        skip_space = False
        for match in self._anyone.finditer(text):
            token = self._tokens[match[0]]
            section = text[cut : match.start()]
            yield self._ways(_trimmed(section, skip_space, token.lstrip), private)
            yield self._ids[match[0]]
            cut, skip_space = match.end(), token.rstrip
        yield self._ways(_trimmed(text[cut:], skip_space, False), private)

    def is_forged(self, ids: Sequence[int]) -> bool:
        """True if tokens of a text without special tokens contain one."""
        return not set(self._ids.values()).isdisjoint(ids)

    def _mark_end(self, context: dict[str, object]) -> str:
        """Append a private character to the content of the last message in a template's variables. Returns the
        character."""
        end = self._private(_strings(context))
        messages = context["messages"]
        assert isinstance(messages, list), "there is at least one checked message"
        context["messages"] = [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}{end}"}]
        return end

    def _rendered(self, context: Mapping[str, object], now: datetime | None) -> tuple[str, str | None]:
        """Render the text. Also returns the private character that marks the callers' special tokens; None: every
        special token in the text comes from the template."""
        texts = _strings(context)
        hazardous = self._begins.search("".join(self._as_seen(texts))) is not None
        if not hazardous and not self._may_be_completed:
            return self._template.render(context, now), None
        private = self._private(texts)

        def breaking(pattern: re.Pattern[str]) -> Callable[[str], str]:
            return lambda text: pattern.sub(lambda match: f"{match[0][0]}{private}{match[0][1:]}", text)

        by_anyone, by_assistant, after_begins = map(breaking, (self._anyone, self._assistant, self._begins))
        first = private if self._may_be_completed else ""
        broken = _mapped(context, lambda text, own: by_assistant(text) if own else by_anyone(text))
        text = self._template.render(broken if hazardous else context, now)
        certain = self._template.render(
            _mapped(context, lambda text, own: first + after_begins(text) if text else text), now
        )
        agree = self._assistant.findall(text) == self._assistant.findall(certain)
        text = text if agree else certain
        hidden = self._normalizer is not None and any(self._anyone.search(seen) for seen in self._as_seen(texts))
        return text, private if private in text or hidden else None

    def _ways(self, section: str, private: str) -> Sequence[Sequence[str]]:
        """Ways to tokenise a text without special tokens: as a whole, cut inside each of them, and by characters."""
        whole = section.replace(private, "")
        if not whole:
            return [[]]
        cuts = [0, *(match.start() + 1 for match in self._anyone.finditer(whole)), len(whole)]
        halves = [whole[begin:end] for begin, end in pairwise(cuts)]
        ways = [[whole], halves, list(whole)]
        return ways[any(text in whole for text in self._literal) :]

    def _as_seen(self, texts: Sequence[str]) -> Sequence[str]:
        """The texts in the form in which tokens are matched."""
        if self._normalizer is None:
            return texts
        return [seen for text in texts for seen in (text, self._normalizer.normalize_str(text))]

    def _private(self, texts: Sequence[str]) -> str:
        for code in chain(_PRIVATE, _MORE_PRIVATE):
            char = chr(code)
            if char not in self._used and not any(char in text for text in texts):
                return char
        raise ChatTemplateError("the messages use every character of Unicode's private use areas", param="messages")


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, longest first. Without texts, it never matches."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _trimmed(section: str, left: bool, right: bool) -> str:
    """Remove the white space that a neighbouring token absorbs."""
    section = section.lstrip() if left else section
    return section.rstrip() if right else section


def _strings(value: object) -> list[str]:
    """Every string of a context, including roles and keys."""
    found: list[str] = []
    level = [value]
    for _ in range(MAX_NESTING + 2):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, str):
                found.append(item)
            elif isinstance(item, (dict, list, tuple, Mapping)):
                deeper += item
                if isinstance(item, (dict, Mapping)):
                    deeper += item.values()
        if not deeper:
            return found
        level = deeper
    raise InvalidParameterError(
        f"messages, tools or chat_template_kwargs are nested more than {MAX_NESTING} levels deep", param="messages"
    )


def _mapped(value: Mapping[str, object], transform: Transform) -> dict[str, object]:
    """Copy a context with its strings transformed. Roles and names of variables do not change."""
    copy: dict[str, object] = {}
    for name, item in value.items():
        if name == "messages" and isinstance(item, list):
            copy[name] = [_mapped_message(message, transform) for message in item]
        else:
            copy[name] = _walk(item, transform, False)
    return copy


def _mapped_message(message: Mapping[str, object], transform: Transform) -> dict[str, object]:
    own = message.get("role") == "assistant"
    return {key: item if key == "role" else _walk(item, transform, own) for key, item in message.items()}


def _walk(value: object, transform: Transform, own: bool) -> object:
    if isinstance(value, str):
        return transform(value, own)
    if isinstance(value, (dict, Mapping)):
        return {_walk(key, transform, own): _walk(item, transform, own) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_walk(item, transform, own) for item in value]
    return value
