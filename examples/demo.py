"""Customers write to a cluster: a router sends each to a specialist, all of them one embedded model with personas.

    make demo           # boots examples/customer-support.yaml, asks, shows what happened, ends, verifies and judges it
    make demo KEEP=1    # stays up afterwards, for curl or any OpenAI client

It is the server that a user starts, spoken to over HTTP. The figures are those of the run that you have just seen.
"""

from __future__ import annotations

import contextlib
import io
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
from typing import Any, NamedTuple

import httpx2
from rich.console import Console
from rich.table import Table

from lockstep.pocket import DEMO_MESSAGES

MANIFEST = Path(__file__).resolve().parent / "customer-support.yaml"
FOLLOW_UP = "Thank you. What should I do first?"
SESSION = "demo"
SHORT_IDLE = "\nsessions: {idle_threshold: 1s, sweep_interval: 100ms}\n"
"""After which a session leaves the device, so that nobody has to wait for it here."""
SAMPLING = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "max_tokens": 64}
KEPT_PORT = "9000"
READY = re.compile(r"ready on (http://\S+),")
LOCKSTEP = (sys.executable, "-m", "lockstep")
CANDIDATE = ("--max-chunk-tokens", "16")
STOP_S = 20.0
READ_S = 120.0
LOOK_S = 0.1

Message = dict[str, Any]


@contextlib.contextmanager
def serving(port: str, folder: Path, name: str, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of the cluster until the block ends, which records what it decides: its address and its process."""
    manifest = folder / MANIFEST.name
    manifest.write_text(MANIFEST.read_text() + SHORT_IDLE)
    command = [*LOCKSTEP, "serve", "--manifest", str(manifest), "--backend", "pocket", "--port", port, *flags]
    command += ["--log-level", "error", "--trace", str(folder / name), "--trace-key", str(folder / "key")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield address_of(process), process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def address_of(process: subprocess.Popen[str]) -> str:
    """Where a server listens, once it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        found = READY.search(line)
        if found:
            return found[1]
    raise SystemExit(f"the server ended with code {process.wait()} before it was ready")


class Answer(NamedTuple):
    """The assistant's message as it may be sent back, and what the server told of it."""

    message: Message
    told: dict[str, Any]


def ask(
    client: httpx2.Client, console: Console, messages: list[Message], session: str | None, salt: str | None = None
) -> Answer:
    """One request, shown as it is answered.

    Args:
        salt: not None: nothing of other requests is found again.
    """
    told: dict[str, Any] = {}
    console.print(f"\n[bold]customer[/bold]  {messages[-1]['content']}", highlight=False)
    body: dict[str, Any] = {"messages": messages, "stream": True, "cache_salt": salt, **SAMPLING}
    if session is not None:
        body["session_id"] = session
    said: Message = {"role": "assistant", "content": ""}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(chunk["error"]["message"])
            delta = chunk["choices"][0]["delta"]
            for call in delta.get("tool_calls", ()):
                target = json.loads(call["function"]["arguments"])["target"]
                console.print(f"[bold]router[/bold]    -> {target}", highlight=False)
                console.print(f"[bold]{chunk['model']:10}[/bold]", end="", highlight=False)
                said["tool_calls"] = [call]
            if delta.get("content"):
                said["content"] += delta["content"]
                console.out(delta["content"], end="", highlight=False)
            if "lockstep" in chunk:
                told = chunk["lockstep"]
                console.print()
                show_hops(console, told)
    return Answer(said, told)


def show_hops(console: Console, told: dict[str, Any]) -> None:
    """The parts of one answer with their times, as the server measured them."""
    for hop in told["hops"]:
        usage = hop["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        said = f", said {hop['completion']!r}" if hop["intent"] is not None else ""
        console.print(
            f"[dim]  {hop['model']}: {hop['latency_ms']:.0f} ms, {usage['prompt_tokens']} prompt tokens "
            f"({cached} cached), {usage['completion_tokens']} new{said}[/dim]",
            highlight=False,
        )
    console.print(
        f"[dim]  in all {told['latency_ms']:.0f} ms, the specialist's first token after {told['ttft_ms'] or 0:.0f} ms, "
        f"{told['tokens_per_second'] or 0:.0f} tokens/s[/dim]",
        highlight=False,
    )


def show_cluster(console: Console, snapshot: dict[str, Any]) -> None:
    """What the cluster was and did."""
    replicas = {replica["key"]: replica for replica in snapshot["replicas"]}
    models = Table("model", "tier", "state", "requests", title="models", title_justify="left")
    for model in snapshot["models"]:
        models.add_row(model["id"], model["tier"], model["state"], str(model["num_requests"]))
    figures = Table("figure", "value", title="what happened", title_justify="left")
    for replica in replicas.values():
        figures.add_row(
            f"replica of {len(replica['models'])} models",
            f"{replica['bytes'] / 1e6:.0f} MB, loaded in {replica['load_s'] or 0:.2f} s, "
            f"deterministic: {str(replica['deterministic']).lower()}",
        )
    for name, value in snapshot["counters"].items():
        figures.add_row(name, str(value))
    console.print()
    console.print(models)
    console.print(figures)


def converse(client: httpx2.Client, console: Console) -> None:
    """Every message in a conversation of its own, then a second turn of the first one, which comes back."""
    first: list[Message] = []
    for text in DEMO_MESSAGES:
        messages = [{"role": "user", "content": text}]
        answer = ask(client, console, messages, None if first else SESSION)
        if not first:
            first = [*messages, answer.message]
            console.print(f"[dim]  its session: {where(client)}[/dim]", highlight=False)
    come_back(client, console, [*first, {"role": "user", "content": FOLLOW_UP}])
    show_cluster(console, client.get("/v1/cluster").json())


def come_back(client: httpx2.Client, console: Console, messages: list[Message]) -> None:
    """The first customer's second turn, after its session has left the device, and the same without any session."""
    until_s = time.monotonic() + READ_S
    while session_of(client)["place"] not in ("host", "disk"):
        if time.monotonic() > until_s:
            raise SystemExit(f"the session did not leave the device: {where(client)}")
        time.sleep(LOOK_S)
    console.print(
        "\n[bold]the first customer again, in the same session[/bold], whose KV has left the device since:\n"
        f"[dim]  its session: {where(client)}[/dim]",
        highlight=False,
    )
    back = ask(client, console, messages, SESSION)
    cached = sum(hop["usage"]["prompt_tokens_details"]["cached_tokens"] for hop in back.told["hops"])
    console.print(
        f"[dim]  its session: {where(client)}; {cached} prompt tokens were not computed again[/dim]", highlight=False
    )
    anew = ask(client, Console(file=io.StringIO()), messages, None, salt="computed anew")
    is_same = anew.message["content"].encode() == back.message["content"].encode()
    console.print(
        f"[bold]the same turn without a session, all of it computed[/bold]: "
        f"{'the same answer, byte by byte' if is_same else 'another answer'}",
        highlight=False,
    )
    if not is_same:
        raise SystemExit("a session that came back answers otherwise: this is a defect")


def session_of(client: httpx2.Client) -> dict[str, Any]:
    [session] = client.get("/v1/sessions").json()["data"]
    told: dict[str, Any] = session
    return told


def where(client: httpx2.Client) -> str:
    """The place of the session, in words."""
    session = session_of(client)
    stored = "unknown" if session["num_stored_tokens"] is None else str(session["num_stored_tokens"])
    return f"place {session['place']}, {session['num_tokens']} tokens on the device, {stored} in host memory"


def verify(console: Console, trace: Path) -> None:
    """Decide again, in another process, all that the server decided."""
    console.print("\n[bold]every step that the server decided, decided again from its recording[/bold]")
    ended = subprocess.run(
        [*LOCKSTEP, "replay", "--verify", str(trace)], stdout=subprocess.PIPE, text=True, timeout=READ_S, check=False
    )
    console.print(ended.stdout.strip(), highlight=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def judge(console: Console, baseline: Path, candidate: Path) -> None:
    """The gate's verdict on two recordings, and what another setting would do to users."""
    command = [*LOCKSTEP, "gate", str(baseline), str(candidate), "--set", "min_pairs=5", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=READ_S, check=False)
    if ended.returncode not in (0, 1, 2):
        raise SystemExit(ended.returncode)
    verdict = json.loads(ended.stdout)
    summary, [engine] = verdict["summary"], verdict["decisions"]["engines"]
    console.print(f"[bold]{verdict['decision']}[/bold]: {verdict['reason']}", highlight=False)
    console.print(
        f"  {summary['same']} of {summary['pairs']} answers are the same; {verdict['evidence']}", highlight=False
    )
    for name, (before, after) in engine["settings"].items():
        console.print(f"  what changed: {name}, from {before} to {after}", highlight=False)
    if "reasons" in engine["difference"]:
        reasons = "; ".join(engine["difference"]["reasons"])
        console.print(f"  the first step that differs (A: served, B: candidate): {reasons}", highlight=False)
    if engine["settings"] and "figures" in engine["prediction"]:
        show_prediction(console, engine["prediction"])


def show_prediction(console: Console, prediction: dict[str, Any]) -> None:
    """What the candidate's setting would do to the conversations that were recorded, by a replay of them."""
    table = Table("figure", "measured", "replayed", "on the candidate", "change", title_justify="left")
    table.title = "what it would do to users, replayed from the first recording alone"
    for name, words in (
        ("ttft_p50_ms", "median first token, ms"),
        ("ttft_p95_ms", "p95 first token, ms"),
        ("output_tokens_per_s", "output tokens/s"),
    ):
        figure = prediction["figures"][name]
        numbers = [figure[each] for each in ("measured", "baseline", "candidate")]
        values = ["-" if number is None else f"{number:.1f}" for number in numbers]
        table.add_row(words, *values, "-" if figure["change"] is None else f"{100 * figure['change']:+.0f} %")
    console.print(table)
    console.print(f"[dim]  {prediction['trust']}[/dim]", highlight=False)


def judge_both(console: Console, folder: Path) -> None:
    """Verdicts on what was served: against itself, and against the same conversations under another setting."""
    console.print("\n[bold]the gate: this server against itself[/bold]")
    judge(console, folder / "served", folder / "served")
    console.print(f"\n[bold]the gate: against a candidate with {' '.join(CANDIDATE)}[/bold], asked the same")
    with (
        serving("0", folder, "candidate", *CANDIDATE) as (url, _),
        httpx2.Client(base_url=url, timeout=READ_S) as client,
    ):
        converse(client, Console(file=io.StringIO()))
    judge(console, folder / "served", folder / "candidate")


def main(arguments: list[str]) -> None:
    console = Console(width=min(Console().width, 110))
    keeps = "--keep" in arguments
    console.print("[bold]booting a cluster on the embedded model[/bold] (a demo model: small, and often wrong)")
    with tempfile.TemporaryDirectory(prefix="lockstep-demo-") as place:
        folder = Path(place)
        (folder / "key").write_text(secrets.token_hex(32))
        with serving(KEPT_PORT if keeps else "0", folder, "served") as (url, process):
            console.print(f"[bold]dashboard while it runs: {url}/[/bold]", highlight=False)
            with httpx2.Client(base_url=url, timeout=READ_S) as client:
                converse(client, console)
            if keeps:
                console.print(
                    f"\nstays up on {url}/v1 until Ctrl-C; dashboard: {url}/; try: lockstep ps --base-url {url}",
                    highlight=False,
                )
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()
        verify(console, folder / "served")
        if not keeps:
            judge_both(console, folder)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server that it started ends with it
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
