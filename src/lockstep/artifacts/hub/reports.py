"""What the hub and the network say, in one line that names what would be right."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.artifacts.hub.source import WHAT_IS_RIGHT, HubSource
from lockstep.errors import ArtifactError, ArtifactNotFoundError, DownloadError, HubUnreachableError

_UNAUTHORISED, _FORBIDDEN, _TOO_MANY = 401, 403, 429


@contextmanager
def reported(source: HubSource) -> Iterator[None]:
    """Raise what goes wrong in the block as ours.

    Raises:
        HubUnreachableError: no network, or the hub is out of order: a copy in the cache would do.
        ArtifactNotFoundError: no such repository, revision or file.
        DownloadError: refused, or the disk is full.
    """
    from httpx2 import HTTPError, InvalidURL
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise HubUnreachableError(
            "HF_HUB_OFFLINE is set, so the hub is not asked; unset it, or run what was pulled before",
            path=str(source),
        ) from None
    except HfHubHTTPError as error:
        raise _refused(source, error) from error
    except (HTTPError, InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachableError(
            f"the hub cannot be reached ({reason}); what was pulled before runs without it, anything else needs a "
            "network, or HF_ENDPOINT set to a mirror",
            path=str(source),
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise DownloadError(f"the cache cannot be written ({error})", path=str(source)) from error
        raise DownloadError(
            "the disk is full; free some space (lockstep list, lockstep rm) or set HF_HOME to another disk",
            path=str(source),
        ) from error


def _refused(source: HubSource, error: Exception) -> ArtifactError:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    assert isinstance(error, HfHubHTTPError)
    status, where = error.response.status_code, str(source)
    if isinstance(error, GatedRepoError):
        place = f"{_endpoint()}/{source.repo}"
        hint = (
            "the account of the token in use has no access yet; ask for it there"
            if _has_token()
            else "ask for access there and set HF_TOKEN to a token of the account"
        )
        return DownloadError(f"gated: {place} asks for consent first; {hint}", path=where)
    if isinstance(error, RevisionNotFoundError):
        return ArtifactNotFoundError(
            f"the repository has no revision {source.revision!r}; a branch, tag or commit is expected after '@'",
            path=where,
        )
    if isinstance(error, EntryNotFoundError):
        return ArtifactNotFoundError("a file of the repository is gone; pull again", path=where)
    if isinstance(error, RepositoryNotFoundError):
        hint = "the token in use cannot see it" if _has_token() else "HF_TOKEN is not set"
        return ArtifactNotFoundError(
            f"the hub knows no such model, or it is private and {hint}; {WHAT_IS_RIGHT}", path=where
        )
    if status in (_UNAUTHORISED, _FORBIDDEN):
        return DownloadError(
            f"the hub refused the token ({status}); set HF_TOKEN to a valid one that may read, or unset it", path=where
        )
    if status == _TOO_MANY:
        return HubUnreachableError("the hub asks to slow down (429); try later, or with HF_TOKEN set", path=where)
    if status >= 500:
        return HubUnreachableError(f"the hub is out of order ({status}); try later", path=where)
    return DownloadError(f"the hub refused ({status}): {error.server_message or 'no reason given'}", path=where)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None
