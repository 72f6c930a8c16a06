"""Tokenizer of a model: converts text to tokens, conversations to prompts, and tokens to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Literal

from lockstep.artifacts.model import TokenizerParts
from lockstep.engine.chat_template import ChatTemplate
from lockstep.engine.detokenizer import TokenBytes, decoder_rules
from lockstep.engine.generation_prompt import GenerationPrompts
from lockstep.engine.output_rules import Reasoning, tags_of_template
from lockstep.engine.special_token_guard import SpecialTokenGuard
from lockstep.engine.token_reach import TokenReach
from lockstep.errors import ChatTemplateError, InvalidParameterError, PromptTooLongError
from lockstep.executors.grammar_compiler import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Library


_TAIL_TOKENS = 32
"""Number of last prompt tokens that are searched for a tag, enough for one that is spelled letter by letter and the
blanks after it."""
_LONG_CHARS = 4_096
"""Number of characters above which a text is tokenised with a call that releases the interpreter lock."""


Texts = Literal["text", "pair"]
"""Texts of one vector or one score, for messages."""


class Tokenizer:
    """Text to tokens and back, and conversations to prompts, as the artifact defines. Threads may share it."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.parts = parts
        """Parts of the artifact that the tokenizer was created from."""
        self._tokenizer = parts.tokenizer
        added = parts.tokenizer.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.end_token_ids: tuple[int, ...] = parts.end_token_ids
        self.vocab_size: int = parts.tokenizer.get_vocab_size()
        """Number of tokens that have a text. A model may have more rows."""
        rules = decoder_rules(parts.tokenizer)
        self.token_bytes: TokenBytes | None = (
            None if rules is None else TokenBytes(parts.tokenizer, rules, self.special_token_ids)
        )
        """Bytes of each token; None: the decoder works only on whole token lists."""
        self._template: ChatTemplate | None = None
        self._guard: SpecialTokenGuard | None = None
        self.generation_prompts = GenerationPrompts(self)

    @property
    def has_chat_template(self) -> bool:
        return self.parts.chat_template is not None

    @property
    def takes_pairs(self) -> bool:
        """True if the chat template writes a query and a document, each in a message with its own role.

        Raises:
            ChatTemplateError: the model has no template, or it cannot be read.
        """
        return self._chat_template().takes_pairs

    @property
    def chat_template(self) -> str | None:
        """The template's source, from which callers derive the variables that it reads."""
        return self.parts.chat_template

    @property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads; none for a model without a template, such as an embedding model, by which
        conversations can be routed all the same.

        Raises:
            ChatTemplateError: the template cannot be read.
        """
        return self._chat_template().variables if self.parts.chat_template is not None else frozenset()

    @property
    def takes_grammars(self) -> bool:
        """True if `vocabulary` is expected to succeed. The vocabulary is not built for this."""
        return self.token_bytes is not None and bool(self.end_token_ids)

    def marker_id(self, text: str) -> int | None:
        """Id of the token with exactly this text, if grammars treat it as a marker: a special token, or one like
        ``<tool_call>``."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id is not None and token_id in self._markers() else None

    def _markers(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special or _is_marker(token.content)}

    def vocabulary(self) -> Vocabulary | None:
        """All tokens, for grammars; None: the tokens do not cover every byte, or there is no end token."""
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

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None, kind: Texts | None = None
    ) -> list[int]:
        """Tokenise a text and recognise special tokens in it. Do not use this for untrusted text.

        Args:
            add_special_tokens: add the tokens with which the artifact begins and ends a text, usually BOS.
            most: maximum number of tokens; None: no limit.
            kind: see `check_length`.

        Raises:
            InvalidParameterError: the text contains half of a character.
            PromptTooLongError: there are more than ``most`` tokens. If the text's length suffices to show this, the
                text is not tokenised.
        """
        return self._ids(self._tokenizer, text, add_special_tokens, most, kind)

    @cached_property
    def separator_id(self) -> int | None:
        """Token that ends the first text of a pair, if the tokens of the second one have another type; None: all have
        the same type, or pairs have no separator."""
        empty = self._tokenizer.encode("", add_special_tokens=False)
        pair = self._tokenizer.post_process(empty, empty)
        if 1 not in pair.type_ids:
            return None
        at = pair.type_ids.index(1)
        return pair.ids[at - 1] if at else None

    def prompt_text(self, name: str | None) -> str:
        """Text of one of the model's prompts for embeddings, by its name.

        Args:
            name: empty: no text; None: the default prompt, if the model has one.

        Raises:
            InvalidParameterError: there is no prompt of this name.
        """
        prompts = self.parts.prompts
        name = self.parts.default_prompt if name is None else name
        if not name:
            return ""
        if name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidParameterError(
                f"prompt_name is {name!r}; this model's prompts are: {known}", param="prompt_name"
            )
        return prompts[name]

    def encode_text(self, text: str, second: str | None = None, *, most: int, num_kept: int | None = None) -> list[int]:
        """Tokenise a text for an embedding, or a pair of texts for a score, with the special tokens around them. A
        special token that is written in a text is treated as ordinary characters.

        Args:
            most: maximum number of tokens, unless the text is cut.
            num_kept: cut the text to this many tokens, special tokens included; of a pair, the longer text is cut.

        Raises:
            InvalidParameterError: a text has no tokens or contains half of a character, or ``num_kept`` leaves no
                token of a text.
            PromptTooLongError: there are more than ``most`` tokens.
        """
        texts = [text] if second is None else [text, second]
        kind: Texts = "text" if second is None else "pair"
        if num_kept is None:
            self.check_length(texts, most, kind)
        encodings = [self._encoding(self._plain, each, add_special_tokens=False) for each in texts]
        lengths = [len(each) for each in encodings]
        if 0 in lengths:
            raise _no_content()
        num_special = self._tokenizer.num_special_tokens_to_add(second is not None)
        if num_kept is not None:
            if num_kept < num_special + len(texts):
                raise InvalidParameterError(
                    f"truncate_prompt_tokens is {num_kept}; it must be at least {num_special + len(texts)}, since "
                    f"{num_special} are special tokens",
                    param="truncate_prompt_tokens",
                )
            lengths = _cut_longest(lengths, num_kept - num_special)
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length)
        elif sum(lengths) + num_special > most:
            raise too_many_tokens(sum(lengths) + num_special, most, kind)
        first, *others = encodings
        ids: list[int] = self._tokenizer.post_process(first, others[0] if others else None).ids
        return ids

    def check_content(self, text: str) -> None:
        """Check that a text has tokens of its own, which a text of spaces has in some vocabularies only.

        Raises:
            InvalidParameterError: it has none.
        """
        if not text.strip() and not self.encode_plain([text])[0]:
            raise _no_content()

    def first_part(self, text: str, num_tokens: int) -> str:
        """Cut a text behind its first tokens, at least one.

        Raises:
            InvalidParameterError: the text contains half of a character.
        """
        encoding = self._encoding(self._plain, text, add_special_tokens=False, has_offsets=True)
        return text if len(encoding) <= num_tokens else text[: encoding.offsets[num_tokens - 1][1]]

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise texts without special tokens: one that is written in a text is treated as ordinary characters."""
        return [self._ids(self._plain, text, add_special_tokens=False) for text in texts]

    def check_length(self, texts: Sequence[str], most: int, kind: Texts | None = None) -> None:
        """Check that the texts are not certain to exceed a number of tokens, judging by their length alone.

        Args:
            kind: kind of the texts, for the message, if they are to be embedded or scored; None: a prompt.

        Raises:
            PromptTooLongError: the texts have more than ``most`` tokens, whatever they contain.
        """
        num_chars = sum(map(len, texts))
        if num_chars > max(most, _LONG_CHARS) and self._reach.exceeds(texts, most):
            if kind is not None:
                raise _text_too_long(f"{num_chars} characters, but the model takes {most} tokens", kind)
            raise PromptTooLongError(
                f"the prompt has {num_chars} characters, but the context holds {most + 1} tokens "
                "(prompt and output), too few for a prompt of this length",
                param="prompt",
            )

    @cached_property
    def _plain(self) -> Library:
        """A separate tokenizer, since the setting belongs to the object and other threads use it meanwhile."""
        return _without_special(self._tokenizer)

    @cached_property
    def _reach(self) -> TokenReach:
        return TokenReach(self._tokenizer)

    def _ids(
        self,
        library: Library,
        text: str,
        add_special_tokens: bool,
        most: int | None = None,
        kind: Texts | None = None,
    ) -> list[int]:
        if most is not None and len(text) > _LONG_CHARS:
            self.check_length([text], most, kind)
        encoding = self._encoding(library, text, add_special_tokens)
        if most is not None and len(encoding) > most:
            raise too_many_tokens(len(encoding), most, kind)
        ids: list[int] = encoding.ids
        return ids

    def _encoding(
        self, library: Library, text: str, add_special_tokens: bool, *, has_offsets: bool = False
    ) -> Encoding:
        try:
            if len(text) > _LONG_CHARS:  # in a batch, other threads can run
                encode = library.encode_batch if has_offsets else library.encode_batch_fast
                return encode([text], add_special_tokens=add_special_tokens)[0]
            return library.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:  # raised by the library for a string that UTF-8 cannot encode
            raise InvalidParameterError(
                "the prompt contains half of a character (a surrogate, or a byte that was not UTF-8); send UTF-8",
                param="prompt",
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Convert tokens to text. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are skipped."""
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
        """Render the prompt as text for people to read. `encode_chat` tokenises it without trusting the contents.

        Args:
            messages: messages in OpenAI's format, text only.
            add_generation_prompt: end with the start of an assistant message.
            template_kwargs: additional template variables, e.g. ``enable_thinking``, ``tools``.
            now: time for ``strftime_now``; None: the template has no clock, so that the same messages always give the
                same prompt.

        Raises:
            InvalidParameterError: a message or variable is invalid; `param` names it.
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
        kind: Texts | None = None,
    ) -> list[int]:
        """Render and tokenise the prompt. Arguments and errors are those of `render_chat`; ``most`` and ``kind`` are
        those of `encode`.

        Special tokens come only from the template; in a message they are ordinary characters. If no message contains
        one, the tokens are those of the rendered text.

        Args:
            continue_final: end with the content of the last message, so that the answer continues it.

        Raises:
            ChatTemplateError: as above, or the template does not show that content.
        """
        template = self._chat_template()
        assert self._guard is not None
        context = template.context(messages, add_generation_prompt and not continue_final, template_kwargs)
        if most is not None:  # checked before the template is rendered in vain
            self.check_length([str(message["content"]) for message in context["messages"]], most, kind)  # type: ignore[attr-defined]  # checked messages
        text, private = self._guard.render(context, now, continue_final=continue_final)
        if most is not None:
            self.check_length([text], most, kind)
        if private is None:
            return self.encode(text, add_special_tokens=False, most=most, kind=kind)
        ids: list[int] = []
        for part in self._guard.split(text, private):
            ids += [part] if isinstance(part, int) else self._first_plain(part, self._guard)
        return ids

    def _first_plain(self, ways: Iterable[Sequence[str]], guard: SpecialTokenGuard) -> list[int]:
        """Tokens of a caller's text, in the first way to cut it that gives no special token.

        Raises:
            ChatTemplateError: every way gives one.
        """
        for pieces in ways:
            ids = list(chain.from_iterable(self.encode_plain(pieces)))
            if not guard.is_forged(ids):
                return ids
        raise ChatTemplateError("a message contains a special token that this vocabulary cannot encode as plain text")

    def reasoning_after(self, prompt: Sequence[int]) -> Reasoning | None:
        """Find how the answer to a prompt of `encode_chat` separates reasoning from content; None: it has no
        reasoning."""
        tags = None if self.parts.chat_template is None else tags_of_template(self.parts.chat_template)
        if tags is None:
            return None
        tail = self.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        return Reasoning(tags, is_open=tail.endswith(tags.begin))

    def special_text(self, token_id: int) -> str:
        """Text of a special token, which `decode` may skip; empty for other tokens."""
        return (self._tokenizer.id_to_token(token_id) or "") if token_id in self.special_token_ids else ""

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the special tokens whose text is one of these."""
        ids = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(i for i in ids if i in self.special_token_ids)

    def check_chat_template(self) -> None:
        """Compile and try the template.

        Raises:
            ChatTemplateError: it cannot be read, or fails on every conversation.
        """
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


def _no_content() -> InvalidParameterError:
    return InvalidParameterError("the text has no tokens; send a text that is not empty or blank", param="prompt")


def _cut_longest(lengths: list[int], room: int) -> list[int]:
    """Lengths of one or two texts together in a room: the longer one is cut first, like ``longest_first`` in
    tokenizers."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    shorter = min(first, second, room // 2)
    return [shorter, room - shorter] if first <= second else [room - shorter, shorter]


def too_many_tokens(num_tokens: int, most: int, texts: Texts | None = None) -> PromptTooLongError:
    """The error for a prompt, or for texts to embed or score, whose tokens were counted."""
    if texts is not None:
        return _text_too_long(f"{num_tokens} tokens, but the model takes {most}", texts)
    return PromptTooLongError(
        f"the prompt has {num_tokens} tokens, but the context holds {most + 1} (prompt and output); at most {most} "
        "are possible",
        param="prompt",
    )


def _text_too_long(excess: str, texts: Texts) -> PromptTooLongError:
    have, it = ("the text has", "it") if texts == "text" else ("query and document together have", "them")
    return PromptTooLongError(
        f"{have} {excess}; shorten {it}, or cut {it} with truncate_prompt_tokens (-1: to what the model takes)",
        param="prompt",
    )


def _without_special(tokenizer: Library) -> Library:
    """A tokenizer of the same vocabulary that treats special tokens as ordinary characters. It shares the model, which
    may be large, and has its own added tokens."""
    from tokenizers import Tokenizer as Library

    plain = Library(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        part = getattr(tokenizer, name)
        if part is not None:
            setattr(plain, name, part)
    added = tokenizer.get_added_tokens_decoder()
    for _, token in sorted(added.items()):
        (plain.add_special_tokens if token.special else plain.add_tokens)([token])
    assert plain.get_added_tokens_decoder().keys() == added.keys(), "ids are assigned in the order of adding"
    plain.encode_special_tokens = True
    return plain


def _is_marker(content: str) -> bool:
    """True for an added token that is not special but acts as a marker, like ``<think>``."""
    return content.startswith("<") and content.endswith(">")
