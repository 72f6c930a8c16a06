"""Accuracy of the shipped file in the runtime that serves it, and samples of its answers.

    PYTHONPATH=src python -m tools.pocket.evaluate --data DIR [--file FILE] [--validation] [--samples]

Each case is a chat with a greedy answer that must be one of the ids, like a router's hop. Sets: paraphrases outside of
the training split (with and without history), the public messages, and the freely written ones. `--validation` reports
only the held-out texts of topics for training; their errors may be inspected at any time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from lockstep import LLM, Constraint, SamplingParams
from lockstep.pocket import DEMO_MESSAGES, GENERAL_PERSONA, INTENTS, PERSONAS, ROUTER_PERSONA, pocket_path
from tools.pocket.blind_messages import BLIND_MESSAGES
from tools.pocket.conversations import Part, Turn, Writer
from tools.pocket.free_messages import FREE_MESSAGES
from tools.pocket.grammar import read_grammar
from tools.pocket.public import read_public

Case = tuple[list[Part], str]
ROUTED = SamplingParams(temperature=0, constraint=Constraint.choice(INTENTS))


def route(history: list[Turn], message: str, persona: str = ROUTER_PERSONA) -> list[Part]:
    """The router's prompt for the last message of a conversation, persona last."""
    parts = [
        part for turn in history for part in (Part("user", turn.request, 0.0), Part("assistant", turn.answer, 0.0))
    ]
    return [*parts, Part("user", message, 0.0), Part("system", persona, 0.0)]


def chat(parts: list[Part]) -> list[dict[str, str]]:
    """Conversation in the runtime's form."""
    return [{"role": part.role, "content": part.text} for part in parts]


def classify(llm: LLM, cases: list[Case]) -> list[str]:
    """Id that the router's hop answers, for each case."""
    return [output.text for output in llm.chat([chat(parts) for parts, _ in cases], ROUTED)]


def report(name: str, llm: LLM, cases: list[Case], show: bool = False) -> float:
    """Print accuracy and confusion matrix (rows: true intent, columns: answered) of one set."""
    answered = classify(llm, cases)
    matrix = [[0] * len(INTENTS) for _ in INTENTS]
    for (parts, intent), answer in zip(cases, answered, strict=True):
        matrix[INTENTS.index(intent)][INTENTS.index(answer)] += 1
        if show and answer != intent:
            print(f"   {intent} -> {answer}: {parts[-2].text}")
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


def print_samples(llm: LLM) -> None:
    """Answers to one free message in five, by the specialist of its intent."""
    for intent, messages in FREE_MESSAGES.items():
        persona = PERSONAS.get(intent, GENERAL_PERSONA)
        for message in messages[::5]:
            print(f"[{intent}] {message}")
            for temperature in (0.0, 0.7):
                parts = [Part("user", message, 0.0), Part("system", persona, 0.0)]
                [output] = llm.chat(chat(parts), SamplingParams(temperature=temperature, seed=1, max_tokens=120))
                print(f"   T={temperature}: {output.text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the public messages")
    parser.add_argument("--file", type=Path, default=pocket_path())
    parser.add_argument("--validation", action="store_true", help="only held-out texts of topics for training")
    parser.add_argument("--samples", action="store_true", help="also print answers")
    options = parser.parse_args()
    grammar = read_grammar(Path(__file__).parent / "phrases")
    with LLM(str(options.file)) as llm:
        if options.validation:
            writer = Writer(grammar, [], True, Random(7), train_only=True)
            report("validation paraphrases", llm, generated(writer, 2000, False), True)
        else:
            report_all(llm, Writer(grammar, [], True, Random(7)), options.data)
        if options.samples:
            print_samples(llm)


def report_all(llm: LLM, writer: Writer, data: Path) -> None:
    """Report every set of the model card."""
    report("held-out paraphrases", llm, generated(writer, 2000, False))
    report("held-out paraphrases with history", llm, generated(writer, 1000, True))
    public = read_public(data, "test")
    for source in ("banking77", "clinc150"):
        report(f"{source} test", llm, [(route([], m.text), m.intent) for m in public if m.source == source])
    for name, listed in (("free", FREE_MESSAGES), ("blind", BLIND_MESSAGES)):
        cases = [(route([], text), intent) for intent, messages in listed.items() for text in messages]
        report(f"{name} messages", llm, cases, name == "free")
    report("demo messages", llm, [(route([], text), intent) for text, intent in DEMO_MESSAGES.items()], True)


if __name__ == "__main__":
    main()
