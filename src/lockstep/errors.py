"""Every exception that Lockstep raises on purpose.

    LockstepError
    ├── UsageError                 the command line or a call is wrong; nothing was started
    ├── RemoteError                another server cannot be reached or rejects the request
    ├── PlacingError               Ray cannot be reached or does not carry out a request
    ├── TraceError                 a recording or a workload cannot be read
    ├── EvidenceError              observations or a policy of the release gate cannot be read
    ├── ConfigError                a limit or policy cannot work; it is rejected at construction
    │   ├── ManifestError              a manifest has faults (`problems` has all of them)
    │   └── OverBudgetError            the models of a manifest exceed its budgets (`table` lists their needs)
    ├── RequestError               one request is rejected or ended; the engine continues
    │   ├── InvalidParameterError      a parameter has a wrong value (`param` names it)
    │   │   └── InvalidJsonError           a body is declared as JSON and is not JSON
    │   ├── PromptTooLongError         the prompt cannot fit the context or the KV pool
    │   ├── ModelNotFoundError         no model of that name is served
    │   ├── NotRecordedError           no recorded request has that prompt
    │   ├── ResponseNotFoundError      no response of that id is stored
    │   ├── StoredFileNotFoundError    no uploaded or written file of that id is stored
    │   ├── BatchNotFoundError         no batch of that id is stored
    │   ├── SessionNotFoundError       no session of that id is stored
    │   ├── HostNotFoundError          no host has that name or address
    │   ├── HostNotDrainableError      replicas of a host cannot move to another host
    │   ├── NoManifestError            the request requires a cluster with a manifest
    │   ├── NotLoadableError           the model or manifest of a request cannot be loaded
    │   ├── QueueFullError             the bounded queue is full; try again later
    │   ├── UnavailableError           loading, draining or restarting; try again later (`retry_after_s`)
    │   │   └── ReplicaGoneError           the request's replica is gone; another one may answer if no token was sent
    │   │       └── WorkerLostError            the process that computed the answer ended
    │   ├── StorageError               data that must be stored cannot be written to disk now
    │   │   └── StorageFullError           the disk has no room for it
    │   ├── DeadlineError              the deadline passed before the answer was complete
    │   │   └── QueueDeadlineError         the deadline passed before anything was computed
    │   ├── ChatTemplateError          the model has no chat template, or it failed on these messages
    │   └── RequestFailedError         the request was accepted and then ended with an error
    │       ├── RemoteFailedError          the server behind a remote model failed
    │       └── SlowReaderError            the client read its answer too slowly
    ├── ArtifactError              a file or directory cannot be served as a model (`path` names it)
    │   ├── ArtifactNotFoundError      the path does not exist, or has no model
    │   ├── CorruptArtifactError       the files are truncated or inconsistent, or have values that are not finite
    │   ├── UnsupportedArtifactError   the files are well-formed, but of an unsupported kind
    │   ├── MissingTokenizerError      the weights have no tokenizer
    │   └── DownloadError              the hub rejects the request, or a download cannot be stored
    │       └── HubUnreachableError        the hub cannot be reached or is out of order; a cached copy still works
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
"""Maximum characters of a wrong value that a message repeats."""


class LockstepError(Exception):
    """Root of all exceptions that Lockstep raises on purpose."""


class UsageError(LockstepError):
    """The command line or a call is wrong; nothing was started."""


class RemoteError(LockstepError):
    """Another server cannot be reached or rejects the request."""


class PlacingError(LockstepError):
    """Ray cannot be reached or does not carry out a request."""


class TraceError(LockstepError):
    """A recording or a workload cannot be read; the message gives the location of the fault."""


class EvidenceError(LockstepError):
    """Observations or a policy of the release gate cannot be read; the message gives the location of the fault."""


class ConfigError(LockstepError):
    """A limit or policy cannot work; it is rejected at construction."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault of a manifest."""

    line: int
    """Line of the fault, counted from 1."""
    where: str
    """Path to the value, e.g. ``models.specialists[1].tier``; empty: the whole text."""
    message: str
    """The fault and its correction: the rest of a sentence whose subject is `where`."""

    def __str__(self) -> str:
        return f"line {self.line}: {self.where or 'it'} {self.message}"


class InvalidTextError(ConfigError):
    """A text of options has faults. None of its values is used.

    Args:
        problems: all faults, in the order of their lines.
        name: name of the text in messages, e.g. its file.
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
    """The models of a manifest need more bytes than its budgets allow or the machine has.

    Args:
        message: the exceeded budget, the excess, and the correction.
        table: one line per model and one per budget, in aligned columns.
    """

    def __init__(self, message: str, table: str) -> None:
        super().__init__(message)
        self.table = table


class RequestError(LockstepError):
    """One request is rejected or ended; the engine continues.

    Args:
        message: the fault and its correction.
        param: name of the wrong request parameter; None: the fault is not in one parameter.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidParameterError(RequestError):
    """A parameter has a wrong value."""

    @classmethod
    def of(cls, where: str, value: object, right: str, *, param: str | None = None) -> InvalidParameterError:
        """Make the error with the usual message, which repeats the given value.

        Args:
            where: the value's location, for the message.
            right: the valid values, to follow "it must be".
            param: name of the parameter; None: the same as ``where``.
        """
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
    """No request of the recording has that prompt or a beginning of it, so there is no recorded answer to return."""


class ResponseNotFoundError(RequestError):
    """No response of that id is stored: the id is unknown, or the response was deleted or removed for its age."""


class StoredFileNotFoundError(RequestError):
    """No file of that id is stored: the id is unknown, or the file was deleted or has expired."""


class BatchNotFoundError(RequestError):
    """No batch of that id is stored: the id is unknown, or the batch was removed for its age."""


class SessionNotFoundError(RequestError):
    """No session of that id is stored: the id is unknown, or the session was ended or removed after an idle time."""


class HostNotFoundError(RequestError):
    """No host has that name or address, or the manifest has no hosts."""


class HostNotDrainableError(RequestError):
    """A host cannot be drained because its replicas cannot move to another host. Nothing was changed."""


class NoManifestError(RequestError):
    """The request requires a cluster that a manifest describes."""


class NotLoadableError(RequestError):
    """The model or manifest of a request cannot be loaded, and a retry would not help. Nothing was changed."""


class QueueFullError(RequestError):
    """The bounded queue is full. The same request may be sent again later."""


class UnavailableError(RequestError):
    """The server cannot answer now: loading, draining or restarting. The same request may be sent again later.

    Args:
        message: the reason, and how long it lasts.
        retry_after_s: seconds after which the client may retry.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ReplicaGoneError(UnavailableError):
    """The replica of a request cannot answer it: it moved, was unloaded or was lost. Requests with errors of this class
    may be sent to another replica as long as the client has received no token."""


class WorkerLostError(ReplicaGoneError):
    """The process that computed the answer or loaded the model ended. A new process replaces it.

    Args:
        is_suspect: the process worked on this request or model when it ended, so that this may be the cause.
    """

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0, is_suspect: bool = False
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.is_suspect = is_suspect


class StorageError(RequestError):
    """Data that must be stored cannot be written to disk now; the message names the folder."""


class StorageFullError(StorageError):
    """The disk has no room for data that must be stored."""


class LinkRefusedError(LockstepError):
    """Two processes reject their connection over a network because their secrets or versions differ."""


class DeadlineError(RequestError):
    """The deadline passed before the answer was complete."""


class QueueDeadlineError(DeadlineError):
    """The deadline passed before anything was computed."""


class ChatTemplateError(RequestError):
    """The model has no chat template, or it failed on these messages."""


class RequestFailedError(RequestError):
    """The request was accepted and then ended with an error."""


class SlowReaderError(RequestFailedError):
    """The client read its answer too slowly, and the buffer of unread output is full."""


class RemoteFailedError(RequestFailedError):
    """The server behind a remote model cannot be reached, ended its answer early, or sent an invalid answer.

    Args:
        retry_after_s: seconds after which the client may retry; None: unknown.
    """

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class ArtifactError(LockstepError):
    """A file or directory cannot be served as a model.

    Args:
        message: the fault and its correction.
        path: file or directory with the error; None: the error concerns no path.
    """

    def __init__(self, message: str, *, path: Path | str | None = None) -> None:
        super().__init__(message if path is None else f"{path}: {message}")
        self.path = path


class ArtifactNotFoundError(ArtifactError):
    """The path does not exist, or has no model."""


class CorruptArtifactError(ArtifactError):
    """The files are truncated or inconsistent, or have values that are not finite."""


class UnsupportedArtifactError(ArtifactError):
    """The files are well-formed, but of an unsupported kind."""


class MissingTokenizerError(ArtifactError):
    """The weights have no tokenizer."""


class DownloadError(ArtifactError):
    """The hub rejects the request, or a download cannot be stored."""


class HubUnreachableError(DownloadError):
    """The hub cannot be reached or is out of order. A copy in the cache can still be used."""


class ExecutorError(LockstepError):
    """A step could not be executed."""


class InvalidPlanError(ExecutorError):
    """A plan would read or write outside the KV pool."""


class NumericsError(ExecutorError):
    """The model produced NaN or infinity."""
