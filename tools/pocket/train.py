"""Train the embedded model from scratch on the CPU: vocabulary, conversations, optimisation, checkpoint.

    PYTHONPATH=src python -m tools.pocket.train --data DIR --out build/pocket [--tokens 8]

Samples are drawn afresh all the time, so there are no epochs; the learning rate falls linearly to zero over the given
millions of tokens. The same seed gives the same samples in the same order.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.pocket import INTENTS, PERSONAS
from tools.pocket.conversations import Writer
from tools.pocket.grammar import read_grammar
from tools.pocket.model import Pocket, Shape
from tools.pocket.public import read_public
from tools.pocket.vocabulary import Renderer, load_tokenizer, train_tokenizer

HERE = Path(__file__).parent
BATCH_TOKENS, POOL, MAX_TOKENS, ROUND_TO = 4096, 3072, 1024, 16
DROPOUT_SHARE, DROPOUT = 0.2, 0.1
WARMUP_STEPS = 60


def texts(writer: Writer, count: int) -> Iterator[str]:
    """Text for the vocabulary: conversations, and the intents often enough to become one token each."""
    for _ in range(count):
        yield from (part.text for part in writer.conversation() if part.role != "system")
    yield from [*INTENTS, *PERSONAS.values()] * (count // 50)


def batches(writer: Writer, renderer: Renderer, rng: Random) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids, weights) of [rows, tokens], rows of similar length, padded on the right with weight zero."""
    while True:
        pool = []
        for _ in range(POOL):
            renderer.tokenizer.model.dropout = DROPOUT if rng.random() < DROPOUT_SHARE else None
            ids, weights = renderer.render(writer.conversation())
            if len(ids) <= MAX_TOKENS:
                pool.append((ids, weights))
        pool.sort(key=lambda row: len(row[0]))
        ready, rows = [], list[tuple[list[int], list[float]]]()
        for row in pool:
            width = -(-len(row[0]) // ROUND_TO) * ROUND_TO
            if rows and width * (len(rows) + 1) > BATCH_TOKENS:
                ready.append(rows)
                rows = []
            rows.append(row)
        rng.shuffle(ready)
        for chosen in ready:
            width = -(-len(chosen[-1][0]) // ROUND_TO) * ROUND_TO
            ids = torch.zeros(len(chosen), width, dtype=torch.long)
            weights = torch.zeros(len(chosen), width)
            for at, (row_ids, row_weights) in enumerate(chosen):
                ids[at, : len(row_ids)] = torch.tensor(row_ids)
                weights[at, : len(row_weights)] = torch.tensor(row_weights)
            yield ids, weights


def loss_of(model: Pocket, hidden: Callable[[Tensor], Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy of the next token, computed only where the weight is not zero."""
    chosen = weights[:, 1:] > 0
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(hidden(ids[:, :-1])[chosen])
    each = functional.cross_entropy(logits.float(), ids[:, 1:][chosen], reduction="none")
    weight = weights[:, 1:][chosen]
    return (each * weight).sum() / weight.sum()


def optimisers(model: Pocket, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embedding and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and not name.startswith("embed")]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or name.startswith("embed")]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    model: Pocket, source: Iterator[tuple[Tensor, Tensor]], budget: int, rate: float, snapshot: Path
) -> dict[str, float]:
    """Optimise until the token budget is spent, with a snapshot now and then; returns what was done."""
    tools = optimisers(model, rate)
    hidden = torch.compile(model.hidden, dynamic=True)
    started, tokens, steps, mean = time.monotonic(), 0, 0, 0.0
    while tokens < budget:
        scale = min(1.0, (steps + 1) / WARMUP_STEPS) * (1 - tokens / budget)
        for tool in tools:
            tool.param_groups[0]["lr"] = rate * scale
        ids, weights = next(source)
        loss = loss_of(model, hidden, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        tokens, steps = tokens + ids.numel(), steps + 1
        mean = loss.item() if steps == 1 else 0.95 * mean + 0.05 * loss.item()
        if steps % 200 == 0:
            torch.save(model.state_dict(), snapshot)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public messages")
    parser.add_argument("--out", type=Path, required=True, help="folder for the vocabulary and the checkpoint")
    parser.add_argument("--tokens", type=float, default=8.0, help="training tokens in millions")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--start", type=Path, help="go on from the vocabulary and the checkpoint of this folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    rng = Random(options.seed)
    shape = Shape()
    writer = Writer(read_grammar(HERE / "phrases"), read_public(options.data, "train"), False, rng)
    if options.start is None:
        train_tokenizer(texts(writer, 60_000), shape.vocab).save(str(options.out / "tokenizer.json"))
    else:
        load_tokenizer(options.start / "tokenizer.json").save(str(options.out / "tokenizer.json"))
    renderer = Renderer(load_tokenizer(options.out / "tokenizer.json"))
    model = Pocket(shape)
    if options.start is not None:
        model.load_state_dict(torch.load(options.start / "model.pt", weights_only=True))
    source, budget = batches(writer, renderer, rng), int(options.tokens * 1e6)
    done = train(model, source, budget, options.rate, options.out / "model.pt")
    torch.save(model.state_dict(), options.out / "model.pt")
    note = {"shape": asdict(shape), "seed": options.seed, **done}
    (options.out / "train.json").write_text(json.dumps(note, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
