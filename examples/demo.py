"""Four customers write at once: the embedded model routes and answers them in one continuous batch.

    make demo

It uses the Python API that a user has. Each message makes two hops, router and specialist, and each conversation has
two turns; the figures at the end are those of the run that you have just seen.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from lockstep import LLM, Constraint, GenerationRequest, RequestOutput, SamplingParams, TokenOutput
from lockstep.core.step import StepEvents, StepPlan, StepResult
from lockstep.pocket import DEMO_MESSAGES, INTENTS, PERSONAS

Message = dict[str, str]
FOLLOW_UP = "Thank you. What should I do first?"
ROUTE = SamplingParams(temperature=0.0, max_tokens=4, constraint=Constraint.choice(INTENTS))
"""One of the labels, whatever the model would rather say."""
ANSWER = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=96)


class BatchLog:
    """An observer that remembers how many sequences each step computed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, plan: StepPlan, result: StepResult, events: StepEvents) -> None:
        self.sizes.append(plan.num_sequences)


def answer_together(
    llm: LLM,
    conversations: Sequence[Sequence[Message]],
    params: SamplingParams,
    titles: Sequence[str],
    show: Live | None,
) -> list[RequestOutput]:
    """Submit all at once, step until all have ended, and draw the texts as they grow."""
    texts = [""] * len(conversations)
    done: dict[int, RequestOutput] = {}
    index_of: dict[int, int] = {}

    def on_token(output: TokenOutput) -> None:
        texts[index_of[output.request_id]] += output.text
        if output.request is not None:
            done[output.request_id] = output.request

    for index, messages in enumerate(conversations):
        prompt = llm.model.tokenizer.encode_chat(messages)
        index_of[llm.engine.submit(GenerationRequest(prompt, params), on_token)] = index
    while llm.engine.has_work:
        llm.engine.step()
        if show is not None:
            show.update(
                Group(
                    *(Panel(text, title=title, title_align="left") for title, text in zip(titles, texts, strict=True))
                )
            )
    return [done[request_id] for request_id in index_of]


def run_round(
    llm: LLM,
    console: Console,
    conversations: Sequence[Sequence[Message]],
    params: SamplingParams,
    titles: Sequence[str],
) -> list[RequestOutput]:
    """One visible round of answers; plain panels where there is no terminal to redraw."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=12) as live:
            return answer_together(llm, conversations, params, titles, live)
    outputs = answer_together(llm, conversations, params, titles, None)
    for title, output in zip(titles, outputs, strict=True):
        console.print(Panel(output.text, title=title, title_align="left"))
    return outputs


def persona(role: str) -> Message:
    return {"role": "system", "content": PERSONAS[role]}


def main() -> None:
    console = Console(width=min(Console().width, 110))
    log = BatchLog()
    started = time.perf_counter()
    console.print("[bold]loading the embedded model[/bold] (a demo model: small, and often wrong)")
    with LLM("pocket://", observer=log) as llm:
        loaded_s = time.perf_counter() - started
        started = time.perf_counter()
        conversations: list[list[Message]] = [[{"role": "user", "content": text}] for text in DEMO_MESSAGES]
        rounds = converse(llm, console, conversations)
        for conversation in conversations:
            conversation.append({"role": "user", "content": FOLLOW_UP})
        console.print("\n[bold]one turn later: the specialist's hop finds the router's hop in the prefix cache[/bold]")
        rounds += converse(llm, console, conversations)
        print_figures(console, llm, rounds, log, loaded_s, time.perf_counter() - started)


def converse(llm: LLM, console: Console, conversations: Sequence[list[Message]]) -> list[list[RequestOutput]]:
    """One turn of every conversation, two hops in two batches: the router's word, then the specialist's answer."""
    routed = answer_together(llm, [[*turn, persona("router")] for turn in conversations], ROUTE, [], None)
    intents = [output.text for output in routed]
    roles = [intent if intent in PERSONAS else "general" for intent in intents]
    titles = [
        f"{turn[-1]['content']} -> router: {intent} -> {role}"
        for turn, intent, role in zip(conversations, intents, roles, strict=True)
    ]
    prompts = [[*turn, persona(role)] for role, turn in zip(roles, conversations, strict=True)]
    answers = run_round(llm, console, prompts, ANSWER, titles)
    for turn, output in zip(conversations, answers, strict=True):
        turn.append({"role": "assistant", "content": output.text})
    return [routed, answers]


def print_figures(
    console: Console,
    llm: LLM,
    rounds: Sequence[Sequence[RequestOutput]],
    log: BatchLog,
    loaded_s: float,
    served_s: float,
) -> None:
    outputs = [output for outputs in rounds for output in outputs]
    num_new = sum(output.num_output_tokens for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    ttfts_ms = [output.timings.ttft_s * 1e3 for output in outputs if output.timings.ttft_s is not None]
    probe = llm.model.probe
    table = Table("figure", "value", title="what happened", title_justify="left")
    table.add_row("load", f"{loaded_s:.2f} s")
    table.add_row("throughput", f"{num_new / served_s:.0f} new tokens/s over {num_new} tokens in {served_s:.2f} s")
    table.add_row("time to first token", f"median {statistics.median(ttfts_ms):.0f} ms, worst {max(ttfts_ms):.0f} ms")
    table.add_row(
        "sequences per step", f"mean {statistics.mean(log.sizes):.2f}, most {max(log.sizes)}, {len(log.sizes)} steps"
    )
    table.add_row("prefix hits", f"{num_cached} of {num_prompt} prompt tokens")
    table.add_row("deterministic (probe)", "not run" if probe is None else str(probe.deterministic).lower())
    table.add_row("fingerprint of the decisions", llm.engine.fingerprint)
    console.print()
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
