"""Every exception that Lockstep raises on purpose.

    LockstepError
    ├── UsageError                 the command line or a call was wrong before anything started
    ├── RemoteError                a server that we are a client of cannot be reached, or refuses
    ├── PlacingError               Ray cannot be reached, or does not carry out a request
    ├── TraceError                 a recording or a workload cannot be read
    ├── EvidenceError              what a release is to be judged by cannot be read
    ├── ConfigError                a limit or policy that cannot work, refused at construction
    │   ├── ManifestError              a manifest has faults (`problems` has all of them)
    │   └── OverBudgetError            its models need more than its budgets (`table` lists the needs)
    ├── RequestError               one request is refused or ended; the engine goes on
    │   ├── InvalidParameterError      a parameter has a wrong value (`param` names it)
    │   │   └── InvalidJsonError           a body is declared as JSON and is not JSON
    │   ├── PromptTooLongError         the prompt cannot fit the context or the KV pool
    │   ├── ModelNotFoundError         no model of that name is served
    │   ├── NotRecordedError           no recorded request has that prompt
    │   ├── ResponseNotFoundError      no response of that id is stored
    │   ├── StoredFileNotFoundError    no uploaded or written file of that id is kept
    │   ├── BatchNotFoundError         no batch of that id is kept
    │   ├── SessionNotFoundError       no session of that id is known
    │   ├── HostNotFoundError          no host of that name or address is known
    │   ├── HostNotDrainableError      replicas of a host would have no other one
    │   ├── NoManifestError            what only a cluster with a manifest can do
    │   ├── NotLoadableError           the model or manifest of a request cannot be loaded
    │   ├── QueueFullError             the bounded queue is full; try again later
    │   ├── UnavailableError           loading, draining or restarting; try again later (`retry_after_s`)
    │   │   └── ReplicaGoneError           its replica went; without a token yet, another replica may answer it
    │   │       └── WorkerLostError            the process that computed the answer ended
    │   ├── StorageError               what has to be kept cannot be written to disk now
    │   │   └── StorageFullError           there is no room for it
    │   ├── DeadlineError              time was up before the answer was complete
    │   │   └── QueueDeadlineError         time was up before anything was computed
    │   ├── ChatTemplateError          no template, or it failed on these messages
    │   └── RequestFailedError         the request was accepted and then ended with an error
    │       ├── RemoteFailedError          the other server that answers a remote model failed
    │       └── SlowReaderError            the client did not read its answer as fast as it came
    ├── ArtifactError              something on disk cannot be served (`path` names it)
    │   ├── ArtifactNotFoundError      nothing is there, or not what a model looks like
    │   ├── CorruptArtifactError       truncated, inconsistent or not finite
    │   ├── UnsupportedArtifactError   well-formed, but of an unsupported kind
    │   ├── MissingTokenizerError      weights without a tokenizer
    │   └── DownloadError              the hub refuses, or what it sends cannot be kept
    │       └── HubUnreachableError        no network, or the hub is out of order: a copy in the cache would do
    └── ExecutorError              a step could not be executed
        ├── InvalidPlanError           a plan would read or write outside the KV pool
        └── NumericsError              the model produced NaN or infinity

A message states what is wrong, where, and what is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_SHOWN_CHARS = 80
"""Of a wrong value in a message."""


class LockstepError(Exception):
    """Root of everything that Lockstep raises on purpose."""


class UsageError(LockstepError):
    """The command line or a call was wrong before anything started."""


class RemoteError(LockstepError):
    """A server that we are a client of cannot be reached, or refuses."""


class PlacingError(LockstepError):
    """Ray cannot be reached, or does not carry out a request."""


class TraceError(LockstepError):
    """A recording or a workload cannot be read; the message states where it is wrong."""


class EvidenceError(LockstepError):
    """Observations or a policy that a release is judged by cannot be read; the message states where it is wrong."""


class ConfigError(LockstepError):
    """A limit or policy that cannot work, refused at construction."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a manifest."""

    line: int
    """Counted from 1."""
    where: str
    """Path to the value, e.g. ``models.specialists[1].tier``; empty: the whole text."""
    message: str
    """What it is and what would be right, a sentence whose subject is `where`."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.where or 'it'} {self.message}"


class InvalidTextError(ConfigError):
    """A text of options has faults; nothing of it is used.

    Args:
        problems: all of them, in the order of their lines.
        name: what the text is called, e.g. its file.
    """

    def __init__(self, problems: Sequence[Problem], name: str = "text") -> None:
        super().__init__("\n".join(f"{name}, {problem}" for problem in problems))
        self.problems = tuple(problems)
        self.name = name


class ManifestError(InvalidTextError):
    """A manifest has faults."""

    def __init__(self, problems: Sequence[Problem], name: str = "manifest") -> None:
        super().__init__(problems, name)


class OverBudgetError(ConfigError):
    """The models of a manifest need more bytes than its budgets, or than the machine has.

    Args:
        message: which budget, by how much, and what would help.
        table: a line a model and a line a budget, their columns aligned.
    """

    def __init__(self, message: str, table: str) -> None:
        super().__init__(message)
        self.table = table


class RequestError(LockstepError):
    """One request is refused or ended; the engine goes on.

    Args:
        message: what was wrong and what would be right.
        param: the name of the request parameter at fault, or None.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameterError(RequestError):
    """A parameter has a wrong value."""

    @classmethod
    def of(cls, where: str, value: object, right: str, *, param: str | None = None) -> InvalidParameterError:
        """The usual message, with the value as it was given; ``where`` is the parameter's name unless ``param`` is."""
        shown = repr(value)
        if len(shown) > _MAX_SHOWN_CHARS:
            shown = f"{shown[: _MAX_SHOWN_CHARS - 3]}..."
        return cls(f"{where} is {shown}; it must be {right}", param=where if param is None else param)


class InvalidJsonError(InvalidParameterError):
    """A body is declared as JSON and is not JSON."""


class PromptTooLongError(RequestError):
    """The prompt cannot fit the context or the KV pool."""


class ModelNotFoundError(RequestError):
    """No model of that name is served."""


class NotRecordedError(RequestError):
    """No request of a recording has that prompt, or a beginning of it, so that there is no answer to give again."""


class ResponseNotFoundError(RequestError):
    """No response of that id is stored: it never was, it was deleted, or it was too old to be kept."""


class StoredFileNotFoundError(RequestError):
    """No file of that id is kept: it never was, it was deleted, or it expired."""


class BatchNotFoundError(RequestError):
    """No batch of that id is kept: it never was, or it was too old to be kept."""


class SessionNotFoundError(RequestError):
    """No session of that id is known: it never was, it was ended, or it was idle for too long to be kept."""


class HostNotFoundError(RequestError):
    """No host of that name or address is known, or the manifest names none."""


class HostNotDrainableError(RequestError):
    """A host cannot be drained, as its replicas would have no other one; nothing has changed."""


class NoManifestError(RequestError):
    """Only a cluster that a manifest describes can do that."""


class NotLoadableError(RequestError):
    """The model or manifest of a request cannot be loaded, however often it is tried; nothing has changed."""


class QueueFullError(RequestError):
    """The bounded queue is full; the same request may be sent again later."""


class UnavailableError(RequestError):
    """The server cannot answer now: loading, draining or restarting. The same request may be sent again later.

    Args:
        message: why, and until when.
        retry_after_s: seconds after which it is worth trying.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ReplicaGoneError(UnavailableError):
    """The replica that a request was sent to does not answer it: it moved, was unloaded, or was lost. Every error of
    this class is safe to retry at another replica as long as the client has no token."""


class WorkerLostError(ReplicaGoneError):
    """The process that computed the answer, or loaded the model, ended; another takes its place.

    Args:
        is_suspect: whether the process was about just this when it ended, so that this may be why.
    """

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0, is_suspect: bool = False
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.is_suspect = is_suspect


class StorageError(RequestError):
    """Data that has to be kept cannot be written to disk now; the message names the folder."""


class StorageFullError(StorageError):
    """There is no room on disk for what has to be kept."""


class LinkRefusedError(LockstepError):
    """Two processes refuse their connection over a network: another secret, another version."""


class DeadlineError(RequestError):
    """Time was up before the answer was complete."""


class QueueDeadlineError(DeadlineError):
    """Time was up before anything was computed."""


class ChatTemplateError(RequestError):
    """The model has no chat template, or it failed on these messages."""


class RequestFailedError(RequestError):
    """The request was accepted and then ended with an error."""


class SlowReaderError(RequestFailedError):
    """The client did not read its answer as fast as it came, and too much of it waited."""


class RemoteFailedError(RequestFailedError):
    """The other server that answers a remote model cannot be reached, broke off, or sent an invalid answer.

    Args:
        retry_after_s: seconds after which it is worth trying; None: unknown.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ArtifactError(LockstepError):
    """Something on disk cannot be served.

    Args:
        message: what was wrong and what would be right.
        path: the file or directory at fault, or None when there is no path to name.
    """

    def __init__(self, message: str, *, path: Path | str | None = None) -> None:
        super().__init__(message if path is None else f"{path}: {message}")
        self.path = path


class ArtifactNotFoundError(ArtifactError):
    """Nothing is there, or not what a model looks like."""


class CorruptArtifactError(ArtifactError):
    """Truncated, inconsistent or not finite."""


class UnsupportedArtifactError(ArtifactError):
    """Well-formed, but of an unsupported kind."""


class MissingTokenizerError(ArtifactError):
    """Weights without a tokenizer."""


class DownloadError(ArtifactError):
    """The hub refuses, or what it sends cannot be kept."""


class HubUnreachableError(DownloadError):
    """No network, or the hub is out of order: a copy in the cache would do."""


class ExecutorError(LockstepError):
    """A step could not be executed."""


class InvalidPlanError(ExecutorError):
    """A plan would read or write outside the KV pool."""


class NumericsError(ExecutorError):
    """The model produced NaN or infinity."""
