"""What a user calls a model on the hub: ``hf://org/name[@revision][#file]``, as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.errors import ArtifactNotFoundError

SCHEME = "hf://"
DEFAULT_REVISION = "main"
WHAT_IS_RIGHT = "a model on the hub is called hf://org/name, with @revision and #file.gguf where they are needed"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_SOURCE = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9._/-]{{1,200}}))?(?:#(.{{1,400}}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository, a revision of it, and for GGUF repositories the file."""

    repo: str
    """``org/name``."""
    revision: str = DEFAULT_REVISION
    """A branch, tag or commit."""
    file: str | None = None
    """A path in the repository, or what tells its quantisation, e.g. ``Q4_K_M``. None: the repository is one model."""

    def __str__(self) -> str:
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{SCHEME}{self.repo}{revision}" + ("" if self.file is None else f"#{self.file}")

    @property
    def name(self) -> str:
        """The repository's name without its owner."""
        return self.repo.partition("/")[2]

    def with_file(self, file: str) -> HubSource:
        return HubSource(self.repo, self.revision, file)


def parse_hub_source(text: str) -> HubSource:
    """Read ``hf://org/name[@revision][#file]``; the scheme may be absent.

    Raises:
        ArtifactNotFoundError: it is not of this form.
    """
    source = match_hub_source(text.removeprefix(SCHEME))
    if source is None:
        raise ArtifactNotFoundError(f"not the name of a model on the hub; {WHAT_IS_RIGHT}", path=text)
    return source


def match_hub_source(text: str) -> HubSource | None:
    """Read ``org/name[@revision][#file]``; None where the text has another form."""
    found = _SOURCE.fullmatch(text)
    if found is None or ".." in text or "--" in found[1]:  # neither can be in a name, and `--` parts names in the cache
        return None
    return HubSource(found[1], found[2] or DEFAULT_REVISION, found[3])
