"""Speculative decoding against plain decoding: output tokens per second, by workload and number of sequences.

    python -m tools.random_models gguf llama-3.2-1b Q8_0 model.gguf
    python -m benchmarks.speculation model.gguf --vocabulary ggml-vocab-llama-bpe.gguf --at-once 1 8 32

A model with random weights repeats nothing, so the answers are given: each step is computed by the model, and then the
logit of the next token of the given answer becomes the greatest. So the price of every row is the model's, and the
acceptance is that of the texts. Every request has its own cache salt, so that drafts come from its prompt and its own
answer only. With `--earlier N`, all requests of a round have one salt, and N requests of the workload with other
contents are answered before, which are not timed: a service that gets such requests all the time. Rounds with and
without drafts alternate; ratios are of one round, with their median, least and greatest.
The ratio of tokens per second of processor time depends less on other load. All answers are compared with the given
ones.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.artifacts.gguf_file import read_gguf
from lockstep.artifacts.gguf_tokenizer import read_vocabulary
from lockstep.core.policy import SchedulerConfig
from lockstep.engine.draft_prices import measured_prices
from lockstep.engine.drafter import Speculator
from lockstep.engine.engine import Engine
from lockstep.engine.loading import LoadedModel, load_model
from lockstep.engine.options import EngineOptions, LoadOptions
from lockstep.engine.request import GenerationRequest
from lockstep.engine.speculative_config import SpeculativeConfig
from lockstep.executors.base import Logits, StepBatch
from lockstep.executors.sampling_params import SamplingParams

NAMES = ("Okafor", "Lindqvist", "Marchetti", "Tanaka", "Dubois", "Haddad", "Novak", "Silva", "Petrov", "Ferreira")
GOODS = ("desk lamp", "office chair", "cabinet", "door sensor", "label printer", "network switch", "water filter")
CITIES = ("Lisbon", "Gdansk", "Osaka", "Leeds", "Tunis", "Porto", "Malmo", "Graz")
PROSE = (
    "Rain changes how a city sounds, because wet streets carry the hum of tyres much further.",
    "A good cook tastes early and often, and adds salt before anybody thinks of asking for it.",
    "Old maps show coasts that were guessed by sailors who never came back to correct them.",
    "Most bridges fail slowly, through small cracks which an inspector could have seen in spring.",
    "Children learn the names of dinosaurs with an ease that adults usually lose by thirty.",
    "Bread rises better in a warm kitchen, yet a cold night gives it far more flavour.",
    "The first telescopes were toys of rich merchants until someone pointed one at Jupiter.",
    "Snow hides footprints within an hour, which is why the dog was so useful that winter.",
    "Nobody planned the harbour; it grew wherever fishermen found a wall against the wind.",
    "Libraries keep more than books: quiet, warmth, and the habit of looking things up.",
    "A violin needs playing, since wood that is left alone forgets how to move.",
    "Glass flows in no cathedral window, whatever the guide may have told your grandmother.",
    "Bees vote on a new home by dancing, and the longest dance tends to win.",
    "Every clock on the island was wrong, though all of them agreed with each other.",
)


class Case(NamedTuple):
    """One request with its answer."""

    prompt: str
    answer: str


def extraction(draw: random.Random) -> Case:
    """Fields of a delivery note as JSON."""
    lines, rows = [], []
    for _ in range(4):
        goods, name, city = draw.choice(GOODS), draw.choice(NAMES), draw.choice(CITIES)
        number, count, price = draw.randrange(10_000, 99_999), draw.randrange(2, 40), draw.randrange(900, 90_000) / 100
        lines.append(f"On order {number}, {name} of {city} gets {count} pieces of {goods} at {price:.2f} euros each.")
        rows.append({"order": number, "customer": name, "city": city, "count": count, "goods": goods, "price": price})
    note = "\n".join(lines)
    return Case(f"Delivery note:\n{note}\nList the orders as JSON with the fields {', '.join(rows[0])}.\n", _json(rows))


def _json(rows: Sequence[Mapping[str, object]]) -> str:
    return json.dumps(rows, indent=1)


def code_edit(draw: random.Random) -> Case:
    """A module in which one name is another afterwards, and one function has a check."""
    old, new = draw.choice([("total", "amount"), ("rows", "records"), ("name", "label"), ("limit", "maximum")])
    functions = []
    for number in range(5):
        words = draw.sample(("price", "count", "weight", "offset", "ratio", "length", "width", "score"), 3)
        functions.append(
            f"def {words[0]}_of_{number}({old}, {words[1]}):\n"
            f"    {words[2]} = {draw.randrange(2, 90)}\n"
            f"    for each in {old}:\n"
            f"        {words[2]} += each.{words[1]} * {draw.randrange(2, 9)}\n"
            f"    return {words[2]} - {words[1]}\n"
        )
    code = "\n\n".join(functions)
    edited = code.replace(f"({old},", f"({new},").replace(f"in {old}:", f"in {new}:")
    return Case(f"Rename the parameter {old} to {new}:\n\n{code}\nEdited:\n\n", edited)


def json_repair(draw: random.Random) -> Case:
    """A document in which some quotes and commas are missing."""
    rows = [
        {"id": draw.randrange(1000, 9999), "name": draw.choice(NAMES), "city": draw.choice(CITIES), "open": True}
        for _ in range(5)
    ]
    right = _json(rows)
    wrong = list(right)
    for _ in range(4):
        del wrong[draw.choice([at for at, letter in enumerate(wrong) if letter in '",'])]
    return Case(f"Repair this JSON:\n{''.join(wrong)}\nRepaired:\n", right)


def free_text(draw: random.Random) -> Case:
    """Sentences that do not repeat."""
    return Case("Write a few thoughts about everyday things.\n", " ".join(draw.sample(PROSE, 8)))


WORKLOADS: Mapping[str, Callable[[random.Random], Case]] = {
    "extraction": extraction,
    "code edit": code_edit,
    "JSON repair": json_repair,
    "free text": free_text,
}


class GivenAnswers:
    """An executor that computes every step, and then prefers the next token of the given answer."""

    def __init__(self, model: LoadedModel) -> None:
        self._inner = model.executor
        self.geometry = model.executor.geometry
        self.environment, self.machine = model.executor.environment, model.executor.machine
        self.allocate, self.close = model.executor.allocate, model.executor.close
        self.prompt_logits = model.executor.prompt_logits
        self.read_blocks, self.write_blocks = model.executor.read_blocks, model.executor.write_blocks
        self.answers: dict[tuple[int, ...], Sequence[int]] = {}
        self._sequences: dict[int, tuple[int, Sequence[int]]] = {}

    def begin(self, seq_id: int, prompt_ids: Sequence[int], max_output_tokens: int) -> None:
        self._sequences[seq_id] = len(prompt_ids), self.answers[tuple(prompt_ids)]

    def end(self, seq_id: int) -> None:
        del self._sequences[seq_id]

    def execute(self, batch: StepBatch) -> Logits:
        logits, plan = self._inner.execute(batch), batch.plan
        drafts = plan.drafts or (0,) * len(plan.seq_ids)
        last, further = [], []
        for seq_id, start, length, count, samples in zip(
            plan.seq_ids, plan.starts, plan.lengths, drafts, plan.samples, strict=True
        ):
            if samples:
                end = start + length - count
                last.append((seq_id, end))
                further += [(seq_id, end + number) for number in range(1, count + 1)]
        for row, (seq_id, position) in enumerate(last + further):
            num_prompt, answer = self._sequences[seq_id]
            place = position - num_prompt
            logits[row, answer[place] if place < len(answer) else 0] = 1e6
        return logits


TokenCase = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a prompt and of its answer."""


class Result(NamedTuple):
    """One round of one side."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    num_drafts: int
    num_accepted: int


class Bench:
    """A loaded model with its prices."""

    def __init__(self, model: LoadedModel, config: SchedulerConfig, speculative: SpeculativeConfig) -> None:
        self.prices = measured_prices(model.executor, config)
        self._config, self._speculative = config, speculative
        self._executor = GivenAnswers(model)
        object.__setattr__(model, "executor", self._executor)
        self._model = model

    def run(self, cases: Sequence[TokenCase], earlier: Sequence[TokenCase], label: str, *, drafts: bool) -> Result:
        """Serve the cases together; the time begins when all prompts are computed.

        Args:
            earlier: cases that are served before.
        """
        self._executor.answers = dict([*cases, *earlier])
        speculator = Speculator(self._speculative, self.prices) if drafts else None
        engine = Engine(self._model, self._config, drafter=speculator)
        for case in earlier:
            engine.submit(_request(case, label))
        engine.run_until_idle()
        engine.drain_finished()
        counters_before = engine.metrics().counters
        ids = [
            engine.submit(_request(case, label if earlier else f"{label} {number}"))
            for number, case in enumerate(cases)
        ]
        engine.step()
        while any(generation.num_output == 0 for generation in engine._requests.generations.values()):
            engine.step()
        done = engine.metrics().counters["generation_tokens"] - counters_before["generation_tokens"]
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        engine.run_until_idle()
        elapsed_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
        total = 0
        for request_id, (_, answer) in zip(ids, cases, strict=True):
            output = engine.result(request_id)
            assert output is not None
            assert output.completions[0].token_ids == answer, "an answer differs from the given one"
            total += len(answer)
        counters = engine.metrics().counters
        drafted, accepted = (
            counters.get(name, 0) - counters_before.get(name, 0)
            for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        )
        return Result((total - done) / elapsed_s, (total - done) / cpu_s, drafted, accepted)


def _request(case: TokenCase, salt: str) -> GenerationRequest:
    prompt, answer = case
    params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
    return GenerationRequest(prompt, params, cache_salt=salt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--vocabulary", type=Path, metavar="FILE", help="GGUF with a real vocabulary for the texts")
    parser.add_argument("--config", default='{"method": "suffix"}', metavar="JSON")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--workload", nargs="+", default=[*WORKLOADS], choices=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--earlier", type=int, default=0, metavar="N", help="requests that are served before")
    parser.add_argument("--most", type=int, default=160, metavar="TOKENS", help="maximum length of an answer")
    args = parser.parse_args()
    limits = EngineOptions(max_num_seqs=max(args.at_once), max_model_len=1024, max_num_batched_tokens=512)
    model, config = load_model(args.model, LoadOptions(limits))
    own = None if args.vocabulary is None else read_vocabulary(read_gguf(args.vocabulary).metadata, 1 << 20).tokenizer

    def encode(text: str) -> tuple[int, ...]:
        ids = model.tokenizer.encode(text) if own is None else own.encode(text, add_special_tokens=False).ids
        return tuple([each % (model.vocab_size - 1) + 1 for each in ids])

    bench = Bench(model, config, SpeculativeConfig.parse(args.config))
    print("step, us by rows:", " ".join(f"{rows}: {duration}" for rows, duration in bench.prices.steps), end="; ")
    print(f"{bench.prices.context_ns} ns for each token of context")
    heads = (*("workload", "at once", "plain tok/s"), *("ratio", "least", "most") * 2, "accepted")
    print("{:<12}{:>8}{:>12}{:>7}{:>7}{:>7}{:>12}{:>7}{:>7}  {}".format(*heads[:6], "CPU ratio", *heads[7:]))
    for name in args.workload:
        for at_once in args.at_once:
            rounds = []
            for number in range(args.rounds):
                draw = random.Random(f"{name} {at_once} {number}")
                made = [WORKLOADS[name](draw) for _ in range(at_once + args.earlier)]
                cases = [
                    (encode(f"{place}. {case.prompt}"), encode(case.answer)[: args.most])
                    for place, case in enumerate(made)
                ]
                timed, earlier = cases[:at_once], cases[at_once:]
                if number == 0:  # the first steps of a size are slower
                    bench.run([(prompt, answer[:8]) for prompt, answer in timed], [], "warm-up", drafts=False)
                order = (False, True) if number % 2 else (True, False)
                sides = {
                    drafts: bench.run(timed, earlier, f"{name} {number} {drafts}", drafts=drafts) for drafts in order
                }
                rounds.append((sides[False], sides[True]))
            ratios = [drafting.tokens_per_s / plain.tokens_per_s for plain, drafting in rounds]
            of_cpu = [drafting.tokens_per_cpu_s / plain.tokens_per_cpu_s for plain, drafting in rounds]
            plain_rate = statistics.median(plain.tokens_per_s for plain, _ in rounds)
            drafted = sum(drafting.num_drafts for _, drafting in rounds)
            accepted = sum(drafting.num_accepted for _, drafting in rounds)
            share = f"{accepted / drafted:.0%} of {drafted}" if drafted else "no drafts"
            print(
                f"{name:<12}{at_once:>8}{plain_rate:>12.1f}{statistics.median(ratios):>7.2f}{min(ratios):>7.2f}"
                f"{max(ratios):>7.2f}{statistics.median(of_cpu):>12.2f}{min(of_cpu):>7.2f}{max(of_cpu):>7.2f}  {share}",
                flush=True,
            )


if __name__ == "__main__":
    main()
