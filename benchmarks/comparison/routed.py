"""Routed requests of a race: one request of ours against the two that a client sends who routes by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.comparison.workloads import NUM_ROUTED, Answer, Work
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
    """Questions to a manifest's cluster, and the requests of a client that has to route them itself.

    The entry model of our cluster answers with as many tokens as its grammar leaves open; the other servers get a
    request for as many. The choice of the specialist makes no difference, because every name has the same file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._manifest: Manifest = parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--routed {path} cannot be read ({error})") from None
        router = Router.of(self._manifest)
        if not isinstance(router, Router) or not self._manifest.targets:
            raise UsageError(f"--routed {path} routes nothing: its manifest needs `routing:` and models that it names")
        self._router = router
        self._entry_tokens = 8
        """Tokens of the entry's answer, as ours was seen to take them."""

    def ask_ours(self, remote: RemoteServer, work: Work, seed: int) -> list[Answer]:
        """Send one request per question; the times of its hops come from the answer."""
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

    def ask_others(self, remote: RemoteServer, model: str, work: Work, seed: int) -> list[Answer]:
        """Two requests each, one after the other."""
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
        """Questions that differ for every seed, so that no cache has them."""
        for index in range(NUM_ROUTED):
            subject = _SUBJECTS[index % len(_SUBJECTS)]
            yield {
                "role": "user",
                "content": f"Ticket {seed}-{index}: I have a question about {subject}. Who can help?",
            }


def ollama_lines(model: str) -> list[str]:
    """Commands that compare with Ollama on the same file: its Modelfile, the model made of it, and the comparison."""
    path = Path(model).resolve()
    return [
        "beside Ollama, which must be running:",
        f"  printf 'FROM {path}\\nPARAMETER temperature 0\\n' > Modelfile && ollama create {path.stem} -f Modelfile",
        f"  lockstep bench peers {model} --peer-url http://127.0.0.1:11434 # measures the first model of /v1/models",
    ]
