"""Answers of the specialists that are adapters, beside those of the base with a persona and without, in the runtime.

    PYTHONPATH=src python -m tools.pocket.evaluate_adapters [--data DIR] [--cases 200] [--samples]

Two measures on requests outside of the training split, each the last of a conversation with or without history. An
answer is to the point if it has the words of one that was written for the request, whatever stands in its slots; it is
greedy. Perplexity is that of a drawn answer's tokens, its end included. `--data` adds the test split of Banking77.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from lockstep import AdapterSource, Engine, GenerationRequest, LoadOptions, SamplingParams, TokenOutput, load_model
from lockstep.engine.outputs import RequestOutput
from lockstep.engine.request import Conversation
from lockstep.pocket import ADAPTERS, DEMO_MESSAGES, PERSONAS, SCHEME
from tools.pocket.conversations import Turn, Writer
from tools.pocket.free_messages import FREE_MESSAGES
from tools.pocket.grammar import CHOICE, SLOT, read_grammar
from tools.pocket.public import read_public

Messages = list[dict[str, str]]
Form = Literal["persona", "bare", "adapter"]
FORMS: tuple[Form, ...] = ("persona", "bare", "adapter")
GREEDY = SamplingParams(temperature=0, max_tokens=96)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=64)
SEED, NUM_SAMPLES = 7, 5
_ANYTHING, _OPEN, _OR, _CLOSE, _N = "\0\1\2\3\4"
_MEANINGS = {_ANYTHING: ".*", _OPEN: "(?:", _OR: "|", _CLOSE: ")", _N: "n?"}
"""Marks in a template that no text contains, and the regular expressions for which they stand."""
_ARTICLE = re.compile(r"\b([Aa])(?= )")


@dataclass(frozen=True)
class Score:
    """Measures of the answers to one set of requests."""

    num_to_the_point: int
    perplexity: float
    prompt_tokens: float
    """Mean number of tokens of a prompt."""


def messages_of(turns: Sequence[Turn]) -> Messages:
    """The conversation up to its last request."""
    earlier = [
        {"role": role, "content": text}
        for turn in turns[:-1]
        for role, text in (("user", turn.request), ("assistant", turn.answer))
    ]
    return [*earlier, {"role": "user", "content": turns[-1].request}]


def request_for(messages: Messages, specialist: str, form: Form, params: SamplingParams) -> GenerationRequest:
    """Request for an answer of the base with the specialist's persona behind the conversation or without, or of the
    specialist's adapter."""
    if form == "persona":
        messages = [*messages, {"role": "system", "content": PERSONAS[specialist]}]
    return GenerationRequest(Conversation(messages), params, adapter=specialist if form == "adapter" else "")


def with_answer(request: GenerationRequest, answer: str) -> GenerationRequest:
    """Request for the log-probabilities of a given answer."""
    assert isinstance(request.prompt, Conversation)
    messages = [*request.prompt.messages, {"role": "assistant", "content": answer}]
    prompt = Conversation(messages, add_generation_prompt=False)
    return GenerationRequest(prompt, SamplingParams(max_tokens=1), prompt_logprobs=0, adapter=request.adapter)


def run(engine: Engine, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
    """Run requests in one batch, and return their outputs in order."""
    outputs: dict[int, RequestOutput] = {}

    def collect(output: TokenOutput) -> None:
        if output.request is not None:
            outputs[output.request_id] = output.request

    ids = []
    for request in requests:
        while not engine.num_free_places:
            engine.step()
        ids.append(engine.submit(request, collect))
    while engine.has_work:
        engine.step()
    return [outputs[each] for each in ids]


def fits(answer: str, template: str) -> bool:
    """True if an answer has the words of a template; its slots may hold anything."""
    text = _ARTICLE.sub(rf"\1{_N}", SLOT.sub(_ANYTHING, template))
    while CHOICE.search(text):
        text = CHOICE.sub(lambda match: _OPEN + match[1].replace("|", _OR) + _CLOSE, text)
    pattern = re.escape(text).replace("\\ ", r"\s*")
    for mark, meaning in _MEANINGS.items():
        pattern = pattern.replace(mark, meaning)
    return re.fullmatch(pattern, answer, re.IGNORECASE | re.DOTALL) is not None


def score(engine: Engine, cases: Sequence[Sequence[Turn]], specialist: str, form: Form) -> Score:
    """Measure the answers to the last requests of conversations."""
    requests = [request_for(messages_of(turns), specialist, form, GREEDY) for turns in cases]
    answered = run(engine, requests)
    given = run(engine, [with_answer(each, turns[-1].answer) for each, turns in zip(requests, cases, strict=True)])
    loss, count, lengths = 0.0, 0, [len(output.prompt_token_ids) for output in answered]
    for length, output in zip(lengths, given, strict=True):
        entries = output.prompt_logprobs
        assert entries is not None
        for entry in entries[length:-1]:  # the last token is the line break after the answer's end
            assert entry is not None
            loss, count = loss - entry.logprob, count + 1
    right = [
        any(fits(output.text, template) for template in turns[-1].answers)
        for output, turns in zip(answered, cases, strict=True)
    ]
    return Score(sum(right), math.exp(loss / count), sum(lengths) / len(cases))


def cases_of(writer: Writer, specialist: str, count: int) -> list[list[Turn]]:
    """Conversations that end with a request of a specialist, some with history."""
    return [writer.history() + writer.turns(specialist, writer.rng.random() < 0.2, False) for _ in range(count)]


def open_engine() -> Engine:
    """The embedded model with all of its adapters; the caller closes `engine.model`."""
    sources = tuple(AdapterSource(name, SCHEME + name) for name in ADAPTERS)
    return Engine(*load_model(SCHEME, LoadOptions(adapters=sources)))


def held_out_writer() -> Writer:
    """Writer of requests on templates and values that training never saw."""
    return Writer(read_grammar(Path(__file__).parent / "phrases"), [], True, Random(SEED))


def report(engine: Engine, name: str, cases: Sequence[Sequence[Turn]], specialist: str) -> None:
    """Print the measures of one set, of each form."""
    for form in FORMS:
        found = score(engine, cases, specialist, form)
        share = found.num_to_the_point / len(cases)
        print(
            f"{specialist:<10} {name:<21} {form:<8} to the point {share:6.1%} of {len(cases)}, "
            f"perplexity {found.perplexity:.3f}, prompt {found.prompt_tokens:.1f} tokens",
            flush=True,
        )


def print_samples(engine: Engine) -> None:
    """Print sampled answers to the demo's messages and to some of the freely written ones."""
    for specialist in ADAPTERS:
        demo = [text for text, intent in DEMO_MESSAGES.items() if intent == specialist]
        for text in [*demo, *FREE_MESSAGES[specialist][::NUM_SAMPLES]]:
            print(f"[{specialist}] {text}")
            for form in FORMS:
                request = request_for([{"role": "user", "content": text}], specialist, form, SAMPLED)
                print(f"   {form}: {run(engine, [request])[0].text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the public messages")
    parser.add_argument("--cases", type=int, default=200, help="requests of a set")
    parser.add_argument("--samples", action="store_true", help="also print answers")
    options = parser.parse_args()
    engine = open_engine()
    with closing(engine.model):
        writer = held_out_writer()
        for specialist in ADAPTERS:
            report(engine, "held-out paraphrases", cases_of(writer, specialist, options.cases), specialist)
        if options.data:
            public = [m for m in read_public(options.data, "test") if m.source == "banking77"]
            chosen = Random(SEED).sample(public, options.cases)
            cases = [[Turn(m.text, m.intent, m.answer, (m.answer,))] for m in chosen]
            report(engine, "banking77 test", cases, "billing")
        if options.samples:
            print_samples(engine)


if __name__ == "__main__":
    main()
