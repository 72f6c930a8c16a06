"""Cost of sampling: microseconds per sequence for each method, and per token for text.

    python -m benchmarks.sampling                    # all cases
    python -m benchmarks.sampling --vocab 49152      # one vocabulary

There are two kinds of logits, since the cost of top-p depends on them: `peaked`, with a few nats of entropy as usual
for language models (probability falls with a power of the rank), and `flat`, normal with deviation 1.5, where the
nucleus holds most of the vocabulary. Figures are the best of several runs; on a shared machine compare ratios within
one run.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from lockstep.engine.detokenizer import Detokenizer
from lockstep.engine.output_rules import StopStrings
from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.sampling import SamplerState, sample
from lockstep.executors.sampling_params import ResolvedSampling
from lockstep.executors.stub import stub_tokenizer_parts

CASES = {
    "greedy": ResolvedSampling(0.0),
    "temperature 0.8": ResolvedSampling(0.8),
    "top-k 50": ResolvedSampling(1.0, top_k=50),
    "top-p 0.9": ResolvedSampling(0.8, top_p=0.9),
    "top-k 40, top-p 0.95": ResolvedSampling(0.8, top_k=40, top_p=0.95),
    "min-p 0.05": ResolvedSampling(1.0, min_p=0.05),
    "greedy, penalties": ResolvedSampling(0.0, repetition_penalty=1.1, frequency_penalty=0.5),
    "greedy, logprobs 5": ResolvedSampling(0.0, logprobs=5),
}
SEED = 0


def peaked(num_rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(SEED)
    exponent = random.uniform(1.5, 3.0, (num_rows, 1))
    head = random.uniform(0.0, 5.0, (num_rows, 1))
    logits = 10.0 - exponent * np.log(np.arange(1, vocab_size + 1) + head)
    logits += 0.7 * random.standard_normal(logits.shape)
    return random.permuted(logits, axis=1).astype(np.float32)


def flat(num_rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    return 1.5 * np.random.default_rng(SEED).standard_normal((num_rows, vocab_size), np.float32)


def states_of(sampling: ResolvedSampling, num_rows: int, vocab_size: int) -> list[SamplerState]:
    """Sequences with 200 prompt tokens and 64 output tokens."""
    states = [SamplerState(sampling, seed, range(200), vocab_size) for seed in range(num_rows)]
    for state in states:
        for token in range(64):
            state.append(token * 11)
    return states


def microseconds(call: Callable[[], object], number: int, repeats: int) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeats)) / number * 1e6


def sampling_table(vocab_size: int, batches: Sequence[int], repeats: int) -> None:
    logits = {"peaked": peaked(max(batches), vocab_size), "flat": flat(max(batches), vocab_size)}
    columns = [(kind, batch) for kind in logits for batch in batches]
    print(f"\nvocabulary {vocab_size}: microseconds per sequence (greedy goal 15, top-k/top-p goal 60 at 49,152)")
    print("".join([" " * 24, *(f"{f'{kind} x{batch}':>13}" for kind, batch in columns)]))
    for name, sampling in CASES.items():
        figures = []
        for kind, batch in columns:
            rows, states = logits[kind][:batch], states_of(sampling, batch, vocab_size)
            number = max(1, 32 // batch)
            positions = list(range(batch))

            def call(
                rows: npt.NDArray[np.float32] = rows,
                states: list[SamplerState] = states,
                positions: list[int] = positions,
            ) -> object:
                return sample(rows, states, positions)

            figures.append(microseconds(call, number, repeats) / batch)
        print("".join([f"{name:24}", *(f"{figure:13.1f}" for figure in figures)]))


def text_table(repeats: int) -> None:
    tokenizer = Tokenizer(stub_tokenizer_parts())
    ids = tokenizer.encode("The answer is 42 €, or so they say. " * 30)
    pieces = [tokenizer.decode([token]) for token in ids]

    def detokenise() -> None:
        detokenizer = Detokenizer(tokenizer)
        for token in ids:
            detokenizer.append(token)

    def stop() -> None:
        stops = StopStrings(["</answer>", "\nUser:", "END"])
        for piece in pieces:
            stops.append(piece)

    print("\nmicroseconds per token")
    for name, call in (("detokenise", detokenise), ("three stop strings", stop)):
        print(f"{name:24}{microseconds(call, 10, repeats) / len(ids):13.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, nargs="*", default=[49_152, 151_936])
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"numpy {np.__version__}, seed {SEED}, best of {options.repeats}")
    for vocab_size in options.vocab:
        sampling_table(vocab_size, options.batch, options.repeats)
    text_table(options.repeats)


if __name__ == "__main__":
    main()
