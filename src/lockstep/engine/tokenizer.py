"""Tokenizer of a model: text to tokens, conversations to prompts, and tokens to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.chat_template import ChatTemplate
from lockstep.engine.detokenizer import TokenBytes, byte_alphabet, decoder_rules, steps_of
from lockstep.engine.output_rules import Reasoning, tags_of_template
from lockstep.engine.special_token_guard import SpecialTokenGuard
from lockstep.errors import ChatTemplateError, InvalidParameterError, PromptTooLongError
from lockstep.executors.grammar_compiler import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


_TAIL_TOKENS = 32
"""Enough for a tag, spelled letter by letter, and the blanks after it."""
_LONG_CHARS = 4_096
"""A longer text is tokenised by a call that lets other threads run meanwhile."""
MAX_COMPOSED = 4
"""Characters that a composing normal form of Unicode makes one of, at most: none decomposes into more."""
_GROWING = frozenset({"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"})
_COMPOSING = frozenset({"NFC", "NFKC"})
_SPLITTING = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
"""Steps that cut a text and drop nothing of it."""
_BLANKS = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's white space, which an added token may take in beside it."""


class Tokenizer:
    """Text to tokens and back, and conversations to prompts, as an artifact states. May be shared by threads."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.parts = parts
        """The artifact's parts that it was made of."""
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
    def has_chat_template(self) -> bool:
        return self.parts.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The template's source, to find out which variables it reads."""
        return self.parts.chat_template

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template looks up; ChatTemplateError where there is none or it cannot be read."""
        return self._chat_template().variables

    @property
    def takes_grammars(self) -> bool:
        """True where `vocabulary` can be expected to give one; it is not made for that."""
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
            add_special_tokens: begin and end the text as the artifact states, usually with BOS.
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
        if most is not None:  # told before a template is written in vain
            self.check_length([str(message["content"]) for message in context["messages"]], most)  # type: ignore[attr-defined]  # checked messages
        return self._guard.encode(context, now, self, continue_final=continue_final, most=most)

    def reasoning_after(self, prompt: Sequence[int]) -> Reasoning | None:
        """Find how the answer to a prompt of `encode_chat` tells its thoughts from its content; None: it has none."""
        tags = None if self.parts.chat_template is None else tags_of_template(self.parts.chat_template)
        if tags is None:
            return None
        tail = self.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        return Reasoning(tags, is_open=tail.endswith(tags.begin))

    def special_text(self, token_id: int) -> str:
        """Text of a special token, which `decode` may skip; empty for any other."""
        return (self._tokenizer.id_to_token(token_id) or "") if token_id in self.special_token_ids else ""

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens that are written as one of these texts."""
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i in self.special_token_ids)

    def check_chat_template(self) -> None:
        """Compile and try the template; ChatTemplateError where it cannot be read or fails on every conversation."""
        self._chat_template().check()

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            parts = self.parts
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
    """The error for a prompt that was counted."""
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
    """True for an added token that is not special and a marker all the same, like ``<think>``."""
    return content.startswith("<") and content.endswith(">")


class TokenReach:
    """Bound of the text that a token can stand for: tells from a text's length alone that no context holds it.

    A tokenizer is a chain of steps, each of which says how many characters it may make one of. Where a step may swallow
    text without a bound (blanks that are dropped, unknown characters that become one token together) nothing follows
    from a length, and nothing is claimed. Making one reads the whole vocabulary, for some tenths of a second.
    """

    def __init__(self, tokenizer: Library) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._absorbs_blanks = any(token.lstrip or token.rstrip for token in added)
        composed = _composed(steps_of(tokenizer.normalizer, "normalizers"))
        is_lossless = _cuts_only(steps_of(tokenizer.pre_tokenizer, "pretokenizers")) and _knows_all(tokenizer)
        self._chars_per_token = 0
        if composed and is_lossless:
            longest = max(map(len, (*tokenizer.get_vocab(), *(token.content for token in added))), default=1)
            self._chars_per_token = composed * longest

    def exceeds(self, texts: Sequence[str], num_tokens: int) -> bool:
        """True where texts have more than so many tokens together for certain."""
        num_chars, most = sum(map(len, texts)), num_tokens * self._chars_per_token
        if not self._chars_per_token or num_chars <= most:
            return False
        if self._absorbs_blanks:
            num_chars -= sum(text.count(blank) for text in texts for blank in _BLANKS)
        return num_chars > most


def _composed(steps: list[dict[str, Any]]) -> int:
    """Characters of the text that may become one of the normal text; 0: there is no bound."""
    factor = 1
    for step in steps:
        if step["type"] in _COMPOSING:
            factor *= MAX_COMPOSED
        elif step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1 and step["content"]:
            continue
        elif step["type"] not in _GROWING:
            return 0
    return factor


def _cuts_only(steps: list[dict[str, Any]]) -> bool:
    return all(
        step["type"] in _SPLITTING
        or (step["type"] in ("Split", "Punctuation") and step.get("behavior", "Removed") != "Removed")
        for step in steps
    )


def _knows_all(tokenizer: Library) -> bool:
    """True where every character becomes at least a token of its own, known or not."""
    from tokenizers import models

    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return False
    kinds = {step["type"] for step in steps_of(tokenizer.pre_tokenizer, "pretokenizers")} | {
        step["type"] for step in steps_of(tokenizer.normalizer, "normalizers")
    }
    if "ByteLevel" in kinds:
        needed = list(byte_alphabet())
    elif model.byte_fallback:
        needed = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return model.unk_token is not None and not model.fuse_unk
    return all(model.token_to_id(token) is not None for token in needed)
