"""Hub sources: parse ``hf://org/name[@revision][#file]``, and select the required files of a repository.

Works on names and file listings only. Downloads are in download.py, the cache in cache.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.errors import ArtifactNotFoundError, UnsupportedArtifactError
from lockstep.shown import size

SCHEME = "hf://"
DEFAULT_REVISION = "main"
EXPECTED_FORM = "the name of a model on the hub is hf://org/name, optionally with @revision and #file.gguf"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_SOURCE = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9._/-]{{1,200}}))?(?:#(.{{1,400}}))?", re.ASCII)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
"""Names of the weights in a repository: the index of several files, or a single file."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of a PEFT directory."""
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    INDEX,
    "modules.json",
    "config_sentence_transformers.json",
)
_LENGTHS = re.compile(r"sentence_[a-z-]+_config\.json", re.ASCII)
"""Files with the maximum length of a text, by versions of sentence-transformers."""
_MODULE_FILE = re.compile(r"[0-9]+_[A-Za-z]+/(config\.json|model\.safetensors)", re.ASCII)
"""Files of sentence-transformers' modules, each of which has a directory."""
_TOKENIZER = re.compile(r"tokenizer[a-z_]*\.json")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf")
_PROJECTOR = re.compile(r"(^|/)mmproj[^/]*$", re.IGNORECASE)
_MAX_LISTED = 40
"""Maximum number of file names in an error message."""

DownloadProgress = Callable[[str, int, int], None]
"""Called with the name of the current file, the bytes downloaded so far and the total bytes of all files."""


@dataclass(frozen=True, slots=True)
class HubSource:
    """A model on the hub: a repository, a revision, and the file in a GGUF repository."""

    repo: str
    """Repository name, ``org/name``."""
    revision: str = DEFAULT_REVISION
    """Branch, tag or commit."""
    file: str | None = None
    """Path in the repository, or a quantization in the file name, such as ``Q4_K_M``. None: the whole repository."""

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
    """Parse ``hf://org/name[@revision][#file]``. The scheme is optional.

    Raises:
        ArtifactNotFoundError: the text does not have this form.
    """
    source = match_hub_source(text.removeprefix(SCHEME))
    if source is None:
        raise ArtifactNotFoundError(f"not the name of a model on the hub; {EXPECTED_FORM}", path=text)
    return source


def match_hub_source(text: str) -> HubSource | None:
    """Parse ``org/name[@revision][#file]``. Return None if the text does not have this form."""
    found = _SOURCE.fullmatch(text)
    if found is None or ".." in text or "--" in found[1]:  # not allowed in names; `--` is the cache's separator
        return None
    return HubSource(found[1], found[2] or DEFAULT_REVISION, found[3])


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a revision."""

    path: str
    num_bytes: int
    digest: str
    """SHA-256 of the content, or git's SHA-1 for files stored in git. It is the file name in the hub cache."""


Listing = Mapping[str, RemoteFile]
"""Files of a revision by path."""


def is_gguf(source: HubSource, listing: Listing) -> bool:
    """True if the source is one GGUF file; false if the repository is a Hugging Face directory.

    Raises:
        ArtifactNotFoundError, UnsupportedArtifactError: the repository contains neither.
    """
    if source.file is not None:
        return True
    if any(_is_weights(name) for name in listing) and "config.json" in listing:
        return False
    if any(name.endswith(".gguf") for name in listing):
        return True
    if "adapter_config.json" in listing:
        raise UnsupportedArtifactError("an adapter; specify the model that it adapts", path=str(source))
    pickles = [name for name in sorted(listing) if name.endswith((".bin", ".pt", ".pth"))]
    hint = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
    raise ArtifactNotFoundError(
        f"the repository has no model: config.json with *.safetensors, or *.gguf, is expected{hint}",
        path=str(source),
    )


def text_files(listing: Listing) -> list[str]:
    """Required files of a Hugging Face directory other than its weights, in order of name."""
    return sorted(
        name
        for name in listing
        if name in _TEXT_FILES or any(form.fullmatch(name) for form in (_TOKENIZER, _MODULE_FILE, _LENGTHS))
    )


def weight_files_without_index(source: HubSource, listing: Listing) -> list[str]:
    """The only weights file of a repository without an index. Raises ArtifactNotFoundError if it is ambiguous."""
    names = sorted(name for name in listing if _is_weights(name))
    if SINGLE in names:
        return [SINGLE]
    if len(names) == 1:
        return names
    raise ArtifactNotFoundError(f"{len(names)} .safetensors files but no {INDEX} to select them", path=str(source))


def gguf_file(source: HubSource, listing: Listing) -> str:
    """The GGUF file of a source: the named file, the only file of a quantization, or the only file of the repository.

    Raises:
        ArtifactNotFoundError: no file or several files match; the message lists them with their sizes.
        UnsupportedArtifactError: the file is part of a split file.
    """
    files = sorted(name for name in listing if name.endswith(".gguf") and not _PROJECTOR.search(name))
    chosen = source.file
    found = files if chosen is None else [chosen] if chosen in listing else _of_quantisation(chosen, files)
    if len(found) == 1:
        if _PART.search(found[0]):
            raise UnsupportedArtifactError(
                f"{found[0]} is one part of a split GGUF; another file of the repository, or the parts merged on disk, "
                f"can be served: {_sized(files, listing)}",
                path=str(source),
            )
        if not found[0].endswith(".gguf"):
            raise ArtifactNotFoundError(
                f"{found[0]} is not a GGUF file; without '#' the repository is one model", path=str(source)
            )
        return found[0]
    if not files:
        raise ArtifactNotFoundError("the repository has no .gguf file; omit '#'", path=str(source))
    if chosen is None:
        problem = f"a repository of {len(files)} GGUF files; add one with '#'"
    elif found:
        problem = f"#{chosen} matches {len(found)} files; specify one of them"
    else:
        problem = f"no file {chosen!r}; the repository has"
    raise ArtifactNotFoundError(f"{problem}: {_sized(found or files, listing)}", path=str(source))


def cached_gguf(source: HubSource, names: list[str]) -> str | None:
    """The cached GGUF file of a source among ``names``; None if it is missing or ambiguous."""
    if source.file in names:
        return source.file
    found = names if source.file is None else _of_quantisation(source.file, names)
    return found[0] if len(found) == 1 else None


def is_whole_gguf(name: str) -> bool:
    """True if the name is that of a complete language model: not a part of a split file, no image projector
    (mmproj)."""
    return name.endswith(".gguf") and not _PART.search(name) and not _PROJECTOR.search(name)


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and not name.startswith(("consolidated", "adapter_"))


def _of_quantisation(quantisation: str, names: list[str]) -> list[str]:
    """Files whose names contain the quantization as a whole word: Q4_K_M does not match ``x-Q4_K_M_L.gguf``."""
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(quantisation)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [name for name in names if word.search(name)]


def _sized(names: list[str], listing: Listing) -> str:
    shown = [f"{name} ({size(listing[name].num_bytes)})" for name in names[:_MAX_LISTED]]
    return ", ".join(shown) + (", …" if len(names) > _MAX_LISTED else "")
