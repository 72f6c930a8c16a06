"""Accuracy of the shipped file, scored by the ids' log-probabilities, and samples of its answers.

    PYTHONPATH=src python -m tools.pocket.evaluate --data DIR --run build/pocket [--samples]

The weights are read from the GGUF file and dequantised, so the figures are of what ships. Sets: paraphrases that the
training split never saw (alone and with history), the public messages, and the freely written ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from lockstep.pocket import DEMO_MESSAGES, GENERAL_PERSONA, INTENTS, PERSONAS, ROUTER_PERSONA, pocket_path
from tools.pocket.conversations import Part, Turn, Writer
from tools.pocket.export import read_back
from tools.pocket.free_messages import FREE_MESSAGES
from tools.pocket.grammar import read_grammar
from tools.pocket.model import Pocket, Shape
from tools.pocket.public import read_public
from tools.pocket.vocabulary import Renderer, load_tokenizer

Case = tuple[list[Part], str]
ROWS = 64


def route(history: list[Turn], message: str, persona: str = ROUTER_PERSONA) -> list[Part]:
    """The router's prompt for the last message of a conversation, persona last."""
    parts = [
        part for turn in history for part in (Part("user", turn.request, 0.0), Part("assistant", turn.answer, 0.0))
    ]
    return [*parts, Part("user", message, 0.0), Part("system", persona, 0.0)]


def classify(model: Pocket, renderer: Renderer, cases: list[Case]) -> Tensor:
    """Log-probabilities [cases, intents] of each id; an id is one token, so this is its full score."""
    prompts = [renderer.prompt(parts) for parts, _ in cases]
    order = sorted(range(len(cases)), key=lambda at: len(prompts[at]))
    scores = torch.zeros(len(cases), len(INTENTS))
    for start in range(0, len(order), ROWS):
        chosen = order[start : start + ROWS]
        lengths = torch.tensor([len(prompts[at]) for at in chosen])
        ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)
        for row, at in enumerate(chosen):
            ids[row, : len(prompts[at])] = torch.tensor(prompts[at])
        states = model.hidden(ids)[torch.arange(len(chosen)), lengths - 1]
        scores[chosen] = model.logits(states).float().log_softmax(-1)[:, renderer.labels]
    return scores


def report(name: str, model: Pocket, renderer: Renderer, cases: list[Case], show: bool = False) -> float:
    """Print accuracy and confusion matrix (rows: true intent, columns: answered) of one set."""
    answered = classify(model, renderer, cases).argmax(-1).tolist()
    matrix = [[0] * len(INTENTS) for _ in INTENTS]
    for (parts, intent), answer in zip(cases, answered, strict=True):
        matrix[INTENTS.index(intent)][answer] += 1
        if show and INTENTS[answer] != intent:
            print(f"   {intent} -> {INTENTS[answer]}: {parts[-2].text}")
    accuracy = sum(matrix[at][at] for at in range(len(INTENTS))) / len(cases)
    print(f"{name}: {accuracy:.2%} of {len(cases)}")
    for intent, row in zip(INTENTS, matrix, strict=True):
        if sum(row):
            print(
                f"   {intent:<10}"
                + "".join(f"{count:>7}" for count in row)
                + f"{row[INTENTS.index(intent)] / sum(row):>9.1%}"
            )
    return accuracy


def generated(writer: Writer, count: int, with_history: bool) -> list[Case]:
    """Balanced cases on held-out templates and slot values; with history also second turns."""
    cases: list[Case] = []
    while len(cases) < count:
        intent = INTENTS[len(cases) % len(INTENTS)]
        turns = writer.turns(intent, with_history and writer.rng.random() < 0.5)
        history = writer.turns(writer.rng.choice(INTENTS)) if with_history and len(turns) == 1 else []
        turns = history + turns
        cases.append((route(turns[:-1], turns[-1].request), intent))
    return cases


def generate(model: Pocket, renderer: Renderer, parts: list[Part], temperature: float, seed: int = 1) -> str:
    """At most 120 tokens of an answer, greedy at temperature 0."""
    ids, coin = renderer.prompt(parts), torch.Generator().manual_seed(seed)
    start = len(ids)
    while len(ids) < start + 120:
        logits = model(torch.tensor([ids]))[0, -1].float()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=coin))
        if token == renderer.ids["<|end|>"]:
            break
        ids.append(token)
    return str(renderer.tokenizer.decode(ids[start:]))


def print_samples(model: Pocket, renderer: Renderer) -> None:
    """Answers to one free message in five, by the specialist of its intent."""
    for intent, messages in FREE_MESSAGES.items():
        persona = PERSONAS.get(intent, GENERAL_PERSONA)
        for message in messages[::5]:
            print(f"[{intent}] {message}")
            for temperature in (0.0, 0.7):
                parts = [Part("user", message, 0.0), Part("system", persona, 0.0)]
                print(f"   T={temperature}: {generate(model, renderer, parts, temperature)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public messages")
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--file", type=Path, default=pocket_path())
    parser.add_argument("--samples", action="store_true", help="print answers too")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    shape = Shape(**json.loads((options.run / "train.json").read_text(encoding="utf-8"))["shape"])
    model = read_back(options.file, shape)
    renderer = Renderer(load_tokenizer(options.run / "tokenizer.json"))
    writer = Writer(read_grammar(Path(__file__).parent / "phrases"), [], True, Random(7))
    report("held-out paraphrases", model, renderer, generated(writer, 2000, False))
    report("held-out paraphrases with history", model, renderer, generated(writer, 1000, True))
    public = read_public(options.data, "test")
    for source in ("banking77", "clinc150"):
        cases = [(route([], m.text), m.intent) for m in public if m.source == source]
        report(f"{source} test", model, renderer, cases)
    free = [(route([], text), intent) for intent, messages in FREE_MESSAGES.items() for text in messages]
    report("free messages", model, renderer, free, True)
    report(
        "demo messages", model, renderer, [(route([], text), intent) for text, intent in DEMO_MESSAGES.items()], True
    )
    if options.samples:
        print_samples(model, renderer)


if __name__ == "__main__":
    main()
