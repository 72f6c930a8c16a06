"""Routed requests of a comparison: one request of ours against the two of a client that routes by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.comparison.workloads import NUM_ROUTED, Answer, Workload
from lockstep.bench.remote import RemoteServer
from lockstep.cluster.manifest import Manifest
from lockstep.cluster.manifest_file import parse
from lockstep.cluster.routing import Router, addressed
from lockstep.engine.request import Conversation, GenerationRequest
from lockstep.errors import RemoteError, UsageError
from lockstep.executors.sampling_params import SamplingParams

_PATH = "/v1/chat/completions"
_SUBJECTS = ("an invoice", "a crash", "a contract", "a refund", "a password", "a licence", "a delivery", "a price")
Message = Mapping[str, Any]


class RoutedRequests:
    """Questions to a manifest's cluster, and the requests of a client that routes them by itself.

    The entry model of our cluster generates as many tokens as its grammar allows; the requests to other servers have
    the same number of tokens. The choice of the specialist has no effect, because every name has the same file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._manifest: Manifest = parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read --routed {path} ({error})") from None
        router = Router.of(self._manifest)
        if router is None or not self._manifest.targets:
            raise UsageError(
                f"--routed {path} has no routes: its manifest needs `routing:` and the models that it names"
            )
        self._router = router
        self._entry_tokens = 8
        """Number of tokens of the entry model's answer, measured on our server."""

    def ask_ours(self, remote: RemoteServer, work: Workload, seed: int) -> list[Answer]:
        """Send one request per question; the times of its hops are in the answer."""
        answers = []
        for question in self._questions(seed):
            begin_s = time.perf_counter()
            body = {"messages": [question], "max_tokens": work.output, "temperature": 0, "ignore_eos": True}
            route = remote.post(_PATH, body).get("lockstep", {})
            end_s = time.perf_counter()
            if len(route.get("hops") or ()) != 2:
                raise RemoteError(f"{remote.target.url} did not route the request to a second model")
            entry = route["hops"][0]
            self._entry_tokens = entry["usage"]["completion_tokens"]
            answers.append(Answer(begin_s, (begin_s + entry["latency_ms"] / 1e3, end_s)))
        return answers

    def ask_others(self, remote: RemoteServer, model: str, work: Workload, seed: int) -> list[Answer]:
        """Send two requests per question, one after the other."""
        answers = []
        targets = self._manifest.targets
        for index, question in enumerate(self._questions(seed)):
            call = GenerationRequest(Conversation([question]), SamplingParams())
            hops = (
                (self._router.question(call), self._router.entry, self._entry_tokens),
                (call, targets[index % len(targets)], work.output),
            )
            begin_s, ends_s = time.perf_counter(), []
            for request, name, length in hops:
                prompt = addressed(request, self._manifest.entry(name)).prompt
                assert isinstance(prompt, Conversation)
                body = {"model": model, "messages": list(prompt.messages), "max_tokens": length, "temperature": 0}
                remote.post(_PATH, body | {"ignore_eos": True})
                ends_s.append(time.perf_counter())
            answers.append(Answer(begin_s, tuple(ends_s)))
        return answers

    def _questions(self, seed: int) -> Iterator[Message]:
        """Questions that differ for every seed, so that no cache holds them."""
        for index in range(NUM_ROUTED):
            subject = _SUBJECTS[index % len(_SUBJECTS)]
            yield {
                "role": "user",
                "content": f"Ticket {seed}-{index}: I have a question about {subject}. Who can help?",
            }


def ollama_lines(model: str) -> list[str]:
    """Commands for a comparison with Ollama on the same file: its Modelfile, creation of the model, and the
    comparison."""
    path = Path(model).resolve()
    return [
        "comparison with Ollama, which must be running:",
        f"  printf 'FROM {path}\\nPARAMETER temperature 0\\n' > Modelfile && ollama create {path.stem} -f Modelfile",
        f"  lockstep bench peers {model} --peer-url http://127.0.0.1:11434 # measures the first model of /v1/models",
    ]
