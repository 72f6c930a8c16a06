"""Training of the embedded model on the CPU, from scratch or from a file: vocabulary, conversations, steps, checkpoint.

    PYTHONPATH=src python -m tools.pocket.train --data DIR --out build/pocket [--tokens 8] [--start FILE]

Samples are always drawn anew, so there are no epochs. The learning rate falls linearly to zero over the given millions
of tokens and does not depend on the clock, so the same seed gives the same conversations at the same rates. Runs differ
in BPE dropout, which the tokenizer library draws without a seed. A linear probe predicts the intent at the end of every
request, so that answers and histories train the routing too; it is discarded.
`--start` continues from the weights and the vocabulary of a GGUF file from an earlier run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.pocket import INTENTS, PERSONAS
from tools.pocket.conversations import USER_WEIGHT, Part, Writer
from tools.pocket.export import read_back, read_tokenizer
from tools.pocket.grammar import read_grammar
from tools.pocket.model import Pocket, Shape
from tools.pocket.public import read_public
from tools.pocket.vocabulary import Renderer, load_tokenizer, train_tokenizer

HERE = Path(__file__).parent
BATCH_TOKENS, POOL, MAX_TOKENS, ROUND_TO = 4096, 3072, 1024, 8
DROPOUT_SHARE, DROPOUT = 0.2, 0.1
WARMUP_STEPS = 60
PROBE_WEIGHT, NOISE = 0.5, 0.04
HIDDEN_SHARE = 0.1  # share of a request's ids with a zero embedding, so that the other words decide

Row = tuple[list[int], list[float], list[int]]
Batch = tuple[Tensor, Tensor, Tensor]


def texts(writer: Writer, count: int) -> Iterator[str]:
    """Text for the vocabulary: conversations, and the intents often enough to become one token each."""
    for _ in range(count):
        yield from (part.text for part in writer.conversation() if part.role != "system")
    yield from [*INTENTS, *PERSONAS.values()] * (count // 50)


def batches(
    draw: Callable[[], list[Part]], renderer: Renderer, rng: Random, most_tokens: int = BATCH_TOKENS
) -> Iterator[Batch]:
    """Endless (ids, weights, intents) of [rows, tokens] of drawn conversations, rows of similar length, padded on the
    right, and of at most `most_tokens`."""
    while True:
        pool = []
        for _ in range(POOL):
            renderer.tokenizer.model.dropout = DROPOUT if rng.random() < DROPOUT_SHARE else None
            row = renderer.render(draw())
            if len(row[0]) <= MAX_TOKENS:
                pool.append(row)
        pool.sort(key=lambda row: len(row[0]))
        ready, rows = [], list[Row]()
        for row in pool:
            width = -(-len(row[0]) // ROUND_TO) * ROUND_TO
            if rows and width * (len(rows) + 1) > most_tokens:
                ready.append(rows)
                rows = []
            rows.append(row)
        rng.shuffle(ready)
        for chosen in ready:
            width = -(-len(chosen[-1][0]) // ROUND_TO) * ROUND_TO
            ids = torch.zeros(len(chosen), width, dtype=torch.long)
            weights = torch.zeros(len(chosen), width)
            intents = torch.full((len(chosen), width), -1)
            for at, (row_ids, row_weights, row_intents) in enumerate(chosen):
                ids[at, : len(row_ids)] = torch.tensor(row_ids)
                weights[at, : len(row_weights)] = torch.tensor(row_weights)
                intents[at, : len(row_intents)] = torch.tensor(row_intents)
            yield ids, weights, intents


def loss_of(model: Pocket, probe: torch.nn.Linear, hidden: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Tensor:
    """Weighted mean cross-entropy of the next token where the weight is not zero, and the probe's of the intents."""
    ids, weights, intents = batch
    chosen, ends = weights[:, 1:] > 0, intents[:, :-1] >= 0
    shown = (weights[:, :-1] != USER_WEIGHT) | (torch.rand(weights[:, :-1].shape) >= HIDDEN_SHARE)
    states = hidden(ids[:, :-1], shown)
    logits, guesses = model.logits(states[chosen]), probe(states[ends])
    each = functional.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    weight = weights[:, 1:][chosen]
    probed = functional.cross_entropy(guesses.float(), intents[:, :-1][ends])
    return (each * weight).sum() / weight.sum() + PROBE_WEIGHT * probed


def optimisers(model: Pocket, probe: torch.nn.Linear, rate: float, bf16: bool) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms; without bf16 units, AdamW for all."""
    layered = {name for name, p in model.named_parameters() if bf16 and p.ndim == 2 and not name.startswith("embed")}
    matrices = [p for name, p in model.named_parameters() if name in layered]
    others = [p for name, p in model.named_parameters() if name not in layered] + list(probe.parameters())
    adam = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0 if bf16 else 0.02)
    if not matrices:
        return [adam]
    return [torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), adam]


def train(
    tools: list[torch.optim.Optimizer],
    loss_of_batch: Callable[[Batch], Tensor],
    source: Iterator[Batch],
    budget: int,
    rate: float,
    bf16: bool,
    save: Callable[[], None],
    warmup_steps: int = WARMUP_STEPS,
) -> dict[str, float]:
    """Train until the tokens are used up, with occasional calls of `save`; returns the steps and tokens."""
    parameters = [p for tool in tools for group in tool.param_groups for p in group["params"]]
    started, tokens, steps, mean = time.monotonic(), 0, 0, 0.0
    while tokens < budget:
        scale = min(1.0, (steps + 1) / warmup_steps) * (1 - tokens / budget)
        for tool in tools:
            tool.param_groups[0]["lr"] = rate * scale
        batch = next(source)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of_batch(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        tokens, steps = tokens + batch[0].numel(), steps + 1
        mean = loss.item() if steps == 1 else 0.95 * mean + 0.05 * loss.item()
        if steps % 200 == 0:
            save()
        if steps % 50 == 0:
            gone = time.monotonic() - started
            print(
                f"step {steps} loss {mean:.3f} tokens {tokens / 1e6:.2f}M "
                f"{tokens / gone:.0f} tok/s {gone / 60:.1f} min",
                flush=True,
            )
    return {
        "minutes": round((time.monotonic() - started) / 60, 1),
        "steps": steps,
        "tokens": tokens,
        "loss": round(mean, 3),
    }


def save_model(model: Pocket, folder: Path) -> None:
    """Write the checkpoint."""
    torch.save(model.state_dict(), folder / "model.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public messages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the vocabulary and the checkpoint")
    parser.add_argument("--tokens", type=float, default=8.0, help="training tokens in millions")
    parser.add_argument("--start", type=Path, help="GGUF file with the initial weights and vocabulary")
    parser.add_argument("--f32", action="store_true", help="for processors without bf16 units: float32 and AdamW only")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    rng = Random(options.seed)
    shape = Shape()
    grammar = read_grammar(HERE / "phrases")
    grammar.noise = NOISE
    writer = Writer(grammar, read_public(options.data, "train"), False, rng)
    tokenizer = read_tokenizer(options.start) if options.start else train_tokenizer(texts(writer, 60_000), shape.vocab)
    tokenizer.save(str(options.out / "tokenizer.json"))
    renderer = Renderer(load_tokenizer(options.out / "tokenizer.json"))
    model = read_back(options.start, shape) if options.start else Pocket(shape)
    source, budget, bf16 = batches(writer.conversation, renderer, rng), int(options.tokens * 1e6), not options.f32
    probe = torch.nn.Linear(shape.hidden, len(INTENTS))
    hidden = torch.compile(model.hidden, dynamic=True) if bf16 else model.hidden
    tools = optimisers(model, probe, options.rate, bf16)
    loss, save = partial(loss_of, model, probe, hidden), partial(save_model, model, options.out)
    done = train(tools, loss, source, budget, options.rate, bf16, save)
    save()
    note = {"shape": asdict(shape), "seed": options.seed, **done}
    (options.out / "train.json").write_text(json.dumps(note, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
