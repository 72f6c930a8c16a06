"""Random encoders of each family: their tensors, config.json and GGUF files, as their publishers write them.

The same family and seed give the same numbers in every format. Knows nothing of `lockstep`, so that it can test it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tools.random_blocks import BLOCKS
from tools.random_models import FLOATS, Array, as_float, random_tensor, write_safetensors

_SHARPNESS = 2.0
"""Factor of queries and keys, so that attention is far from uniform."""


@dataclass(frozen=True)
class Encoder:
    """A random encoder: its config.json, and the families that share its tensors' names."""

    family: str
    """``bert`` (with xlm-roberta), ``nomic``, ``modern`` or ``gemma``."""
    config: Mapping[str, Any]
    dense: tuple[tuple[int, str, bool], ...] = ()
    """Dense modules of sentence-transformers: size, class of the activation, and whether there is a bias."""
    gguf: str = ""
    """Name of the architecture in GGUF files."""
    gguf_metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> int:
        """Number of labels of a classifier; 0: the model has no classifier."""
        is_classifier = self.config["architectures"][0].endswith("ForSequenceClassification")
        return len(self.config["id2label"]) if is_classifier else 0


def _sizes(vocab: int = 320, context: int = 256, hidden: int = 64, layers: int = 3, heads: int = 4) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "max_position_embeddings": context, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 2 * hidden,
    }  # fmt: skip


def _bert(name: str = "BertModel", **changes: Any) -> dict[str, Any]:
    sizes = _sizes()
    return {
        "architectures": [name], "model_type": "bert", **sizes, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "type_vocab_size": 2, "pad_token_id": 0, **changes,
    }  # fmt: skip


def _xlm(name: str = "XLMRobertaModel", **changes: Any) -> dict[str, Any]:
    own = {"model_type": "xlm-roberta", "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 258}
    return _bert(name, **{**own, "layer_norm_eps": 1e-5, **changes})


def _modern(name: str = "ModernBertModel", **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [name], "model_type": "modernbert", **_sizes(), "hidden_activation": "gelu",
        "norm_eps": 1e-5, "norm_bias": False, "local_attention": 16, "global_attn_every_n_layers": 2,
        "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "pad_token_id": 0, **changes,
    }  # fmt: skip


_GEMMA: Mapping[str, Any] = {
    "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", **_sizes(), "num_key_value_heads": 2,
    "head_dim": 24, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 24,
    "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True, "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
_NOMIC: Mapping[str, Any] = {
    "architectures": ["NomicBertModel"], "model_type": "nomic_bert", **_sizes(), "hidden_act": "silu",
    "layer_norm_eps": 1e-12, "type_vocab_size": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
_LABELS: Mapping[str, Any] = {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
_ONE_LABEL: Mapping[str, Any] = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}

ENCODERS: Mapping[str, Encoder] = {
    "bert": Encoder("bert", _bert(), gguf="bert"),
    "bert-relu-dense": Encoder("bert", _bert(hidden_act="relu"), dense=((48, "activation.Tanh", True),)),
    "bert-classifier": Encoder("bert", _bert("BertForSequenceClassification", **_LABELS)),
    "xlm-roberta": Encoder("bert", _xlm(), gguf="bert"),
    "xlm-roberta-classifier": Encoder("bert", _xlm("XLMRobertaForSequenceClassification", **_ONE_LABEL), gguf="bert"),
    "nomic-bert": Encoder("nomic", _NOMIC, gguf="nomic-bert", gguf_metadata={"rope.freq_base": 1000.0}),
    "modern-bert": Encoder(
        "modern",
        _modern(),
        gguf="modern-bert",
        gguf_metadata={
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": 2,
        },
    ),
    "modern-bert-classifier": Encoder(
        "modern", _modern("ModernBertForSequenceClassification", classifier_pooling="mean", **_LABELS)
    ),
    "gemma-embedding": Encoder(
        "gemma",
        _GEMMA,
        dense=((96, "linear.Identity", False), (64, "linear.Identity", False)),
        gguf="gemma-embedding",
        gguf_metadata={
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": 2,
            "attention.head_count_kv": 2,
            "attention.key_length": 24,
            "attention.value_length": 24,
            "dense_2_feat_in": 64,
            "dense_2_feat_out": 96,
            "dense_3_feat_in": 96,
            "dense_3_feat_out": 64,
        },
    ),
}
"""Small encoders of each family and variant."""


def _real(context: int, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {**_sizes(8_192, context, hidden, layers, heads), "intermediate_size": 4 * hidden}


REAL_SHAPES: Mapping[str, Encoder] = {
    "minilm": Encoder("bert", _bert(**_real(512, 384, 6, 12))),
    "bge-m3": Encoder("bert", _xlm(**_real(8_194, 1_024, 24, 16))),
}
"""Encoders in the shapes of real ones, for measurements. Their vocabulary is smaller, which has no effect on speed."""


def encoder_shapes(encoder: Encoder) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint, under the names of transformers."""
    config = encoder.config
    shapes = {"bert": _bert_shapes, "nomic": _nomic_shapes, "modern": _modern_shapes, "gemma": _gemma_shapes}
    found = shapes[encoder.family](config)
    hidden, labels = config["hidden_size"], encoder.labels
    if encoder.family == "bert" and labels:
        is_bert = config["model_type"] == "bert"
        prefix, dense, out = ("bert.", "bert.pooler.dense", "classifier") if is_bert else (
            "roberta.", "classifier.dense", "classifier.out_proj"
        )  # fmt: skip
        found = {prefix + name: shape for name, shape in found.items()}
        found |= _linear(dense, hidden, hidden) | _linear(out, labels, hidden)
    elif encoder.family == "modern" and labels:
        found = {f"model.{name}": shape for name, shape in found.items()}
        found |= {"head.dense.weight": (hidden, hidden), "head.norm.weight": (hidden,)}
        found |= _linear("classifier", labels, hidden)
    return found


def encoder_tensors(encoder: Encoder, encoding: str = "F32", seed: int = 0) -> dict[str, Array]:
    """The numbers of a checkpoint in a float encoding. Gemma's norms are distances from one."""
    tensors = {}
    for name, size in encoder_shapes(encoder).items():
        tensor = np.asarray(random_tensor(name, size, "F32", seed), np.float32)
        if len(size) == 2 and any(part in name for part in ("query", "key.", "q_proj", "k_proj", "Wqkv")):
            rows = 2 * len(tensor) // 3 if "Wqkv" in name else len(tensor)
            tensor[:rows] *= np.float32(_SHARPNESS)
        if encoder.family == "gemma" and name.endswith("norm.weight"):
            tensor -= np.float32(1)
        tensors[name] = as_float(tensor, encoding)
    return tensors


def dense_tensors(encoder: Encoder, seed: int = 0) -> list[dict[str, Array]]:
    """The numbers of each dense module, under the names of sentence-transformers."""
    modules, columns = [], encoder.config["hidden_size"]
    for index, (size, _, has_bias) in enumerate(encoder.dense):
        shapes = {"linear.weight": (size, columns)} | ({"linear.bias": (size,)} if has_bias else {})
        modules.append({n: random_tensor(f"{index}.{n}", shape, "F32", seed) for n, shape in shapes.items()})
        columns = size
    return modules


def write_encoder(directory: Path, encoder: Encoder, encoding: str = "F32", *, seed: int = 0) -> Path:
    """Write config.json, safetensors, and the modules of sentence-transformers if there are dense ones."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(encoder.config)))
    write_safetensors(directory / "model.safetensors", encoder_tensors(encoder, encoding, seed))
    if not encoder.dense:
        return directory
    kinds = ["Transformer", "Pooling", *("Dense" for _ in encoder.dense), "Normalize"]
    paths = ["" if kind == "Transformer" else f"{index}_{kind}" for index, kind in enumerate(kinds)]
    modules = [{"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
               for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    columns = encoder.config["hidden_size"]
    for index, ((size, activation, has_bias), tensors) in enumerate(
        zip(encoder.dense, dense_tensors(encoder, seed), strict=True)
    ):
        folder = directory / f"{index + 2}_Dense"
        folder.mkdir(exist_ok=True)
        config = {
            "in_features": columns, "out_features": size, "bias": has_bias,
            "activation_function": f"torch.nn.modules.{activation}",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        write_safetensors(folder / "model.safetensors", tensors)
        columns = size
    return directory


def write_word_tokenizer(directory: Path, size: int) -> None:
    """Write tokenizer.json, which has one token for each of the words ``w5``, ``w6``..., and a class token before and
    a separator after each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {name: index for index, name in enumerate([*names, *(f"w{index}" for index in range(len(names), size))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.add_special_tokens(names)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(directory / "tokenizer.json"))


def write_encoder_gguf(
    path: Path,
    encoder: Encoder,
    encoding: str = "F32",
    *,
    seed: int = 0,
    extra: Callable[[Any], None] = lambda writer: None,
    rounds: bool = False,
) -> Path:
    """Write a GGUF file as llama.cpp's converters do, without a vocabulary.

    Args:
        extra: function that adds further metadata to a `gguf.GGUFWriter`.
        rounds: whether blocks are rounded from the checkpoint's numbers; otherwise they are drawn directly.
    """
    import gguf

    config = encoder.config
    writer = gguf.GGUFWriter(path, encoder.gguf)
    prefix = encoder.gguf
    offset = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    writer.add_context_length(config["max_position_embeddings"] - offset)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if encoder.family == "gemma":
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", config.get("norm_eps")))
        writer.add_causal_attention(False)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    writer.add_uint32("tokenizer.ggml.token_type_count", config.get("type_vocab_size", 1))
    for key, value in encoder.gguf_metadata.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{prefix}.{key}", value)
    extra(writer)
    tensors = encoder_tensors(encoder, seed=seed)
    if encoder.family == "gemma":
        norms = {name: with_offset(tensor, 1) for name, tensor in tensors.items() if name.endswith("norm.weight")}
        tensors |= norms
        for index, module in enumerate(dense_tensors(encoder, seed)):
            tensors[f"dense_{index + 2}.weight"] = module["linear.weight"]
    for name, tensor in _gguf_tensors(encoder, tensors, offset).items():
        is_block = encoding in BLOCKS and tensor.ndim == 2 and not name.startswith(("position", "token_types", "cls"))
        data = tensor
        if is_block and rounds:
            data = gguf.quants.quantize(np.asarray(tensor, np.float32), gguf.GGMLQuantizationType[encoding])
        elif is_block:
            data = random_tensor(name, tensor.shape, encoding, seed)
        if encoding in FLOATS and tensor.ndim == 2:
            data = as_float(np.asarray(tensor, np.float32), encoding)
        raw = gguf.GGMLQuantizationType[encoding] if is_block or data.dtype == np.uint16 else None
        data = data.view(np.uint8) if data.dtype == np.uint16 else data
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_GGUF_PARTS = (
    ("embeddings.word_embeddings", "token_embd"), ("embeddings.tok_embeddings", "token_embd"),
    ("embed_tokens", "token_embd"), ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"), ("embeddings.LayerNorm", "token_embd_norm"),
    ("embeddings.norm", "token_embd_norm"), ("final_norm", "output_norm"),
    ("attention.self.query", "attn_q"), ("attention.self.key", "attn_k"), ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"), ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"), ("output.dense", "ffn_down"), ("output.LayerNorm", "layer_output_norm"),
    ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"), ("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
    ("attn.Wqkv", "attn_qkv"), ("attn.Wo", "attn_output"), ("attn_norm", "attn_norm"), ("mlp_norm", "ffn_norm"),
    ("mlp.Wi", "ffn_up"), ("mlp.Wo", "ffn_down"), ("input_layernorm", "attn_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"), ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_mlp_layernorm", "layer_output_norm"), ("classifier.dense", "cls"), ("classifier.out_proj", "cls.output"),
    ("norm", "output_norm"),
)  # fmt: skip
"""Names of modules in checkpoints, and in GGUF files."""


def _gguf_tensors(encoder: Encoder, tensors: Mapping[str, Array], offset: int) -> dict[str, Array]:
    """Tensors under GGUF's names. Nomic's queries, keys and values are one tensor, and positions lose unused rows."""
    names = dict(_GGUF_PARTS)
    names["post_attention_layernorm"] = "post_attention_norm" if encoder.family == "gemma" else "attn_output_norm"
    renamed: dict[str, Array] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.removeprefix("roberta.").rpartition(".")
        parts = module.split(".")
        numbers = [part for part in parts if part.isdigit()]
        if name.startswith("dense_"):
            renamed[name] = tensor
        elif numbers:
            after = ".".join(parts[parts.index(numbers[0]) + 1 :])
            renamed[f"blk.{numbers[0]}.{names[after]}.{kind}"] = tensor
        else:
            stored = tensor[offset:] if names[module] == "position_embd" else tensor
            renamed[f"{names[module]}.{kind}"] = stored
    if encoder.family == "nomic":
        for layer in range(encoder.config["num_hidden_layers"]):
            separate = [renamed.pop(f"blk.{layer}.attn_{each}.weight") for each in "qkv"]
            renamed[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(separate)
    return renamed


def with_offset(tensor: Array, offset: int) -> Array:
    """A norm's weights plus an offset, in float32."""
    return np.asarray(tensor, np.float32) + np.float32(offset)


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _embeddings(config: Mapping[str, Any], *, has_positions: bool) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    tables = {"word": config["vocab_size"], "token_type": config["type_vocab_size"]}
    tables |= {"position": config["max_position_embeddings"]} if has_positions else {}
    shapes: dict[str, tuple[int, ...]] = {f"embeddings.{n}_embeddings.weight": (s, hidden) for n, s in tables.items()}
    return shapes | _norm("embeddings.LayerNorm", hidden)


def _bert_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = _embeddings(config, has_positions=True)
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= _linear(layer + name, hidden, hidden)
        shapes |= _norm(f"{layer}attention.output.LayerNorm", hidden)
        shapes |= _linear(f"{layer}intermediate.dense", inner, hidden) | _linear(f"{layer}output.dense", hidden, inner)
        shapes |= _norm(f"{layer}output.LayerNorm", hidden)
    return shapes


def _nomic_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = _embeddings(config, has_positions=False)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= _norm(f"{layer}post_attention_layernorm", hidden) | _norm(f"{layer}post_mlp_layernorm", hidden)
    return shapes


def _modern_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"embeddings.tok_embeddings.weight": (config["vocab_size"], hidden)}
    shapes["embeddings.norm.weight"] = (hidden,)
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."
        shapes |= {f"{layer}attn_norm.weight": (hidden,)} if index else {}
        shapes |= {
            f"{layer}attn.Wqkv.weight": (3 * hidden, hidden), f"{layer}attn.Wo.weight": (hidden, hidden),
            f"{layer}mlp_norm.weight": (hidden,), f"{layer}mlp.Wi.weight": (2 * inner, hidden),
            f"{layer}mlp.Wo.weight": (hidden, inner),
        }  # fmt: skip
    shapes["final_norm.weight"] = (hidden,)
    return shapes


def _gemma_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"layers.{index}."
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        shapes |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in norms}
        shapes |= {
            f"{layer}self_attn.q_proj.weight": (queries, hidden), f"{layer}self_attn.k_proj.weight": (keys, hidden),
            f"{layer}self_attn.v_proj.weight": (keys, hidden), f"{layer}self_attn.o_proj.weight": (hidden, queries),
            f"{layer}self_attn.q_norm.weight": (dim,), f"{layer}self_attn.k_norm.weight": (dim,),
            f"{layer}mlp.gate_proj.weight": (inner, hidden), f"{layer}mlp.up_proj.weight": (inner, hidden),
            f"{layer}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    shapes["norm.weight"] = (hidden,)
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an encoder with random weights, and a tokenizer of words.")
    parser.add_argument("shape", choices=(*REAL_SHAPES, *ENCODERS))
    parser.add_argument("encoding", choices=FLOATS)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    encoder = {**ENCODERS, **REAL_SHAPES}[arguments.shape]
    write_encoder(arguments.path, encoder, arguments.encoding)
    write_word_tokenizer(arguments.path, encoder.config["vocab_size"])


if __name__ == "__main__":
    main()
