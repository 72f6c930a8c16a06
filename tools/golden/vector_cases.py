"""Embedding models and rerankers on disk, with the files of sentence-transformers, and the texts that they are given.

Everything is made from a seed, so that scripts and tests rebuild the same models. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.golden import vector_tokenizers as made
from tools.golden.encoder_vocabularies import word_piece
from tools.random_encoders import ENCODERS, Encoder, write_encoder, write_encoder_gguf
from tools.random_models import random_tensor, write_huggingface, write_safetensors
from tools.random_shapes import SHAPES, tensor_shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SEED = 20261128
_LONG = " ".join(["I was charged twice for my card, please refund the second payment"] * 25)
TEXTS = (
    ".",
    " \u00a0- ",
    "a",
    "refund",
    "...!?",
    "I was charged twice for my subscription last week.",
    "  Please refund the payment \n",
    "今天天气很好，我们去公园散步吧。",  # noqa: RUF001  # a Chinese comma
    "L'été dernier, nous avons mangé des crêpes à la fête; où êtes-vous?",
    "Emoji 😀👍🏽 and e\u0301, ﬁ, ½ and UPPER case 12,345.67",
    "def add(first, second):\n\treturn first + second",
    _LONG,
)
"""Texts of golden vectors; the last one has 300 words."""
PROMPTED = (5, 7, 11)
"""Indices of the texts that get prompts."""
_QUERY = "How can I get a refund for a second payment?"
PAIRS = (
    (_QUERY, "Please send the receipt; the refund of a payment takes 3 days."),
    (_QUERY, "今天天气很好。"),
    (_QUERY, " ?"),
    ("été", "L'été dernier"),
    (_QUERY, _LONG),
    (_LONG, "the answer"),
    (_LONG, _LONG[:900]),
)
"""Queries and documents; the last three are longer than the limit."""
NUM_SHORT_PAIRS = 4
MAX_ANSWER_TOKENS = 700
"""Limit of a reranker that answers. The fifth pair is longer, and only its document is cut."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
_BEFORE, _AFTER = (
    f"<|im_start|>system\n{_JUDGE}<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
"""The beginning and the end of each prompt in the model card of Qwen3-Reranker."""
MESSAGES_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""Writes conversations as Qwen3's template does."""
_ROLE = '(messages | selectattr("role", "eq", "%s") | map(attribute="content") | first)'
PAIR_TEMPLATE = (
    "{{- " + json.dumps(_BEFORE + "<Instruct>: ") + " }}"
    "{{- " + _ROLE % "system" + ' | default("' + INSTRUCTION + '") }}{{- "\\n<Query>: " }}'
    "{{- " + _ROLE % "query" + ' }}{{- "\\n<Document>: " }}'
    "{{- " + _ROLE % "document" + " }}{{- " + json.dumps(_AFTER) + " }}"
)  # fmt: skip
"""Writes the prompt of Qwen3-Reranker for messages of the roles ``query`` and ``document``."""


def card_prompt(query: str, document: str, instruction: str = INSTRUCTION) -> tuple[str, str, str]:
    """The prompt of Qwen3-Reranker as its model card writes it: the part before the question, the question, of which
    the end is cut, and the part after it."""
    return _BEFORE, f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}", _AFTER


@dataclass(frozen=True)
class VectorCase:
    """An embedding model or a classifier."""

    encoder: str
    """Name in `ENCODERS`; empty: a Qwen3."""
    tokenizer: Callable[[], Tokenizer]
    settings: Mapping[str, Any]
    """Names of special tokens, and what else tokenizer_config.json has."""
    pooling: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the pooling; empty: a classifier."""
    normalizes: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    """In sentence_bert_config.json; None: the tokenizer's ``model_max_length`` holds."""
    pad_id: int = 0
    lowercase: bool = False
    """True if sentence_bert_config.json asks for lower case, which the tokenizer does not make."""


_BERT = {
    "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]",
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
}  # fmt: skip
_XLM = {
    "bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
    "pad_token": "<pad>",
}  # fmt: skip
_MODERN_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_MODERN = _BERT | {"model_input_names": ["input_ids", "attention_mask"]}
_GEMMA = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
_QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "padding_side": "left", "model_max_length": 131072}


def _modern_tokenizer() -> Tokenizer:
    return made.byte_level(_MODERN_TOKENS, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]")


def _qwen_tokenizer(single: str = "$A <|endoftext|>") -> Tokenizer:
    return made.byte_level(_QWEN_TOKENS, single, f"{single} $B:1", made.THINK)


_OLD_MEAN = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
EMBEDDERS: Mapping[str, VectorCase] = {
    "bert-mean": VectorCase(
        "bert", made.word_piece, {**_BERT, "model_max_length": 512}, _OLD_MEAN,
        prompts={"query": "query: ", "passage": "passage: "}, max_seq_length=48,
    ),
    "bert-cls": VectorCase(
        "bert", made.word_piece, {**_BERT, "model_max_length": 256},
        {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        max_seq_length=33,
    ),
    "bert-dense": VectorCase(
        "bert-relu-dense", lambda: made.word_piece(lowercase=False), _BERT, _OLD_MEAN, normalizes=False,
        max_seq_length=40, lowercase=True,
    ),
    "xlm-roberta": VectorCase(
        "xlm-roberta", made.unigram, {**_XLM, "model_max_length": 128}, {"pooling_mode": "mean"}, pad_id=1,
        prompts={"query": "query: ", "passage": "passage: "},
    ),
    "nomic-bert": VectorCase(
        "nomic-bert", made.word_piece, {**_BERT, "model_max_length": 8192}, _OLD_MEAN, max_seq_length=70,
        prompts={"search_query": "search_query: ", "search_document": "search_document: "},
        default_prompt="search_document",
    ),
    "modern-bert": VectorCase(
        "modern-bert", _modern_tokenizer, {**_MODERN, "model_max_length": 100}, {"pooling_mode": "cls"}
    ),
    "gemma-embedding": VectorCase(
        "gemma-embedding", made.byte_fallback, {**_GEMMA, "model_max_length": 200}, {"pooling_mode": "mean"},
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "}, max_seq_length=90,
    ),
    "qwen3-embedding": VectorCase(
        "", _qwen_tokenizer, _QWEN,
        {"word_embedding_dimension": 128, "pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        prompts={"query": f"Instruct: {INSTRUCTION}\nQuery: ", "document": ""}, max_seq_length=150,
    ),
}  # fmt: skip
_LABEL: Mapping[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
CLASSIFIERS: Mapping[str, VectorCase] = {
    "bert": VectorCase("bert-classifier", made.word_piece, {**_BERT, "model_max_length": 64}),
    "xlm-roberta": VectorCase("xlm-roberta-classifier", made.unigram, {**_XLM, "model_max_length": 65}, pad_id=1),
    "modern-bert": VectorCase("modern-bert-classifier", _modern_tokenizer, {**_MODERN, "model_max_length": 100}),
}


def encoder_of(case: VectorCase) -> Encoder:
    """The random encoder of a case: as large as its vocabulary, and with one label if it is a classifier."""
    encoder = ENCODERS[case.encoder]
    labels = {} if case.pooling else _LABEL
    config = {**encoder.config, **labels, "vocab_size": case.tokenizer().get_vocab_size(), "pad_token_id": case.pad_id}
    return replace(encoder, config=config)


def write_case(directory: Path, case: VectorCase, encoding: str = "F32") -> Path:
    """Write the model's directory as its publishers do."""
    if case.encoder:
        write_encoder(directory, encoder_of(case), encoding, seed=SEED)
    else:
        _write_qwen(directory, case.tokenizer(), encoding, prefix="")
    _write_tokenizer(directory, case)
    if case.pooling:
        _write_modules(directory, case)
    return directory


def write_case_gguf(path: Path, encoding: str) -> Path:
    """Write ``bert-mean`` as a GGUF file with its matrices rounded to blocks, without prompts and without a limit."""
    metadata = word_piece()

    def add_vocabulary(writer: Any) -> None:
        writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
        writer.add_token_list(metadata["tokenizer.ggml.tokens"])
        writer.add_token_types(metadata["tokenizer.ggml.token_type"])
        writer.add_unk_token_id(metadata["tokenizer.ggml.unknown_token_id"])
        writer.add_uint32("tokenizer.ggml.cls_token_id", metadata["tokenizer.ggml.cls_token_id"])
        writer.add_sep_token_id(metadata["tokenizer.ggml.seperator_token_id"])
        writer.add_uint32("bert.pooling_type", 1)

    encoder = encoder_of(EMBEDDERS["bert-mean"])
    return write_encoder_gguf(path, encoder, encoding, seed=SEED, extra=add_vocabulary, rounds=True)


def write_raw_classifier(directory: Path) -> Path:
    """Write the classifier ``bert`` with the activation Identity in its config.json."""
    path = write_case(directory, CLASSIFIERS["bert"])
    config = json.loads((path / "config.json").read_text())
    _write_json(path / "config.json", config | {"sentence_transformers": {"activation_fn": _IDENTITY}})
    return path


def write_reranker(directory: Path, template: str, *, has_modules: bool, is_raw: bool = False) -> Path:
    """Write a Qwen3-Reranker, as Qwen publishes it or with the modules of sentence-transformers.

    Args:
        is_raw: whether its modules score by the logit of ``yes`` alone, and as it is.
    """
    tokenizer = _qwen_tokenizer("$A")
    _write_qwen(directory, tokenizer, "F32", prefix="model.")
    _write_tokenizer(directory, VectorCase("", lambda: tokenizer, _QWEN))
    (directory / "chat_template.jinja").write_text(template)
    if has_modules:
        folder = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
        _write_json(directory / "modules.json", [_module(0, _TRANSFORMER, ""), _module(1, folder, "1_LogitScore")])
        other = None if is_raw else tokenizer.token_to_id("no")
        ids = {"true_token_id": tokenizer.token_to_id("yes"), "false_token_id": other}
        _write_json(directory / "1_LogitScore" / "config.json", ids)
        call = {"method": "forward", "method_output_name": "logits"}
        modalities = {"text": call, "message": {**call, "format": "flat"}}
        own = {"transformer_task": "text-generation", "modality_config": modalities}
        _write_json(directory / "sentence_bert_config.json", {**own, "module_output_name": "causal_logits"})
        kind: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}
        kind |= {"activation_fn": _IDENTITY} if is_raw else {}
        _write_json(directory / "config_sentence_transformers.json", kind)
    return directory


_TRANSFORMER = "sentence_transformers.models.Transformer"
_IDENTITY = "torch.nn.modules.linear.Identity"


def _write_qwen(directory: Path, tokenizer: Tokenizer, encoding: str, prefix: str) -> None:
    """A tiny Qwen3. The files of Qwen3-Embedding have tensor names without ``model.``."""
    shape = replace(SHAPES["tiny-qwen3"], vocab_size=tokenizer.get_vocab_size())
    write_huggingface(directory, shape, encoding, seed=SEED)
    if prefix != "model.":
        tensors = {
            prefix + name.removeprefix("model."): random_tensor(name, size, encoding, SEED)
            for name, size in tensor_shapes(shape).items()
        }
        write_safetensors(directory / "model.safetensors", tensors)


def _write_tokenizer(directory: Path, case: VectorCase) -> None:
    case.tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    _write_json(directory / "tokenizer_config.json", {**settings, **case.settings})


def _write_modules(directory: Path, case: VectorCase) -> None:
    num_dense = len(ENCODERS[case.encoder].dense) if case.encoder else 0
    kinds = ["Transformer", "Pooling", *["Dense"] * num_dense, *["Normalize"] * case.normalizes]
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    listed = [
        _module(index, f"sentence_transformers.models.{kind}", path)
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _write_json(directory / "modules.json", listed)
    size = 128 if not case.encoder else ENCODERS[case.encoder].config["hidden_size"]
    _write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": size, **case.pooling})
    if case.max_seq_length is not None:
        lengths = {"max_seq_length": case.max_seq_length, "do_lower_case": case.lowercase}
        _write_json(directory / "sentence_bert_config.json", lengths)
    own = {
        "__version__": {"sentence_transformers": "2.7.0"}, "similarity_fn_name": "cosine",
        "prompts": dict(case.prompts), "default_prompt_name": case.default_prompt,
    }  # fmt: skip
    _write_json(directory / "config_sentence_transformers.json", own)


def _module(index: int, kind: str, path: str) -> dict[str, Any]:
    return {"idx": index, "name": str(index), "path": path, "type": kind}


def _write_json(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(content))


def distances(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cosine distance of each row, in float64."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    found: np.ndarray[Any, Any] = 1 - (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    return found
