"""Manifest permissions: checks which sources, servers and hosts a manifest sent over HTTP may name, by its sender's API
key.

The operator's own manifests are files, and every manifest may name what they name. Without permissions a sender may
also name the embedded model, stubs, models in the directory of the operator's manifest, and servers at public
addresses. A path that the sender may not name, a missing path and a path without a model all give the same error, so
the error reveals nothing about this machine's files. The address of Ray and the options of connections cannot be
changed over HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.artifacts.task import MERGE
from lockstep.cluster.manifest import Hosts, Manifest, Remote, Tier
from lockstep.cluster.manifest_draft import EntryDraft
from lockstep.cluster.remote_exchange import is_plainly_private
from lockstep.errors import ArtifactError, ExecutorError, ManifestError, Problem
from lockstep.executors.stub import SCHEME as STUB
from lockstep.executors.stub import StubOptions
from lockstep.pocket import SCHEME as EMBEDDED
from lockstep.yaml_reading import Reading

SOURCE_REFUSED = (
    "requires an admin's key, or cannot be served; any key may name pocket://, stub://NAME, "
    "models in the directory of the server's manifest file, and what that file names (--allow-any-source: any source)"
)
ADAPTER_REFUSED = (
    "requires an admin's key, or cannot be used; any key may name pocket://NAME, adapters in the directory of the "
    "server's manifest file, and those that this file names (--allow-any-source: any adapter)"
)
ADDRESS_REFUSED = (
    "is not a public address; other addresses require an admin's key or an entry in the server's manifest file "
    "(--allow-private-remotes: any key)"
)
HOSTS_REFUSED = (
    "differs from the current manifest, but a manifest sent over HTTP cannot change Ray, the secret, the certificates "
    "or `allow_plain`; change the server's manifest file and restart the server"
)
_CONNECTION_FIELDS: Mapping[str, str] = {
    "ray": "ray",
    "secret": "secret",
    "tls_ca": "tls.ca",
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
    "allows_plain": "allow_plain",
}
"""Fields of `Hosts` that only the operator's file may set, and their keys."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions of a manifest's sender, beyond the names in the operator's manifests."""

    any_source: bool = False
    """Whether the manifest may name any file that this process can read, and any model on the hub, downloaded with the
    server's token."""
    private_remotes: bool = False
    """Whether the manifest may name servers at addresses that only this machine or its network can reach."""


NONE = Permissions()
ALL = Permissions(any_source=True, private_remotes=True)


class OperatorNames:
    """Names in the operator's own manifests, which every manifest may use.

    Args:
        first: the first manifest to serve.
        folder: directory whose models any manifest may name; None: there is none.
        can_open: opens a path; raises ArtifactError if there is no model.
        opens_sources: whether sources and servers are opened at all; False if all models are stubs.
    """

    def __init__(
        self, first: Manifest, folder: Path | None, can_open: Callable[[str], object], *, opens_sources: bool
    ) -> None:
        self._folder = None if folder is None else Path(os.path.abspath(folder))
        self._can_open = can_open
        self._opens_sources = opens_sources
        self._sources: set[str] = set()
        self._adapters: set[str] = set()
        self._urls: set[str] = set()
        self._keys: set[tuple[str, str]] = set()
        self.add(first)

    def add(self, manifest: Manifest) -> None:
        """Add the names in a manifest of the operator."""
        for entry in manifest.entries:
            if entry.remote is None:
                self._sources.add(entry.source)
                if entry.adapter is not None:
                    self._adapters.add(entry.adapter)
            else:
                self._urls.add(entry.remote.base_url)
                if entry.remote.api_key_env is not None:
                    self._keys.add((entry.remote.base_url, entry.remote.api_key_env))

    def check_for(self, permissions: Permissions, served: Hosts | None = None) -> PermissionCheck:
        """Return the check of one manifest.

        Args:
            permissions: permissions of the manifest's sender.
            served: ``hosts:`` of the current manifest.
        """
        return PermissionCheck(self, permissions, served)

    def may_send_key(self, remote: Remote) -> bool:
        """True if the variable that an entry names may be sent to the entry's server."""
        return remote.api_key_env is None or (remote.base_url, remote.api_key_env) in self._keys

    def may_be_private(self, remote: Remote) -> bool:
        """True if the server may be at a private address."""
        return not self._opens_sources or remote.base_url in self._urls

    def may_open(self, source: str) -> bool:
        """True if any sender may open a source. Files outside the directory are never accessed."""
        if source in self._sources:
            return True
        base, *adapters = source.split(MERGE)
        if adapters:
            return self.may_open(base) and all(map(self.may_open_adapter, adapters))
        if source.startswith(STUB):  # a stub may name a file of answers
            return not StubOptions.parse(source).answers
        if not self._opens_sources or source.startswith(EMBEDDED):
            return True
        path = self._in_folder(source)
        if path is None:
            return False
        try:
            self._can_open(str(path))
        except ArtifactError:
            return False
        return True

    def may_open_adapter(self, path: str) -> bool:
        """True if any sender may open an adapter: the operator's manifests name it, or it is in the directory or in the
        package."""
        is_named = path in self._adapters or path.startswith(EMBEDDED)
        return is_named or not self._opens_sources or self._in_folder(path) is not None

    def _in_folder(self, source: str) -> Path | None:
        """Real path of a source in the directory; None: it is elsewhere, by its name or because of symbolic links."""
        if self._folder is None or "://" in source or source.startswith("~") or ".." in Path(source).parts:
            return None
        given, folder = Path.cwd() / source, Path(os.path.realpath(self._folder))
        if not (given.is_relative_to(folder) or given.is_relative_to(self._folder)):
            return None
        real = Path(os.path.realpath(given))
        return real if real.is_relative_to(folder) else None


class PermissionCheck:
    """Check of one manifest while it is read: reports the names that its sender may not use."""

    def __init__(self, names: OperatorNames, permissions: Permissions, served: Hosts | None = None) -> None:
        self._names = names
        self._permissions = permissions
        self._served = served
        self._opened: dict[str, Problem] = {}
        """Paths that were opened for a sender without permissions, each with the problem to report if it contains no
        model."""

    def entry(self, entry: EntryDraft, reading: Reading) -> None:
        remote: Remote | None = entry.fields.get("remote")
        if remote is None:
            self._check_source(entry, reading)
            self._check_adapter(entry, reading)
            return
        if not self._names.may_send_key(remote):
            reading.fault(
                f"{entry.where}.remote.api_key_env",
                f"is {remote.api_key_env!r}, which the server's manifest file does not name for this base_url; a "
                "manifest sent over HTTP may not use other variables, so change the server's manifest file instead",
            )
        if not (self._permissions.private_remotes or self._names.may_be_private(remote)):
            entry.fields["remote"] = replace(remote, only_public=True)
            if is_plainly_private(urlsplit(remote.base_url).hostname or ""):
                reading.fault(f"{entry.where}.remote.base_url", ADDRESS_REFUSED)

    def hosts(self, fields: dict[str, Any] | None, reading: Reading) -> None:
        if fields is None or self._served is None:
            if (fields is None) != (self._served is None):
                reading.fault("hosts", HOSTS_REFUSED)
            return
        given = Hosts(**fields)
        for field, key in _CONNECTION_FIELDS.items():
            if getattr(given, field) != getattr(self._served, field):
                reading.fault(f"hosts.{key}", HOSTS_REFUSED)

    def _check_source(self, entry: EntryDraft, reading: Reading) -> None:
        source, where = entry.fields.get("source"), f"{entry.where}.source"
        if source is None or source in self._opened or self._permissions.any_source:
            return
        if entry.fields.get("tier") is Tier.REMOTE:  # without a server the entry is rejected anyway
            return
        if not self._names.may_open(source):
            reading.fault(where, SOURCE_REFUSED)
        else:
            paths = [each for each in source.split(MERGE) if "://" not in each]
            self._opened |= dict.fromkeys(paths, Problem(reading.line(where), where, SOURCE_REFUSED))

    def _check_adapter(self, entry: EntryDraft, reading: Reading) -> None:
        path, where = entry.fields.get("adapter"), f"{entry.where}.adapter"
        if path is None or self._permissions.any_source:
            return
        if not self._names.may_open_adapter(path):
            reading.fault(where, ADAPTER_REFUSED)
        else:
            self._opened[path] = Problem(reading.line(where), where, ADAPTER_REFUSED)

    def redacted(self, error: BaseException) -> BaseException:
        """Replace an error about a source that was opened for any sender by the error for a missing source; other
        errors stay."""
        if not isinstance(error, ArtifactError | ExecutorError):
            return error
        problems = [problem for source, problem in self._opened.items() if source in str(error)]
        return ManifestError(problems[:1]) if problems else error
