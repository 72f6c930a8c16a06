"""`lockstep demo`: a cluster whose router sends each customer's message to a specialist; the embedded model plays all.

It starts the usual server in a separate process and sends requests over HTTP. All printed values are measured in this
run.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lockstep.cli import options as flags
from lockstep.errors import RemoteError
from lockstep.shown import signed_percent

if TYPE_CHECKING:
    import httpx2
    from rich.console import Console

SESSION = "demo"
FOLLOW_UP = "Thank you. What should I do first?"
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "max_tokens": 64}
CANDIDATE = ("--max-chunk-tokens", "16")
"""Flags of the candidate that the gate judges. They delay the first token noticeably."""
DEFAULT_PORT = 9000
MAX_WIDTH = 110
READY = re.compile(r"ready on (http://\S+),")
LOCKSTEP = (sys.executable, "-m", "lockstep")
STOP_S = 20.0
READ_S = 120.0
POLL_S = 0.1

Message = dict[str, Any]


def demo(
    keep: Annotated[bool, typer.Option("--keep", help="Keep serving after the conversation, for clients.")] = False,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on.", show_default=f"{DEFAULT_PORT} with --keep, else any"),
    ] = None,
    debug: flags.Debug = False,
) -> None:
    """Show a routed cluster on the embedded model: answers, replay, gate verdict; no download, no GPU."""
    from rich.console import Console

    from lockstep.pocket import demo_path

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the server is terminated, too
    console = Console(width=min(Console().width, MAX_WIDTH))
    console.print("[bold]booting a cluster on pocket, the embedded model[/bold] (a demo model: small, and often wrong)")
    console.print(f"[dim]  manifest: {demo_path()}[/dim]", highlight=False, soft_wrap=True)
    if port is None:
        port = DEFAULT_PORT if keep else 0
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as place:
        folder = Path(place)
        (folder / "key").write_text(secrets.token_hex(32))
        with _serving(port, folder, "served") as (url, process):
            console.print(f"[bold]dashboard while it runs: {url}/[/bold]", highlight=False)
            with _client(url) as client:
                _converse(client, console)
            if keep:
                _wait_for_interrupt(console, url, process)
        _verify(console, folder / "served")
        if not keep:
            _judge_both(console, folder)
    if not keep:
        console.print("\nnext: [bold]lockstep demo --keep[/bold] to inspect it, [bold]lockstep serve[/bold] to use it")


def _client(url: str) -> httpx2.Client:
    import httpx2

    return httpx2.Client(base_url=url, timeout=READ_S, trust_env=False)


def _quiet_console() -> Console:
    from rich.console import Console

    return Console(quiet=True)


def _wait_for_interrupt(console: Console, url: str, process: subprocess.Popen[str]) -> None:
    console.print(
        f"\nserving on {url}/v1 until Ctrl-C; dashboard: {url}/; try: lockstep ps --base-url {url}", highlight=False
    )
    with contextlib.suppress(KeyboardInterrupt):
        process.wait()


@contextlib.contextmanager
def _serving(port: int, folder: Path, name: str, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server of the cluster, with a recording, until the block ends; yields its URL and its process."""
    from lockstep.pocket import demo_path

    command = [*LOCKSTEP, "serve", "--manifest", str(demo_path()), "--port", str(port), *more]
    command += ["--log-level", "error", "--trace", str(folder / name), "--trace-key", str(folder / "key")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _address_of(process), process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _address_of(process: subprocess.Popen[str]) -> str:
    """Wait until a server is ready, and return its URL."""
    assert process.stdout is not None
    for line in process.stdout:
        found = READY.search(line)
        if found:
            return found[1]
    raise RemoteError(f"the server ended with code {process.wait()} before it was ready")


class _Answer(NamedTuple):
    """Answer to a request."""

    message: Message
    """Assistant's message in the form of a later request."""
    facts: dict[str, Any]
    """Field ``lockstep`` of the answer: its hops and times."""


def _send(
    client: httpx2.Client, console: Console, messages: list[Message], session: str | None, salt: str | None = None
) -> _Answer:
    """Send one request, and print its answer while it arrives.

    Args:
        salt: salt of the prefix cache; None: the request may use cached prefixes of others without a salt.
    """
    facts: dict[str, Any] = {}
    console.print(f"\n[bold]customer[/bold]  {messages[-1]['content']}", highlight=False)
    body: dict[str, Any] = {"messages": messages, "stream": True, "cache_salt": salt, **SAMPLING}
    if session is not None:
        body["session_id"] = session
    message: Message = {"role": "assistant", "content": ""}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RemoteError(f"the server answered {response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RemoteError(f"the server ended the answer: {chunk['error']['message']}")
            delta = chunk["choices"][0]["delta"]
            for call in delta.get("tool_calls", ()):
                target = json.loads(call["function"]["arguments"])["target"]
                console.print(f"[bold]router[/bold]    -> {target}", highlight=False)
                console.print(f"[bold]{chunk['model']:10}[/bold]", end="", highlight=False)
                message["tool_calls"] = [call]
            if delta.get("content"):
                message["content"] += delta["content"]
                console.out(delta["content"], end="", highlight=False)
            if "lockstep" in chunk:
                facts = chunk["lockstep"]
                console.print()
                _show_hops(console, facts)
    return _Answer(message, facts)


def _show_hops(console: Console, facts: dict[str, Any]) -> None:
    """Print the hops of an answer with the times that the server measured."""
    for hop in facts["hops"]:
        usage = hop["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        answer = f", answered {hop['completion']!r}" if hop["intent"] is not None else ""
        console.print(
            f"[dim]  {hop['model']}: {hop['latency_ms']:.0f} ms, {usage['prompt_tokens']} prompt tokens "
            f"({cached} cached), {usage['completion_tokens']} new{answer}[/dim]",
            highlight=False,
        )
    console.print(
        f"[dim]  total {facts['latency_ms']:.0f} ms, the specialist's first token after "
        f"{facts['ttft_ms'] or 0:.0f} ms, {facts['tokens_per_second'] or 0:.0f} tokens/s[/dim]",
        highlight=False,
    )


def _show_cluster(console: Console, snapshot: dict[str, Any]) -> None:
    """Print tables of the cluster's models, replicas and counters."""
    from rich.table import Table

    replicas = {replica["key"]: replica for replica in snapshot["replicas"]}
    models = Table("model", "tier", "state", "requests", title="models", title_justify="left")
    for model in snapshot["models"]:
        models.add_row(model["id"], model["tier"], model["state"], str(model["num_requests"]))
    counters = Table("counter", "value", title="counters", title_justify="left")
    for replica in replicas.values():
        counters.add_row(
            f"replica of {len(replica['models'])} models",
            f"{replica['bytes'] / 1e6:.0f} MB, loaded in {replica['load_s'] or 0:.2f} s",
        )
    for name, value in snapshot["counters"].items():
        counters.add_row(name, str(value))
    console.print()
    console.print(models)
    console.print(counters)


def _converse(client: httpx2.Client, console: Console) -> None:
    """Send each message in a separate conversation, then a second message of the first conversation."""
    from lockstep.pocket import DEMO_MESSAGES

    first: list[Message] = []
    for text in DEMO_MESSAGES:
        messages = [{"role": "user", "content": text}]
        answer = _send(client, console, messages, None if first else SESSION)
        if not first:
            first = [*messages, answer.message]
            console.print(f"[dim]  session: {_session_text(client)}[/dim]", highlight=False)
    _continue_session(client, console, [*first, {"role": "user", "content": FOLLOW_UP}])
    _show_cluster(console, client.get("/v1/cluster").json())


def _continue_session(client: httpx2.Client, console: Console, messages: list[Message]) -> None:
    """Continue the first session after its KV left the device, and compare the answer with one without a session."""
    until_s = time.monotonic() + READ_S
    while _session_of(client)["place"] not in ("host", "disk"):
        if time.monotonic() > until_s:
            raise RemoteError(f"the session did not leave the device: {_session_text(client)}")
        time.sleep(POLL_S)
    console.print(
        "\n[bold]the first customer again, in the same session[/bold], whose KV has left the device:\n"
        f"[dim]  session: {_session_text(client)}[/dim]",
        highlight=False,
    )
    restored = _send(client, console, messages, SESSION)
    cached = sum(hop["usage"]["prompt_tokens_details"]["cached_tokens"] for hop in restored.facts["hops"])
    console.print(f"[dim]  session: {_session_text(client)}; {cached} prompt tokens were reused[/dim]", highlight=False)
    computed = _send(client, _quiet_console(), messages, None, salt="computed anew")
    is_same = computed.message["content"].encode() == restored.message["content"].encode()
    console.print(
        f"[bold]the same request without a session, with every token computed[/bold]: "
        f"{'the same answer, byte by byte' if is_same else 'a different answer'}",
        highlight=False,
    )
    if not is_same:
        raise RemoteError("the answer of a restored session differs from a computed one; this is a defect")


def _session_of(client: httpx2.Client) -> dict[str, Any]:
    sessions: list[dict[str, Any]] = client.get("/v1/sessions").json()["data"]
    return sessions[0]


def _session_text(client: httpx2.Client) -> str:
    """Location and tokens of the session, in words."""
    session = _session_of(client)
    stored = "unknown" if session["num_stored_tokens"] is None else str(session["num_stored_tokens"])
    return f"place {session['place']}, {session['num_tokens']} tokens on the device, {stored} in host memory"


def _verify(console: Console, trace: Path) -> None:
    """Replay all decisions of the server in another process, and compare them."""
    console.print("\n[bold]replay of every scheduler decision, from the server's recording[/bold]")
    ended = subprocess.run(
        [*LOCKSTEP, "replay", "--verify", str(trace)], stdout=subprocess.PIPE, text=True, timeout=READ_S, check=False
    )
    console.print(ended.stdout.strip(), highlight=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)


def _judge(console: Console, baseline: Path, candidate: Path) -> None:
    """Print the gate's verdict on two recordings, and its prediction of the candidate's latency."""
    command = [*LOCKSTEP, "gate", str(baseline), str(candidate), "--set", "min_pairs=5", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=READ_S, check=False)
    if ended.returncode not in (0, 1, 2):
        raise typer.Exit(ended.returncode)
    verdict = json.loads(ended.stdout)
    summary, [engine] = verdict["summary"], verdict["decisions"]["engines"]
    console.print(f"[bold]{verdict['decision']}[/bold]: {verdict['reason']}", highlight=False)
    console.print(
        f"  {summary['same']} of {summary['pairs']} answers are the same; {verdict['evidence']}", highlight=False
    )
    if times := judged_times(verdict):
        console.print(f"  {times}", highlight=False)
    for name, (before, after) in engine["settings"].items():
        console.print(f"  changed setting: {name}, from {before} to {after}", highlight=False)
    if "reasons" in engine["difference"]:
        reasons = "; ".join(engine["difference"]["reasons"])
        console.print(f"  the first step that differs (A: served, B: candidate): {reasons}", highlight=False)
    if engine["settings"] and "figures" in engine["prediction"]:
        _show_prediction(console, engine["prediction"])


def judged_times(verdict: dict[str, Any]) -> str:
    """The measured times that the policy judges, with their limits; empty if it judges none."""
    parts = []
    for stem, words in (("ttft", "first token"), ("decode", "time between tokens"), ("latency", "latency")):
        figure, limit = verdict["summary"]["figures"][f"{stem}_p95_ms"], verdict["policy"][f"max_{stem}_p95_ratio"]
        if figure["ratio"] is not None and limit is not None:
            both = f"{figure['baseline']:.1f} -> {figure['candidate']:.1f} ms"
            parts.append(f"p95 {words} {both} ({figure['ratio']:.2f} of at most {limit:g} times)")
    return f"measured and judged: {', '.join(parts)}" if parts else ""


def _show_prediction(console: Console, prediction: dict[str, Any]) -> None:
    """Print predicted latencies of the recorded conversations under the candidate's settings, from a replay."""
    from rich.table import Table

    table = Table("metric", "measured", "replayed", "candidate", "change", title_justify="left")
    table.title = "prediction from the baseline's recording, not judged by the policy"
    for name, words in (
        ("ttft_p50_ms", "median first token, ms"),
        ("ttft_p95_ms", "p95 first token, ms"),
        ("output_tokens_per_s", "output tokens/s"),
    ):
        figure = prediction["figures"][name]
        numbers = [figure[each] for each in ("measured", "baseline", "candidate")]
        values = ["-" if number is None else f"{number:.1f}" for number in numbers]
        table.add_row(words, *values, "-" if figure["change"] is None else signed_percent(figure["change"], ".0f"))
    console.print(table)
    console.print(f"[dim]  {prediction['trust']}[/dim]", highlight=False)


def _judge_both(console: Console, folder: Path) -> None:
    """Judge the recording against itself, and against a candidate that serves the same messages."""
    console.print("\n[bold]the gate: this server against itself[/bold]")
    _judge(console, folder / "served", folder / "served")
    console.print(f"\n[bold]the gate: against a candidate with {' '.join(CANDIDATE)}[/bold], with the same requests")
    with (
        _serving(0, folder, "candidate", *CANDIDATE) as (url, _),
        _client(url) as client,
    ):
        _converse(client, _quiet_console())
    _judge(console, folder / "served", folder / "candidate")
