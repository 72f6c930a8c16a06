"""Generation prompts: find the tokens with which a chat template starts an answer.

The next turn of a conversation begins with the prompt up to there. What follows may differ, because templates omit
earlier reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from lockstep.errors import LockstepError

MAX_KNOWN = 64
"""Maximum number of combinations of template variables whose generation prompt is remembered."""
_MESSAGES = ({"role": "user", "content": "."},)


class _Tokenizer(Protocol):
    """The part of `lockstep.engine.tokenizer.Tokenizer` that is used here."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, object] | None,
    ) -> str: ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


class GenerationPrompts:
    """Generation prompts of one tokenizer, by the simple ones of the template's variables.

    Variables with lists, such as tools, are left out. If one of them changed the generation prompt, the tokens at the
    end of a prompt would not be found.
    """

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[tuple[str, object], ...], tuple[int, ...]] = {}

    def num_before(self, prompt_ids: Sequence[int], template_kwargs: Mapping[str, object] | None) -> int:
        """Number of prompt tokens before the generation prompt; all, if the prompt does not end with the known one."""
        simple = {name: value for name, value in (template_kwargs or {}).items() if isinstance(value, str | int)}
        key = tuple(sorted(simple.items()))
        if key not in self._known:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            self._known[key] = self._find(simple)
        tokens = self._known[key]
        count = len(prompt_ids) - len(tokens)
        return count if tuple(prompt_ids[count:]) == tokens else len(prompt_ids)

    def _find(self, template_kwargs: Mapping[str, object]) -> tuple[int, ...]:
        """Tokens of what a template adds after a short conversation; none if it cannot be determined."""
        try:
            without, complete = (
                self._tokenizer.render_chat(_MESSAGES, add_generation_prompt=each, template_kwargs=template_kwargs)
                for each in (False, True)
            )
        except LockstepError:
            return ()
        if not complete.startswith(without):
            return ()
        return tuple(self._tokenizer.encode(complete[len(without) :], add_special_tokens=False))
