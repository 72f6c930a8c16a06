"""Training of a specialist as a LoRA adapter of the embedded model, whose weights are frozen.

    PYTHONPATH=src python -m tools.pocket.train_adapter billing --data DIR [--tokens 0.4] [--to FILE]

The conversations are those of pocket's own training, of one specialist only and without a system message. The loss is
that of the answer. Float32 and AdamW on every processor. The same seed gives the same conversations at the same rates,
but BPE dropout, which the tokenizer library draws without a seed, splits a fifth of them differently in each run.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from random import Random

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.pocket import ADAPTERS, SCHEME, adapter_path, pocket_path
from tools.pocket.conversations import ANSWER_WEIGHT, USER_WEIGHT, Writer
from tools.pocket.export import gguf_name, heads_of, interleave, read_back, read_tokenizer
from tools.pocket.grammar import read_grammar
from tools.pocket.model import Pocket, Shape
from tools.pocket.public import read_public
from tools.pocket.train import HERE, HIDDEN_SHARE, NOISE, Batch, batches, train
from tools.pocket.vocabulary import Renderer

RANK, ALPHA = 8, 16.0
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
BATCH_TOKENS, WARMUP_STEPS = 2048, 20
BETAS = (0.9, 0.98)


class Adapted(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A frozen linear layer and its change: y = x W^T + alpha / rank * (x A^T) B^T, which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) * base.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + ALPHA / RANK * functional.linear(functional.linear(x, self.a), self.b)
        return out


def adapt(model: Pocket) -> dict[str, Adapted]:
    """Freeze the model, and adapt all products of its layers; they are returned by the names of their weights."""
    model.requires_grad_(False)
    adapted = {}
    for index, layer in enumerate(model.layers):
        for part in PARTS:
            adapted[f"layers.{index}.{part}.weight"] = Adapted(getattr(layer, part))
            setattr(layer, part, adapted[f"layers.{index}.{part}.weight"])
    return adapted


def loss_of(model: Pocket, batch: Batch) -> Tensor:
    """Mean cross-entropy of the last answers. A share of the requests' ids is hidden, as in the model's training."""
    ids, weights, _ = batch
    shown = (weights[:, :-1] != USER_WEIGHT) | (torch.rand(weights[:, :-1].shape) >= HIDDEN_SHARE)
    chosen = weights[:, 1:] == ANSWER_WEIGHT
    loss: Tensor = functional.cross_entropy(model.logits(model.hidden(ids[:, :-1], shown)[chosen]), ids[:, 1:][chosen])
    return loss


def export(adapted: dict[str, Adapted], specialist: str, shape: Shape, target: Path) -> None:
    """Write a GGUF adapter with matrices in F16; deterministic for the same numbers."""
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_type("adapter")
    writer.add_name(f"Lockstep Pocket, {specialist}")
    writer.add_description(
        f"The {specialist} specialist as a LoRA adapter of Lockstep Pocket. For demonstrations only."
    )
    writer.add_license("apache-2.0")
    writer.add_author("The Lockstep developers")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    for name, layer in adapted.items():
        a, b = (tensor.detach().numpy() for tensor in (layer.a, layer.b))
        if heads := heads_of(name, shape):
            b = interleave(b, heads)
        for part, matrix in (("lora_a", a), ("lora_b", b)):
            writer.add_tensor(f"{gguf_name(name)}.{part}", np.ascontiguousarray(matrix, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specialist", choices=ADAPTERS)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public messages")
    parser.add_argument("--tokens", type=float, default=0.4, help="training tokens in millions")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--to", type=Path, help="GGUF file (default: that of the package)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    rng, shape = Random(options.seed), Shape()
    grammar = read_grammar(HERE / "phrases")
    grammar.noise = NOISE
    writer = Writer(grammar, read_public(options.data, "train"), False, rng)
    renderer = Renderer(read_tokenizer(pocket_path()))
    model = read_back(pocket_path(), shape)
    adapted = adapt(model)
    weights = [each for each in model.parameters() if each.requires_grad]
    tool = torch.optim.AdamW(weights, lr=options.rate, betas=BETAS, weight_decay=0.0)
    source = batches(partial(writer.answered, options.specialist), renderer, rng, BATCH_TOKENS)
    target = options.to or adapter_path(SCHEME + options.specialist)
    save = partial(export, adapted, options.specialist, shape, target)
    budget = int(options.tokens * 1e6)
    done = train([tool], partial(loss_of, model), source, budget, options.rate, False, save, WARMUP_STEPS)
    save()
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB, {done}")


if __name__ == "__main__":
    main()
