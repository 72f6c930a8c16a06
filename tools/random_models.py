"""Models with random weights in real shapes, for tests of speed, determinism and formats, which need no trained
weights.

    python -m tools.random_models gguf smollm2-135m Q8_0 out.gguf
    python -m tools.random_models huggingface tiny-qwen3 BF16 out_directory

The same shape and seed give the same numbers in every format: the float encodings are roundings of one another, and a
llama GGUF is permuted for interleaved rope as converters do. The module does not import `lockstep`, so that it can test
it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.random_blocks import BLOCKS, encoding_in_mix, random_blocks
from tools.random_configs import INTERLEAVED, add_gguf_metadata, gguf_architecture, huggingface_config
from tools.random_hybrids import KERNELS, as_gguf, as_huggingface, gguf_name, huggingface_name
from tools.random_shapes import POST_NORM
from tools.random_shapes import SHAPES as SHAPES
from tools.random_shapes import Shape as Shape
from tools.random_shapes import tensor_shapes as tensor_shapes

Array = npt.NDArray[np.generic]

FLOATS = ("F32", "F16", "BF16")
ENCODINGS = (*FLOATS, *BLOCKS)
MIXES = ("Q4_K_M", "Q5_K_M")
"""Mixes: files whose tensors have several encodings, as llama.cpp's quantiser writes them."""


SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2 of every random vocabulary; the last one ends a message."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who its now find long down day did get come made may part"
)

# Names of one layer: Hugging Face's name, and GGUF's.
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_POST_NORM_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def random_tensor(name: str, size: tuple[int, ...], encoding: str, seed: int) -> Array:
    """Stored bytes or numbers of one tensor, with zero mean and variance 1 / fan-in.

    Vectors are float32: norms around one, biases around zero, and logarithms of decay rates around -3, so that
    states remember some dozens of tokens.

    The result is an F32 or F16 array, BF16 as uint16, or blocks as uint8 ``[rows, row bytes]``, which are drawn
        directly because quantising is slow.
    """
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(".A_log"):
        return rng.standard_normal(size, np.float32) - np.float32(3)
    if len(size) == 1:
        drawn = 1 + 0.1 * rng.standard_normal(size, np.float32)
        return drawn - np.float32(1) if name.endswith(".bias") else drawn
    deviation = size[-1] ** -0.5
    if encoding in FLOATS:
        return as_float(rng.standard_normal(size, np.float32) * np.float32(deviation), encoding)
    return random_blocks(rng, size, encoding, deviation)


def as_float(values: npt.NDArray[np.float32], encoding: str) -> Array:
    """Round float32 to F32, F16 or BF16 (as uint16, to nearest even)."""
    if encoding != "BF16":
        return values.astype({"F32": "<f4", "F16": "<f2"}[encoding])
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def as_stored(shape: Shape, name: str, tensor: Array) -> Array:
    """Tensor as stored in a Hugging Face file: Gemma's norms are stored minus one."""
    if shape.architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor.astype(np.float32) - np.float32(1)
    return as_huggingface(shape, name, tensor)


def interleaved_rows(rows: Array, num_heads: int) -> Array:
    """Rows of a rotate-half projection in the order in which llama.cpp's converter writes them."""
    half = len(rows) // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Byte-level BPE vocabulary: special tokens, the 256 bytes, then merges of common words and letter pairs."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    tokens, merges = [*SPECIAL_TOKENS, *alphabet], []
    seen = set(tokens)
    words = (f"\u0120{word}"[: end + 1] for word in _WORDS.split() for end in range(1, len(word) + 1))
    pairs = (a + b for a, b in itertools.product(alphabet[:160], repeat=2))
    for token in itertools.chain(words, pairs):
        if len(tokens) >= size:
            break
        if token not in seen:
            seen.add(token)
            tokens.append(token)
            merges.append(f"{token[:-1]} {token[-1]}")
    tokens += [f"<unused{index}>" for index in range(len(tokens), size)]
    return tokens[:size], merges


def file_type(encoding: str) -> int:
    """GGUF's number of an encoding or mix; some programs do not load files without it."""
    import gguf

    names = (f"ALL_{encoding}", f"MOSTLY_{encoding}", f"MOSTLY_{encoding}_M", "GUESSED")
    return int(next(gguf.LlamaFileType[name] for name in names if name in gguf.LlamaFileType.__members__))


def write_gguf(
    path: Path | str,
    shape: Shape | str,
    encoding: str = "Q8_0",
    *,
    seed: int = 0,
    extra: Callable[[Any], None] = lambda writer: None,
) -> Path:
    """Write a GGUF file in one encoding or mix; in the block encodings the embedding and the head are Q8_0.

    Args:
        extra: function that adds further metadata to a `gguf.GGUFWriter`.
    """
    import gguf

    shape = SHAPES[shape] if isinstance(shape, str) else shape
    writer = gguf.GGUFWriter(path, gguf_architecture(shape))
    add_gguf_metadata(writer, shape)
    writer.add_file_type(file_type(encoding))
    _add_vocabulary(writer, shape.vocab_size)
    extra(writer)
    for name, size in tensor_shapes(shape).items():
        stored = stored_encoding(shape, name, size, encoding)
        data = random_tensor(name, size, stored, seed)
        if shape.architecture in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            data = interleaved_rows(data, shape.num_heads if "q_proj" in name else shape.num_kv_heads)
        data = as_gguf(shape, name, data)
        raw_type = None if stored in ("F32", "F16") else gguf.GGMLQuantizationType[stored]
        data = data.view(np.uint8) if stored == "BF16" else data
        writer.add_tensor(gguf_tensor_name(name, shape), np.ascontiguousarray(data), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def stored_encoding(shape: Shape, name: str, size: tuple[int, ...], encoding: str) -> str:
    """Encoding of one tensor in a file of an encoding or mix."""
    if len(size) == 1 or name.endswith(KERNELS):
        return "F32"
    if encoding in MIXES:
        return encoding_in_mix(encoding, name, size, shape.num_layers, shape.tied_embeddings)
    whole = name.startswith(("model.embed_tokens", "lm_head")) and encoding not in FLOATS
    return "Q8_0" if whole else encoding


def write_huggingface(
    directory: Path | str, shape: Shape | str, encoding: str = "BF16", *, seed: int = 0, num_shards: int = 1
) -> Path:
    """Write config.json, safetensors (with an index if sharded), tokenizer.json and its configuration."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sizes = tensor_shapes(shape)
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    names = ["model.safetensors"] if num_shards == 1 else names
    files = {name: names[index * num_shards // len(sizes)] for index, name in enumerate(sizes)}
    for file in names:
        tensors = (
            (huggingface_name(shape, name), as_stored(shape, name, random_tensor(name, sizes[name], encoding, seed)))
            for name in sizes
            if files[name] == file
        )
        rounded = {
            name: as_float(tensor.astype(np.float32), encoding) if tensor.dtype == np.float32 else tensor
            for name, tensor in tensors
        }
        write_safetensors(directory / file, rounded)
    if num_shards > 1:
        index = {"metadata": {}, "weight_map": {huggingface_name(shape, name): file for name, file in files.items()}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in _huggingface_json(shape, encoding).items():
        (directory / name).write_text(json.dumps(content, indent=1))
    _write_tokenizer(directory / "tokenizer.json", shape.vocab_size)
    return directory


def write_safetensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a length, a JSON header and the data. The library's numpy interface does not support bfloat16 (uint16
    here)."""
    dtypes = {np.dtype("<f4"): "F32", np.dtype("<f2"): "F16", np.dtype("<u2"): "BF16"}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data)


def gguf_tensor_name(name: str, shape: Shape) -> str:
    """Name of a tensor in GGUF files, by its Hugging Face name."""
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    hybrid = gguf_name(shape, name)
    if hybrid is not None:
        return hybrid
    if name.startswith("model.layers."):
        index, rest = name.removeprefix("model.layers.").split(".", 1)
        module, _, kind = rest.rpartition(".")
        names = _LAYER_NAMES | (_POST_NORM_NAMES if shape.architecture in ("gemma3", *POST_NORM) else {})
        return f"blk.{index}.{names[module]}.{kind}"
    return whole.get(name, "output.weight")


def _add_vocabulary(writer, size: int) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001  # an untyped library's
    tokens, merges = vocabulary(size)
    control, normal, unused = 3, 1, 5
    kinds = [control] * len(SPECIAL_TOKENS) + [normal] * (size - len(SPECIAL_TOKENS))
    kinds = [unused if token.startswith("<unused") else kind for token, kind in zip(tokens, kinds, strict=True)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _huggingface_json(shape: Shape, encoding: str) -> dict[str, object]:
    return {
        "config.json": huggingface_config(shape, encoding),
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.6},
        "tokenizer_config.json": {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE},
    }


def _write_tokenizer(path: Path, size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, merges = vocabulary(size)
    pairs = [(merge.split(" ")[0], merge.split(" ")[1]) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model with random weights.")
    parser.add_argument("format", choices=("gguf", "huggingface"))
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("encoding", choices=(*ENCODINGS, *MIXES))
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.format == "gguf":
        write_gguf(args.path, args.shape, args.encoding, seed=args.seed)
    elif args.encoding in FLOATS:
        write_huggingface(args.path, args.shape, args.encoding, seed=args.seed)
    else:
        parser.error(f"safetensors files support only {', '.join(FLOATS)}")


if __name__ == "__main__":
    main()
