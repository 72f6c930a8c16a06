"""One engine in a separate process for `lockstep bench peers`: reads prompts as JSON lines, writes times of tokens.

It runs with any Python that has the engine, so that peers need not share Lockstep's environment: it imports no Lockstep
module before a command needs it. It is started as ``python backend_process.py ENGINE MODEL THREADS MAX_SEQS
MAX_TOKENS``. Each engine runs as its documentation recommends for speed; where that depends on the workload, the ways
are tried with a short one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, Union

import numpy as np

Prompts = Sequence[Sequence[int]]
Times = list[list[float]]
"""Seconds from the start to each token of each prompt."""


class LlamaCpp:
    """llama.cpp by its low-level interface: whole prompts in batches, then all sequences decode in one batch.

    It has only an argmax as sampler, no scheduler and no text, so it does less than any server that uses it.
    """

    BATCH, PART = 2048, 512

    def __init__(self, model: str, threads: int, max_seqs: int, max_tokens: int) -> None:
        import llama_cpp

        self.lib: Any = llama_cpp
        self.version = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"
        self._threads = threads
        self.lib.llama_backend_init()
        parameters = self.lib.llama_model_default_params()
        if b"AMX_INT8 = 1" in self.lib.llama_print_system_info():
            parameters.use_extra_bufts = False  # AMX repacking crashes on batches of several sequences
        self._model = self.lib.llama_model_load_from_file(model.encode(), parameters)
        if not self._model:
            raise ValueError("llama.cpp cannot load this file")
        self._vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self._model))
        self._ways = {
            "flash attention on, KV cache per sequence": (True, False),
            "flash attention off, KV cache per sequence": (False, False),
            "flash attention on, KV cache shared": (True, True),
        }

    def ways(self, num_seqs: int) -> list[str]:
        """Possible ways; one sequence has nothing to share."""
        return list(self._ways)[: 2 if num_seqs == 1 else 3]

    def run(self, prompts: Prompts, num_output: int, way: str) -> Times:
        flash, unified = self._ways[way]
        context = self._context(len(prompts), max(map(len, prompts)) + num_output, flash, unified)
        batch = self.lib.llama_batch_init(self.BATCH, 0, 1)
        try:
            self._decode(context, batch, [(0, 0, 300, True)])  # the first pass allocates
            self.lib.llama_memory_clear(self.lib.llama_get_memory(context), True)
            return self._answers(context, batch, prompts, num_output)
        finally:
            self.lib.llama_batch_free(batch)
            self.lib.llama_free(context)

    def _context(self, num_seqs: int, length: int, flash: bool, unified: bool) -> Any:
        parameters = self.lib.llama_context_default_params()
        parameters.n_ctx = num_seqs * (-(-length // 256) * 256)
        parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = self.BATCH, self.PART, num_seqs
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.flash_attn_type, parameters.kv_unified, parameters.no_perf = int(flash), unified, True
        context = self.lib.llama_init_from_model(self._model, parameters)
        if not context:
            raise ValueError(f"llama.cpp has no room for {num_seqs} contexts of {length} tokens")
        return context

    def _answers(self, context: Any, batch: Any, prompts: Prompts, num_output: int) -> Times:
        times: Times = [[] for _ in prompts]
        last = [0] * len(prompts)
        started_s = time.perf_counter()

        def pass_of(rows: list[tuple[int, int, int, bool]]) -> None:
            drawn = self._decode(context, batch, rows)
            now_s = time.perf_counter() - started_s
            for seq, token in drawn:
                last[seq] = token
                times[seq].append(now_s)

        rows: list[tuple[int, int, int, bool]] = []
        for seq, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                rows.append((seq, position, token, position == len(prompt) - 1))
                if len(rows) == self.BATCH:
                    pass_of(rows)
                    rows = []
        if rows:
            pass_of(rows)
        for step in range(num_output - 1):
            pass_of([(seq, len(prompt) + step, last[seq], True) for seq, prompt in enumerate(prompts)])
        return times

    def _decode(self, context: Any, batch: Any, rows: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """One pass over rows of sequence, position, token and whether its logits are needed; returns the sampled
        tokens."""
        batch.n_tokens = len(rows)
        for index, (seq, position, token, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, seq
        code = self.lib.llama_decode(context, batch)
        if code:
            raise ValueError(f"llama_decode failed with {code}")
        drawn = []
        for index, (seq, _, _, wanted) in enumerate(rows):
            if wanted:
                logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, index), (self._vocabulary,))
                drawn.append((seq, int(logits.argmax())))
        return drawn


class OpenVINOGenAI:
    """OpenVINO GenAI's continuous batching; it reads some GGUF files, and folders with its IR."""

    def __init__(self, model: str, threads: int, max_seqs: int, max_tokens: int) -> None:
        import openvino_genai

        self.lib: Any = openvino_genai
        self._tensor: Any = importlib.import_module("openvino").Tensor
        self.version = f"OpenVINO GenAI {openvino_genai.__version__}"
        self._limits = (model, threads, max_seqs, max_tokens)
        self._ways = {f"{tokens} tokens a step": tokens for tokens in (2048, 256)}
        self._way = ""
        self._loaded: Any = None
        self._pipeline_of(next(iter(self._ways)))
        self._num_requests = 0

    def ways(self, num_seqs: int) -> list[str]:
        """All ways at first; later only the chosen one, since another one would need to load the model again."""
        return [self._way] if self._num_requests else list(self._ways)

    def _pipeline(self, model: str, threads: int, max_seqs: int, max_tokens: int, step_tokens: int) -> Any:
        scheduling = self.lib.SchedulerConfig()
        scheduling.num_kv_blocks = max_tokens // 32 + 2 * max_seqs
        scheduling.max_num_batched_tokens, scheduling.max_num_seqs = step_tokens, max_seqs
        scheduling.enable_prefix_caching = False
        try:
            return self.lib.ContinuousBatchingPipeline(model, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads}, {})
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"OpenVINO GenAI cannot load this file ({str(error).splitlines()[-1]})") from None

    def _pipeline_of(self, way: str) -> Any:
        if way != self._way:
            self._loaded = None  # one at a time, because each holds the weights
            self._way, self._loaded = way, self._pipeline(*self._limits, self._ways[way])
        return self._loaded

    def run(self, prompts: Prompts, num_output: int, way: str) -> Times:
        pipeline = self._pipeline_of(way)
        request = self.lib.GenerationConfig()
        request.max_new_tokens, request.ignore_eos, request.do_sample = num_output, True, False
        times: Times = [[] for _ in prompts]
        tensors = [self._tensor(np.array([prompt], np.int64)) for prompt in prompts]
        started_s = time.perf_counter()
        handles = []
        for tensor in tensors:
            self._num_requests += 1
            handles.append(pipeline.add_request(self._num_requests, tensor, request))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now_s = time.perf_counter() - started_s
            for came, handle in zip(times, handles):  # noqa: B905 - Python 3.9 has no strict
                while handle.can_read():
                    came += [now_s] * sum(len(output.generated_ids) for output in handle.read().values())
        return times


class MistralRs:
    """mistral.rs by its Python API, which takes texts: the prompts' tokens as text, with one thread per stream."""

    def __init__(self, model: str, threads: int, max_seqs: int, max_tokens: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # read when the library starts
        try:
            self.lib: Any = importlib.import_module("mistralrs")
        except ImportError:
            raise ImportError("pip install mistralrs; or start `mistralrs serve` and give its --peer-url") from None
        self.version = f"mistral.rs {metadata.version('mistralrs')}"
        folder, name = os.path.split(os.path.abspath(model))
        which = self.lib.Which.GGUF(quantized_model_id=folder, quantized_filename=name)
        self._runner = self.lib.Runner(which=which, max_seqs=max_seqs, prefix_cache_n=0)

    def ways(self, num_seqs: int) -> list[str]:
        return ["defaults"]

    def run(self, prompts: Prompts, num_output: int, way: str) -> Times:
        """Tokens of answers that end early are missing, because its requests cannot ignore the end token."""
        texts = [self._runner.detokenize_text(list(prompt), False) for prompt in prompts]
        started_s = time.perf_counter()

        def answer(text: str) -> list[float]:
            request = self.lib.ChatCompletionRequest(
                messages=text, model="default", max_tokens=num_output, temperature=0.0, stream=True
            )
            return [time.perf_counter() - started_s for _ in self._runner.send_chat_completion_request(request)]

        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(answer, texts))


class Lockstep:
    """Lockstep's engine with its defaults."""

    def __init__(self, model: str, threads: int, max_seqs: int, max_tokens: int) -> None:
        from lockstep.engine.llm import LLM
        from lockstep.engine.options import EngineOptions, LoadOptions
        from lockstep.executors.options import ExecutorOptions
        from lockstep.version import __version__

        engine = EngineOptions(max_num_seqs=max_seqs)
        self._llm = LLM(model, LoadOptions(engine, ExecutorOptions(threads=threads)))
        self.version = f"Lockstep {__version__}"
        self.vocabulary = self._llm.model.vocab_size

    def ways(self, num_seqs: int) -> list[str]:
        return ["defaults"]

    def run(self, prompts: Prompts, num_output: int, way: str) -> Times:
        from lockstep.engine.outputs import TokenOutput
        from lockstep.engine.request import GenerationRequest
        from lockstep.executors.sampling_params import SamplingParams

        times: Times = [[] for _ in prompts]
        num_done = 0
        parameters = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        engine = self._llm.engine

        def collector(came: list[float]) -> Callable[[TokenOutput], None]:
            def collect(output: TokenOutput) -> None:
                nonlocal num_done
                came.extend([time.perf_counter() - started_s] * len(output.token_ids))
                num_done += output.request is not None
                if output.error is not None:
                    raise ValueError(str(output.error))

            return collect

        started_s = time.perf_counter()
        for prompt, came in zip(prompts, times, strict=True):
            engine.submit(GenerationRequest(tuple(prompt), parameters), collector(came))
        while num_done < len(prompts):
            engine.step()
        return times


Engine = Union[LlamaCpp, OpenVINOGenAI, MistralRs, Lockstep]  # noqa: UP007 - Python 3.9 has no other way
ENGINES: dict[str, type[Engine]] = {
    "lockstep": Lockstep,
    "llama.cpp": LlamaCpp,
    "openvino-genai": OpenVINOGenAI,
    "mistral.rs": MistralRs,
}


def fastest(engine: Engine, prompts: Prompts, num_output: int) -> tuple[str, Times]:
    """Way that answers these prompts first, each after a short warm-up, and its times; it was the last one to run."""
    ways = engine.ways(len(prompts))
    seen: dict[str, Times] = {}
    for way in ways:
        if len(ways) > 1:
            engine.run([prompts[0][:64]], 2, way)
        seen[way] = engine.run(prompts, num_output, way)
    best = min(seen, key=lambda way: max(answer[-1] for answer in seen[way]))
    return best, seen[best] if best == ways[-1] else engine.run(prompts, num_output, best)


def main(arguments: Sequence[str]) -> None:
    """Handle requests from standard input until it ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries is not part of the protocol
    name, model, *numbers = arguments

    def write(**fields: Any) -> None:
        out.write(json.dumps(fields) + "\n")

    try:
        engine = ENGINES[name](model, *map(int, numbers))
    except ImportError as error:
        write(error=f"not installed for {sys.executable} ({error})")
        return
    except Exception as error:
        write(error=str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        return
    write(version=engine.version, vocabulary=getattr(engine, "vocabulary", None))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            prompts, num_output, way = request["prompts"], request["num_output"], request["way"]
            way, times = (way, engine.run(prompts, num_output, way)) if way else fastest(engine, prompts, num_output)
            write(way=way, times=times)
        except Exception as error:
            write(error=str(error) or type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1:])
