"""A loaded model: everything that an engine needs of it, whatever executes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.engine.tokenizer import Tokenizer
from lockstep.executors.base import Executor
from lockstep.executors.grammar_compiler import GrammarCompiler

if TYPE_CHECKING:
    from lockstep.executors.probe import ProbeReport


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An executor with its tokenizer and what the artifact says of sampling."""

    name: str
    source: str
    fingerprint: str
    """Of the artifact's content."""
    executor: Executor
    tokenizer: Tokenizer
    grammars: GrammarCompiler
    """Puts constraints to work for this model's vocabulary."""
    sampling_defaults: Mapping[str, float | int]
    num_blocks: int
    """Device blocks that were allocated."""
    num_host_blocks: int
    probe: ProbeReport | None
    """What the determinism probe saw at load; None: it was not run."""
    weights_bytes: int | None = None
    """Memory that loading took beside the blocks on the device: the graph as it was compiled, its weights in their
    packed form, the text side. Pages that stay mapped from files are not in it. None: it could not be measured."""

    @property
    def vocab_size(self) -> int:
        return self.executor.geometry.vocab_size

    def namespace(self, cache_salt: str) -> bytes:
        """Root of this model's prefix-cache hashes: the artifact's content and the caller's salt."""
        return f"{self.fingerprint}\0{cache_salt}".encode()

    def close(self) -> None:
        self.executor.close()
