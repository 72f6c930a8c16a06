"""Export of a trained checkpoint to one GGUF file for llama.cpp and Lockstep, and the reader of such a file.

    PYTHONPATH=src python -m tools.pocket.export --run build/pocket [--blend SHARE --start FILE] [--to FILE]

Matrices are Q8_0, norms F32. As in llama.cpp's converter for this architecture, the rows of q and k are permuted from
halves to interleaved pairs. The head is tied: there is no `output.weight`. `--blend` mixes the weights of a continued
run with those of the file that it started from; the mean retains more of that file's abilities.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

from tools.pocket.model import Pocket, Shape
from tools.pocket.vocabulary import CHAT_TEMPLATE, SPECIALS, byte_level

LAYER_NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
DESCRIPTION = "A tiny demo model that routes and answers customer-support requests. For demonstrations only."


def interleave(rows: np.ndarray, heads: int, back: bool = False) -> np.ndarray:
    """Rows of a query or key projection from rotate-half order to interleaved pairs, or back."""
    split = (heads, -1, 2) if back else (heads, 2, -1)
    return rows.reshape(*split, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """Convert a name: `layers.0.q.weight` becomes `blk.0.attn_q.weight`."""
    if name.startswith("layers."):
        _, index, part, _ = name.split(".")
        return f"blk.{index}.{LAYER_NAMES[part]}.weight"
    return {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}[name]


def heads_of(name: str, shape: Shape) -> int:
    """Number of heads of a tensor's rows; 0 if rope does not apply."""
    return {"q": shape.heads, "k": shape.kv_heads}.get(name.split(".")[-2], 0)


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_name("Lockstep Pocket")
    writer.add_description(DESCRIPTION)
    writer.add_license("apache-2.0")
    writer.add_author("The Lockstep developers")
    writer.add_version("1")
    writer.add_size_label("5M")
    writer.add_languages(["en"])
    writer.add_tags(["demo", "text-generation"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.vocab)
    writer.add_context_length(shape.max_context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.norm_eps)


def add_tokenizer(writer: gguf.GGUFWriter, path: Path) -> None:
    saved = json.loads(path.read_text(encoding="utf-8"))["model"]
    tokens = [token for token, _ in sorted(saved["vocab"].items(), key=lambda item: item[1])]
    kinds = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in saved["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|end|>"))
    writer.add_eot_token_id(tokens.index("<|end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(model: Pocket, tokenizer: Path, target: Path) -> None:
    """Write the whole file; deterministic for the same weights and vocabulary."""
    writer = gguf.GGUFWriter(target, "llama")
    add_metadata(writer, model.shape)
    add_tokenizer(writer, tokenizer)
    for name, tensor in model.state_dict().items():
        rows = tensor.float().numpy()
        if heads := heads_of(name, model.shape):
            rows = interleave(rows, heads)
        if rows.ndim == 2:
            writer.add_tensor(gguf_name(name), quantize(rows, Kind.Q8_0), raw_dtype=Kind.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_back(path: Path, shape: Shape) -> Pocket:
    """Model of a GGUF file, dequantised, and therefore as shipped."""
    model = Pocket(shape)
    stored = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    state = {}
    for name in model.state_dict():
        rows = stored[gguf_name(name)]
        if heads := heads_of(name, shape):
            rows = interleave(rows, heads, back=True)
        state[name] = torch.tensor(rows)
    model.load_state_dict(state)
    model.eval()
    return model


def read_tokenizer(path: Path) -> Tokenizer:
    """Vocabulary of a GGUF file, with its merges in order."""
    fields = gguf.GGUFReader(path).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    return byte_level({token: at for at, token in enumerate(tokens)}, [tuple(pair.split(" ")) for pair in merges])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="output folder of train.py")
    parser.add_argument(
        "--blend", type=float, default=1.0, help="share of the run's weights; the rest is from --start (default: 1)"
    )
    parser.add_argument("--start", type=Path, help="GGUF file from which the run started")
    parser.add_argument("--to", type=Path, default=Path("src/lockstep/pocket/pocket.gguf"))
    options = parser.parse_args()
    if (options.start is None) != (options.blend == 1.0):
        parser.error("--blend below 1 and --start require each other")
    shape = Shape(**json.loads((options.run / "train.json").read_text(encoding="utf-8"))["shape"])
    model = Pocket(shape)
    trained = torch.load(options.run / "model.pt", weights_only=True)
    if options.start:
        before = read_back(options.start, shape).state_dict()
        trained = {name: torch.lerp(before[name], trained[name], options.blend) for name in before}
    model.load_state_dict(trained)
    export(model, options.run / "tokenizer.json", options.to)
    worst = max(
        (a - b).abs().max().item()
        for a, b in zip(model.state_dict().values(), read_back(options.to, shape).state_dict().values(), strict=True)
    )
    print(f"{options.to}: {options.to.stat().st_size / 1e6:.2f} MB, largest rounding error {worst:.4f}")


if __name__ == "__main__":
    main()
