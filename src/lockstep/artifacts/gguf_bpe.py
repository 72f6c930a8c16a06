"""BPE tokenizers of GGUF files: byte-level BPE, SentencePiece BPE and Gemma 4's, as `tokenizers` pipelines.

Source: llama.cpp's `llama-vocab.cpp` (split expressions and defaults of the families).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.artifacts.gguf_vocabulary import GgufVocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import Decoder
    from tokenizers.pre_tokenizers import PreTokenizer

SPACE = "\u2581"
"""Character that stands for a space in pieces of SentencePiece."""
_CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"


def _llama3(digits: str) -> str:
    return (
        rf"(?:{_ANY_CASE_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(contractions: str, digits: str) -> str:
    """Expression that splits words where a capital follows a small letter. As in llama.cpp, only a to z have case."""
    capital, small = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{capital}*{small}+{contractions}|{start}{capital}+{small}*{contractions}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _characters(ranges: str) -> str:
    """Expression for one of the characters in a list of hexadecimal code points and ranges of them."""
    return "[" + "".join("-".join(chr(int(code, 16)) for code in item.split("-")) for item in ranges.split()) + "]"


@dataclass(frozen=True, slots=True)
class Splitter:
    """A family of pre-tokenizers: expressions that are applied in sequence, each to the pieces of the previous one."""

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    """True if a piece that is a token in the vocabulary becomes that token regardless of the merges."""
    add_bos: bool = False
    """Whether the family adds BOS, if the file does not specify it."""


_DEFAULT = Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_GPT2_SPLITTER = Splitter((_GPT2,))
_LLAMA3 = Splitter((_llama3(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = Splitter((_llama3(r"\p{N}"),))
_CL100K = Splitter((_llama3(r"\p{N}{1,3}"),))
_WITH_MARKS = (
    rf"(?:{_ANY_CASE_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Like Qwen 2's expression, with combining marks as parts of words."""
_CJK = _characters("4E00-9FA5 800-4E00 AC00-D7FF")
_DEEPSEEK_LETTERS = _characters(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 "
    "104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
"""Letters with a case, as DeepSeek's tokenizer lists them: not all of today's Unicode."""
_DEEPSEEK_LLM = Splitter(
    (
        r"[\r\n]",
        rf"\s?{_DEEPSEEK_LETTERS}+",
        rf"\s?{_characters('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}+",
        r"\s+$",
        rf"{_CJK}+",
        r"\p{N}+",
    )
)
_DEEPSEEK_CODER = Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"{_CJK}+", r"\p{N}"))
_FALCON = Splitter((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_SMOLLM = Splitter((r"\p{N}", _GPT2))

SPLITTERS: Mapping[str, Splitter] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2_SPLITTER,
    "phi-2": _GPT2_SPLITTER,
    "olmo": _GPT2_SPLITTER,
    "mpt": _GPT2_SPLITTER,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "gpt-4o": Splitter((_cased(rf"(?:{_ANY_CASE_CONTRACTIONS})?", r"\p{N}{1,3}"),)),
    "tekken": Splitter((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "lfm2": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": Splitter((_WITH_MARKS,)),
    "stablelm2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "falcon": _FALCON,
}
"""Splitters by value of `tokenizer.ggml.pre`."""


def byte_level(vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool]:
    """Build byte-level BPE ("gpt2"). Also returns whether its family adds BOS by default."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    metadata = vocabulary.metadata
    name = metadata.text("tokenizer.ggml.pre", "default")
    splitter = SPLITTERS.get(name)
    if splitter is None:
        known = ", ".join(SPLITTERS)
        raise metadata.unsupported(f"pre-tokenizer {name!r}; supported: {known}")
    tokenizer = Tokenizer(BPE(dict(vocabulary.ids), vocabulary.merges(), ignore_merges=splitter.ignore_merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitter.add_bos


def _pre_tokenizer(splitter: Splitter) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    splits: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in splitter.expressions
    ]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build BPE with scores as ranks ("llama"): the neighbors with the best combined score are joined first, leftmost
    first."""
    merges = _merges_by_score(vocabulary, vocabulary.scores())
    return _escaped_bpe(vocabulary, merges, vocabulary.metadata.flag("tokenizer.ggml.add_space_prefix", True))


def gemma4(vocabulary: GgufVocabulary) -> Tokenizer:
    """Build SentencePiece's pieces with listed merges ("gemma4"). Merges cross words, as in Hugging Face's tokenizer;
    none joins a line break with other characters."""
    return _escaped_bpe(vocabulary, vocabulary.merges(), has_prefix=False)


def _escaped_bpe(vocabulary: GgufVocabulary, merges: list[tuple[str, str]], has_prefix: bool) -> Tokenizer:
    """Build BPE on characters with "\u2581" for a space, and bytes for unknown characters."""
    from tokenizers import Tokenizer, normalizers
    from tokenizers.models import BPE

    unknown = vocabulary.tokens[vocabulary.special("unknown") or 0]
    tokenizer = Tokenizer(BPE(dict(vocabulary.ids), merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    replacements: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if has_prefix:
        replacements.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(replacements)
    tokenizer.decoder = space_decoder(has_prefix)
    return tokenizer


def space_decoder(has_prefix: bool) -> Decoder:
    """Decoder of pieces with "\u2581" for a space and ``<0x0A>`` for a byte. ``has_prefix`` drops the first space."""
    from tokenizers import decoders

    steps: list[Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


def _merges_by_score(vocabulary: GgufVocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that form a third, best score first.

    For one token, pairs with a longer left part come first, which is the leftmost pair in a run of equal characters.
    """
    ids = vocabulary.ids
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(scores)), key=lambda index: (-scores[index], index)):
        token = vocabulary.tokens[index]
        splits = ((token[:cut], token[cut:]) for cut in range(len(token) - 1, 0, -1))
        merges += [(left, right) for left, right in splits if left in ids and right in ids]
    return merges
