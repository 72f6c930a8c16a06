"""Routing by nearest examples against the trained router of the demo: accuracy, and time per message.

    python -m benchmarks.nearest [--data DIR] [--examples 8 64 256 1024] [--count 1000] [--rounds 200] [--json]

The trained router is the demo's: pocket, with its persona and an answer constrained to the four intents. Nearest
routing uses the hidden states of the same model as vectors (``task: embed``), with mean or last pooling. Its examples
are training messages, equally many of each intent. It is measured in two forms. With ``none`` as a target, messages for
no specialist have examples of their own. With ``min_score``, only the specialists have examples, and the fallback
answers below a smallest cosine, which is the best one on other training messages.

No message of a test set is in the training data: paraphrases with held-out templates and values, two hundred messages
that were written for this purpose alone, and with ``--data`` (see tools/pocket/README.md) the test messages of two
public sets. The time is that of one message after another, at batch size 1 and with one thread: the median over
``--rounds`` messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep import LLM, EngineOptions, LoadOptions
from lockstep.artifacts.task import Pooling
from lockstep.cluster.nearest import NearestRule, decide
from lockstep.executors.options import ExecutorOptions
from lockstep.pocket import INTENTS
from lockstep.shown import aligned
from tools.pocket import evaluate
from tools.pocket.blind_messages import BLIND_MESSAGES
from tools.pocket.conversations import Writer
from tools.pocket.grammar import read_grammar
from tools.pocket.public import read_public

Floats = npt.NDArray[np.float32]
Labelled = list[tuple[str, str]]
"""Messages with their intents."""
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
PHRASES = Path(evaluate.__file__).parent / "phrases"
SEED = 7
TURN, NOT_COUNTED = 50, 10
NONE = "none"
"""Intent of messages for no specialist."""


def drawn(writer: Writer, count: int) -> Labelled:
    """Different messages of a writer, of each intent in turn."""
    found: dict[str, str] = {}
    while len(found) < count:
        intent = INTENTS[len(found) % len(INTENTS)]
        found.setdefault(writer.turns(intent)[-1].request, intent)
    return list(found.items())


def training_messages(count: int, data: Path | None) -> Labelled:
    """Messages like those of the training: from its templates and values, and its public messages if they are there."""
    public = [] if data is None else read_public(data, "train")
    return drawn(Writer(read_grammar(PHRASES), public, False, Random(SEED)), count)


def test_sets(count: int, data: Path | None) -> dict[str, Labelled]:
    """Messages outside of the training data, by the name of their set."""
    sets = {"held-out paraphrases": drawn(Writer(read_grammar(PHRASES), [], True, Random(SEED)), count)}
    sets["blind messages"] = [(text, intent) for intent, texts in BLIND_MESSAGES.items() for text in texts]
    if data is not None:
        public = read_public(data, "test")
        for source in ("banking77", "clinc150"):
            listed = [(each.text, each.intent) for each in public if each.source == source]
            sets[f"{source} test"] = Random(SEED).sample(listed, min(count, len(listed)))
    return sets


def accuracy(answered: Sequence[str], messages: Labelled) -> float:
    """Share of messages that were answered with their intent."""
    return sum(each == intent for each, (_, intent) in zip(answered, messages, strict=True)) / len(messages)


def best_scores(examples: Floats, intents: Sequence[str], vectors: Floats) -> Floats:
    """Best cosine of each intent's examples: [vectors, intents]; -2 for an intent without examples."""
    cosines = vectors @ examples.T
    of_intent = [np.array([each == intent for each in intents]) for intent in INTENTS]
    columns = [
        cosines[:, chosen].max(axis=1) if chosen.any() else np.full(len(vectors), -2, np.float32)
        for chosen in of_intent
    ]
    return np.stack(columns, axis=1)


def with_own_examples(scores: Floats) -> list[str]:
    """Intents of the best scores."""
    return [INTENTS[at] for at in scores.argmax(axis=1)]


def with_min_score(scores: Floats, min_score: float) -> list[str]:
    """Specialists of the best scores; none where the best one is below the smallest."""
    specialists = scores[:, : INTENTS.index(NONE)]
    best = zip(specialists.argmax(axis=1), specialists.max(axis=1), strict=True)
    return [INTENTS[at] if score >= min_score else NONE for at, score in best]


def best_min_score(scores: Floats, messages: Labelled) -> float:
    """Smallest cosine with which most of the messages are answered with their intent."""
    candidates: list[float] = np.quantile(scores[:, : INTENTS.index(NONE)].max(axis=1), np.linspace(0, 1, 101)).tolist()
    return max(candidates, key=lambda each: accuracy(with_min_score(scores, each), messages))


def nearest_figures(
    llm: LLM, pooling: Pooling, sizes: Sequence[int], sets: dict[str, Labelled], training: Labelled
) -> list[dict[str, Any]]:
    """Accuracy of nearest routing by number of examples, on each set."""

    def vectors_of(messages: Labelled) -> Floats:
        return llm.embed([text for text, _ in messages], pooling=pooling)

    stored = vectors_of(training)
    vectors = {name: vectors_of(messages) for name, messages in sets.items()}
    rows = []
    for size in sizes:
        examples, intents = stored[:size], [intent for _, intent in training[:size]]
        others, labels = stored[max(sizes) :], training[max(sizes) :]
        min_score = best_min_score(best_scores(examples, intents, others), labels)
        row: dict[str, Any] = {"pooling": pooling, "examples": size, "min_score": min_score}
        for name, messages in sets.items():
            scores = best_scores(examples, intents, vectors[name])
            row[name] = {
                "own_examples": accuracy(with_own_examples(scores), messages),
                "min_score": accuracy(with_min_score(scores, min_score), messages),
            }
        rows.append(row)
    return rows


def median_us(calls: Mapping[str, Callable[[str], object]], texts: Sequence[str]) -> dict[str, float]:
    """Median time of each call in microseconds over the texts. The calls take turns of `TURN` texts, so that load meets
    all of them. The first texts of a turn are not counted: threads of the call before it still wait for work then."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(0, len(texts), TURN):
        for name, call in calls.items():
            turn = []
            for text in texts[at : at + TURN]:
                started_s = time.perf_counter()
                call(text)
                turn.append(time.perf_counter() - started_s)
            times[name] += turn[NOT_COUNTED:]
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def times_of(
    router: LLM, embedder: LLM, sizes: Sequence[int], training: Labelled, texts: Sequence[str]
) -> dict[str, float]:
    """Microseconds per message: the router's hop, the vector of a message, and the comparison with the examples."""
    examples = list(embedder.embed([text for text, _ in training[: max(sizes)]]))
    [message] = embedder.embed(texts[0])

    def comparison(size: int) -> Callable[[str], object]:
        by_intent = {intent: tuple(text for text, each in training[:size] if each == intent) for intent in INTENTS}
        rule = NearestRule("specialists", by_intent)
        return lambda _: decide(rule, examples[:size], message)

    calls: dict[str, Callable[[str], object]] = {
        "router": lambda text: evaluate.classify(router, [(evaluate.route([], text), "")]),
        "vector": embedder.embed,
        **{f"comparison with {size} examples": comparison(size) for size in sizes},
    }
    return median_us(calls, texts)


def measure(sizes: Sequence[int], count: int, rounds: int, data: Path | None) -> dict[str, Any]:
    """All figures: accuracy of the trained router by set, of nearest routing by pooling and examples, and times."""
    training, sets = training_messages(max(sizes) + count, data), test_sets(count, data)
    engine, executor = EngineOptions(max_num_seqs=16), ExecutorOptions(threads=1)
    with (
        LLM("pocket://", LoadOptions(engine, executor)) as router,
        LLM("pocket://", LoadOptions(engine, executor, task="embed")) as embedder,
    ):
        trained = {}
        for name, messages in sets.items():
            answers = evaluate.classify(router, [(evaluate.route([], text), intent) for text, intent in messages])
            trained[name] = accuracy(answers, messages)
        nearest = [row for pooling in POOLINGS for row in nearest_figures(embedder, pooling, sizes, sets, training)]
        texts = [text for text, _ in next(iter(sets.values()))[:rounds]]
        times = times_of(router, embedder, sizes, training, texts)
    counts = {name: len(messages) for name, messages in sets.items()}
    return {"messages": counts, "trained": trained, "nearest": nearest, "times": times}


def text_of(result: dict[str, Any]) -> str:
    """The figures as a table for people."""
    names = list(result["messages"])
    rows = [("", *(f"{name} ({result['messages'][name]})" for name in names))]
    rows.append(("trained router", *(f"{result['trained'][name]:.1%}" for name in names)))
    for row in result["nearest"]:
        for key, words in (
            ("own_examples", "own examples of none"),
            ("min_score", f"min_score {row['min_score']:.2f}"),
        ):
            head = f"nearest of {row['examples']}, {row['pooling']}, {words}"
            rows.append((head, *(f"{row[name][key]:.1%}" for name in names)))
    times = ", ".join(f"{name} {us:.0f}" for name, us in result["times"].items())
    return f"{aligned(rows)}\nmicroseconds per message: {times}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the public messages")
    parser.add_argument("--examples", type=int, nargs="+", default=[8, 64, 256, 1024], help="examples of all intents")
    parser.add_argument("--count", type=int, default=1000, help="messages of a test set at most")
    parser.add_argument("--rounds", type=int, default=200, help="messages whose time is measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result = measure(options.examples, options.count, options.rounds, options.data)
    print(json.dumps(result) if options.json else text_of(result))


if __name__ == "__main__":
    main()
