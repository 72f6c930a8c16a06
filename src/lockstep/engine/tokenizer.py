"""Tokenizer of a model: text to tokens, conversations to prompts, and tokens to text, at once or as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.chat_template import ChatTemplate
from lockstep.engine.output_rules import Reasoning, tags_of_template
from lockstep.engine.special_token_guard import SpecialTokenGuard
from lockstep.engine.token_bytes import TokenBytes, TokenReach, decoder_rules
from lockstep.errors import ChatTemplateError, InvalidParameterError, PromptTooLongError
from lockstep.executors.grammar_compiler import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


_TAIL_TOKENS = 32
"""Enough for a tag, spelled letter by letter, and the blanks after it."""
_LONG_CHARS = 4_096
"""A longer text is tokenised by a call that lets other threads run meanwhile."""


class Tokenizer:
    """Text to tokens and back, and conversations to prompts, as an artifact says. May be shared by threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._tokenizer = parts.tokenizer
        added = parts.tokenizer.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.end_token_ids: tuple[int, ...] = parts.end_token_ids
        self.vocab_size: int = parts.tokenizer.get_vocab_size()
        """Tokens with a text; a model may have more rows."""
        rules = decoder_rules(parts.tokenizer)
        self.token_bytes: TokenBytes | None = (
            None if rules is None else TokenBytes(parts.tokenizer, rules, self.special_token_ids)
        )
        """None: the decoder works on whole lists only."""
        self._template: ChatTemplate | None = None
        self._guard: SpecialTokenGuard | None = None

    @property
    def parts(self) -> TokenizerParts:
        """What it was made of."""
        return self._parts

    @property
    def has_chat_template(self) -> bool:
        return self._parts.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source, for those who ask what it knows."""
        return self._parts.chat_template

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template looks up; ChatTemplateError where there is none or it cannot be read."""
        return self._chat_template().variables

    @property
    def takes_grammars(self) -> bool:
        """Whether `vocabulary` can be expected to give one, without making it."""
        return self.token_bytes is not None and bool(self.end_token_ids)

    def marker_id(self, text: str) -> int | None:
        """The token that is exactly this text and no text to grammars: a special one, or one like ``<tool_call>``."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id is not None and token_id in self._markers() else None

    def _markers(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special or _is_marker(token.content)}

    def vocabulary(self) -> Vocabulary | None:
        """All tokens, for grammars; None: they cannot spell every text byte by byte, or nothing ends a text."""
        table = self.token_bytes
        if table is None or not self.takes_grammars:
            return None
        markers = self._markers()
        tokens = [markers[i].encode() if i in markers else table.of(i) for i in range(self.vocab_size)]
        if not {bytes([byte]) for byte in range(0x80)} <= set(tokens):
            return None
        return Vocabulary(
            tokens=tokens,
            special_token_ids=sorted(markers),
            eos_token_id=self.end_token_ids[0],
            encode=lambda text: self.encode_plain([text])[0],
        )

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Tokens of a text. Special tokens that are written in it are recognised: not for a stranger's message.

        Args:
            add_special_tokens: begin and end the text as the artifact says, usually with BOS.
            most: how many there may be; None: any number.

        Raises:
            InvalidParameterError: the text is not one: it holds halves of characters.
            PromptTooLongError: there are more than ``most``; told without tokenising where the length tells it.
        """
        return self._ids(self._tokenizer, text, add_special_tokens, most)

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts in which a special token is only its characters."""
        return [self._ids(self._plain, text, add_special_tokens=False) for text in texts]

    def check_length(self, texts: Sequence[str], most: int) -> None:
        """Refuse texts whose length alone tells that together they have too many tokens.

        Raises:
            PromptTooLongError: it has more than ``most``, whatever they are.
        """
        num_chars = sum(map(len, texts))
        if num_chars > max(most, _LONG_CHARS) and self._reach.exceeds(texts, most):
            raise PromptTooLongError(
                f"the prompt has {num_chars} characters, but the context holds {most + 1} tokens (prompt and output), "
                "and so many characters are more, whatever they are",
                param="prompt",
            )

    @cached_property
    def _plain(self) -> Library:
        """Another tokenizer, since the setting is the object's and others tokenise meanwhile."""
        return _without_special(self._tokenizer)

    @cached_property
    def _reach(self) -> TokenReach:
        return TokenReach(self._tokenizer)

    def _ids(self, library: Library, text: str, add_special_tokens: bool, most: int | None = None) -> list[int]:
        is_long = len(text) > _LONG_CHARS
        if is_long and most is not None:
            self.check_length([text], most)
        try:
            if is_long:
                [encoding] = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = library.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the library says to a string that no UTF-8 can hold
            raise InvalidParameterError(
                "the prompt holds half of a character (a surrogate, or a byte that was not UTF-8); send it in UTF-8",
                param="prompt",
            ) from error
        if most is not None and len(encoding) > most:
            raise too_many_tokens(len(encoding), most)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; what is not UTF-8 becomes U+FFFD, ids outside the vocabulary nothing."""
        table = self.token_bytes
        if table is None:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        kept = [i for i in ids if i not in table.skipped] if skip_special_tokens else ids
        if not kept:
            return ""
        data = table.of_first(kept[0]) + b"".join(map(table.of, kept[1:]))
        return data.decode("utf-8", "replace").removeprefix(table.rules.strip_first)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
        now: datetime | None = None,
    ) -> str:
        """The prompt as text, for people to read; `encode_chat` makes tokens of it without trusting the contents.

        Args:
            messages: OpenAI's shape, text only.
            add_generation_prompt: end with the beginning of an assistant message.
            template_kwargs: further variables of the template, e.g. ``enable_thinking``, ``tools``.
            now: what ``strftime_now`` tells the template; None: the template has no clock, so that the same messages
                give the same prompt tomorrow.

        Raises:
            InvalidParameterError: a message or variable is not what it should be; `param` names it.
            ChatTemplateError: the model has no template, or it failed on these messages.
        """
        template = self._chat_template()
        return template.render(template.context(messages, add_generation_prompt, template_kwargs), now)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        now: datetime | None = None,
        most: int | None = None,
    ) -> list[int]:
        """The prompt as tokens; arguments and errors as `render_chat`, ``most`` as `encode`.

        Special tokens come from the template alone: written in a message they are only characters. Where no message
        holds one, the tokens are those of the rendered text.

        Args:
            continue_final: end with the content of the last message, so that the answer goes on with it.

        Raises:
            ChatTemplateError: also where the template does not show that content.
        """
        template = self._chat_template()
        assert self._guard is not None
        context = template.context(messages, add_generation_prompt and not continue_final, template_kwargs)
        checked = context["messages"]
        assert isinstance(checked, list), "they were checked"
        if most is not None:  # told before a template that is written in vain
            self.check_length([str(message["content"]) for message in checked], most)
        end = self._guard.mark_end(context) if continue_final else ""
        prompt = self._guard.render(context, lambda guarded: template.render(guarded, now))
        if end:
            prompt = prompt.until(end)
        if most is not None:
            self.check_length([prompt.text], most)
        if prompt.is_plain:
            return self.encode(prompt.text, add_special_tokens=False, most=most)
        return self._guard.encode(prompt, self.encode_plain)

    def reasoning_after(self, prompt: Sequence[int]) -> Reasoning | None:
        """How the answer to a prompt of `encode_chat` tells its thoughts from its content; None: it has none."""
        tags = None if self._parts.chat_template is None else tags_of_template(self._parts.chat_template)
        if tags is None:
            return None
        tail = self.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        return Reasoning(tags, is_open=tail.endswith(tags.begin))

    def special_text(self, token_id: int) -> str:
        """What a special token, which `decode` may skip, is written as; empty for any other."""
        return (self._tokenizer.id_to_token(token_id) or "") if token_id in self.special_token_ids else ""

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens that are written as one of these texts."""
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i in self.special_token_ids)

    def check_chat_template(self) -> None:
        """Compile the template; ChatTemplateError where it cannot be read."""
        self._chat_template()

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            parts = self._parts
            if parts.chat_template is None:
                raise ChatTemplateError(
                    "this model has no chat template; send a prompt instead, or serve it with --chat-template FILE",
                    param="messages",
                )
            template = ChatTemplate(parts.chat_template, parts.bos_token, parts.eos_token)
            self._guard = SpecialTokenGuard(parts.tokenizer, template, parts.end_token_ids)
            self._template = template
        return self._template


def too_many_tokens(num_tokens: int, most: int) -> PromptTooLongError:
    """What is said of a prompt that was counted."""
    return PromptTooLongError(
        f"the prompt has {num_tokens} tokens, but the context holds {most + 1} (prompt and output); at most {most} "
        "are possible",
        param="prompt",
    )


def _without_special(tokenizer: Library) -> Library:
    """A tokenizer of the same vocabulary to which special tokens are only characters. It shares the model, which may
    be large; added tokens are its own."""
    from tokenizers import Tokenizer as Library

    plain = Library(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(tokenizer, name)
        if part is not None:
            setattr(plain, name, part)
    added = tokenizer.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (plain.add_special_tokens if token.special else plain.add_tokens)([token])
    assert plain.get_added_tokens_decoder().keys() == added.keys(), "ids are given in the order of adding"
    plain.encode_special_tokens = True
    return plain


def _is_marker(content: str) -> bool:
    """Whether an added token that is not special is a marker all the same, like ``<think>``."""
    return content.startswith("<") and content.endswith(">")


_utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_MAX_WINDOW_TOKENS = 64
"""For decoders without a byte table: how many tokens may be held before they are shown as they are."""


class Detokenizer:
    """Text from one sequence's tokens as they come: every piece ends at a character, and the pieces together are the
    whole decode. `append` costs a table look-up and the decoding of the token's bytes.

    Args:
        after: the token before the first one, usually the prompt's last. None or a special token: a new text begins,
            and SentencePiece models drop its leading space; otherwise the text goes on, and the space stays.
        verbatim: the space stays in either case, because a constraint asked for it.
        shown: special tokens that are text here.
    """

    __slots__ = ("_decoder", "_first", "_read", "_shown", "_strip", "_table", "_tokenizer", "_whole", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        after: int | None = None,
        verbatim: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.token_bytes
        self._shown = shown
        self._decoder = _utf8("replace")
        begins = not verbatim and (after is None or after in tokenizer.special_token_ids)
        rules = None if self._table is None else self._table.rules
        self._first = begins
        self._whole: dict[int, str] = {}
        """Tokens whose text is known without a look at what is open: the table's, where nothing is."""
        self._strip = rules.strip_first if rules is not None and begins else ""
        self._window: list[int] = [] if begins or after is None else [after]
        self._read = len(self._window)
        """How much of the window is only context, its text already shown."""

    def special_text(self, token_id: int) -> str:
        """How a special token, whose text `append` leaves out, is written; empty for any other."""
        return self._tokenizer.special_text(token_id)

    def append(self, token_id: int) -> str:
        """The text that is complete now; empty when a character is still open or the token special and not shown."""
        text = self._whole.get(token_id)
        return self._append(token_id) if text is None else text

    def _append(self, token_id: int) -> str:
        table = self._table
        if token_id in self._shown:
            return self._show(token_id)
        if table is None:
            return self._append_to_window(token_id)
        if token_id in table.skipped:
            return ""
        if not self._first:
            return self._decoded(table, token_id)
        self._first = bool(self._strip)
        text = self._decoder.decode(table.of_first(token_id))
        return self._stripped(text) if self._strip else text

    def _decoded(self, table: TokenBytes, token_id: int) -> str:
        """The text of a token behind others."""
        was_open = self._decoder.getstate()[0]
        text = self._decoder.decode(table.of(token_id))
        is_open = self._decoder.getstate()[0]
        self._whole = {} if is_open else table.texts
        if not (was_open or is_open):
            table.texts[token_id] = text
        return text

    def flush(self) -> str:
        """What an unfinished character leaves when no more tokens come: U+FFFD, or nothing."""
        if self._table is None:
            text = self._new_text()
            self._read = len(self._window)
            return text
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip else text

    def _show(self, token_id: int) -> str:
        """The text of a special token, after what the tokens before it left open."""
        text = self.flush() + self.special_text(token_id)
        self._window, self._read = [], 0
        self._strip, self._first = "", False
        return text

    def _stripped(self, text: str) -> str:
        if not text:
            return text
        text, self._strip, self._first = text.removeprefix(self._strip), "", False
        return text

    def _append_to_window(self, token_id: int) -> str:
        """Decode a short window twice and show the difference, for decoders that only know whole lists."""
        self._window.append(token_id)
        text = self._new_text()
        pending = len(self._window) - self._read
        if not text or (text.endswith(_REPLACEMENT) and pending < _MAX_WINDOW_TOKENS):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._read])
        whole = self._tokenizer.decode(self._window)
        return whole[len(before) :]
