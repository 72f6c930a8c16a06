"""Permissions of manifests that come over HTTP: which sources, servers and hosts one may name, by its sender's key.

The operator's own manifests are files: every manifest may name what they name. A sender without permissions may name in
addition the embedded model, stubs, models in the folder of the operator's manifest, and servers at public addresses.
A path that the sender may not name, one that does not exist and one that is no model give the same refusal, so that it
shows nothing of this machine's files. The address of Ray and the certificates of links never change over HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lockstep.cluster.manifest import Hosts, Manifest, Remote, Tier
from lockstep.cluster.manifest_draft import EntryDraft
from lockstep.cluster.remote_exchange import is_plainly_private
from lockstep.errors import ArtifactError, ExecutorError, ManifestError, Problem
from lockstep.executors.stub import SCHEME as STUB
from lockstep.executors.stub import StubOptions
from lockstep.yaml_reading import Reading

SOURCE_REFUSED = (
    "names what only an admin's key may name, or nothing that can be served; any key may name pocket://, stub://NAME, "
    "models in the folder of the server's manifest file, and what that file names (--allow-any-source: all else too)"
)
ADDRESS_REFUSED = (
    "is no public address, and only an admin's key may name another, or what the server's manifest file names "
    "(--allow-private-remotes: any key)"
)
HOSTS_REFUSED = (
    "is not what is served, and a manifest that comes over HTTP changes nothing of Ray, the secret, the certificates "
    "or `allow_plain`; bring it in as the server's file and start again"
)
_LINKS: Mapping[str, str] = {
    "ray": "ray",
    "secret": "secret",
    "tls_ca": "tls.ca",
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
    "allows_plain": "allow_plain",
}
"""Fields of `Hosts` that only the operator's file may set, and their keys."""
_POCKET = "pocket://"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions of a manifest's sender: what it may name beyond the operator's names."""

    any_source: bool = False
    """Any file that this process can read, and any model on the hub, which is fetched with our token."""
    private_remotes: bool = False
    """Servers at addresses that only this machine or its network can reach."""


NONE = Permissions()
ALL = Permissions(any_source=True, private_remotes=True)


class OperatorNames:
    """Names of the operator's own manifests.

    Args:
        first: the manifest that is served at first.
        folder: in which models may be named by anybody; None: in none.
        can_open: whether a model is at a path; tells by ArtifactError that there is none.
        opens_sources: whether sources and servers are asked at all; where all models are stubs, they are not.
    """

    def __init__(
        self, first: Manifest, folder: Path | None, can_open: Callable[[str], object], *, opens_sources: bool
    ) -> None:
        self._folder = None if folder is None else Path(os.path.abspath(folder))
        self._can_open = can_open
        self._opens_sources = opens_sources
        self._sources: set[str] = set()
        self._urls: set[str] = set()
        self._keys: set[tuple[str, str]] = set()
        self.vouch(first)

    def vouch(self, manifest: Manifest) -> None:
        """The operator names all this."""
        for entry in manifest.entries:
            if entry.remote is None:
                self._sources.add(entry.source)
            else:
                self._urls.add(entry.remote.base_url)
                if entry.remote.api_key_env is not None:
                    self._keys.add((entry.remote.base_url, entry.remote.api_key_env))

    def vetting(self, powers: Permissions, served: Hosts | None = None) -> PermissionCheck:
        """A look at one manifest.

        Args:
            served: the hosts that are served now.
        """
        return PermissionCheck(self, powers, served)

    def may_send(self, remote: Remote) -> bool:
        """True where a server gets the variable that its entry names."""
        return remote.api_key_env is None or (remote.base_url, remote.api_key_env) in self._keys

    def may_ask(self, remote: Remote) -> bool:
        """True if a server may be at any address."""
        return not self._opens_sources or remote.base_url in self._urls

    def may_open(self, source: str) -> bool:
        """True where a source is opened for anybody. Of the files outside the folder, none is looked at."""
        if source in self._sources:
            return True
        if source.startswith(STUB):  # its file of answers is a file like any other
            return not StubOptions.parse(source).answers
        if not self._opens_sources or source.startswith(_POCKET):
            return True
        path = self._in_folder(source)
        if path is None:
            return False
        try:
            self._can_open(str(path))
        except ArtifactError:
            return False
        return True

    def _in_folder(self, source: str) -> Path | None:
        """The real path of a source in the folder; None: it is elsewhere, by its words or by where its links lead."""
        if self._folder is None or "://" in source or source.startswith("~") or ".." in Path(source).parts:
            return None
        given, folder = Path.cwd() / source, Path(os.path.realpath(self._folder))
        if not (given.is_relative_to(folder) or given.is_relative_to(self._folder)):
            return None
        real = Path(os.path.realpath(given))
        return real if real.is_relative_to(folder) else None


class PermissionCheck:
    """Looks at every model of one manifest while it is read, and notes what may not be named."""

    def __init__(self, vouchers: OperatorNames, powers: Permissions, served: Hosts | None = None) -> None:
        self._vouchers = vouchers
        self._powers = powers
        self._served = served
        self._opened: dict[str, Problem] = {}
        """Files, and the message if one of them turns out to be no model."""

    def entry(self, entry: EntryDraft, reading: Reading) -> None:
        remote: Remote | None = entry.fields.get("remote")
        if remote is None:
            self._vet_source(entry, reading)
            return
        if not self._vouchers.may_send(remote):
            reading.fault(
                f"{entry.where}.remote.api_key_env",
                f"is {remote.api_key_env!r}, which the server's manifest file does not name for this base_url; a "
                "manifest that comes over HTTP sends no other variable's value anywhere, so bring it in as the file",
            )
        if not (self._powers.private_remotes or self._vouchers.may_ask(remote)):
            entry.fields["remote"] = replace(remote, only_public=True)
            if is_plainly_private(urlsplit(remote.base_url).hostname or ""):
                reading.fault(f"{entry.where}.remote.base_url", ADDRESS_REFUSED)

    def hosts(self, fields: dict[str, Any] | None, reading: Reading) -> None:
        if fields is None or self._served is None:
            if (fields is None) != (self._served is None):
                reading.fault("hosts", HOSTS_REFUSED)
            return
        given = Hosts(**fields)
        for field, key in _LINKS.items():
            if getattr(given, field) != getattr(self._served, field):
                reading.fault(f"hosts.{key}", HOSTS_REFUSED)

    def _vet_source(self, entry: EntryDraft, reading: Reading) -> None:
        source, where = entry.fields.get("source"), f"{entry.where}.source"
        if source is None or source in self._opened or self._powers.any_source:
            return
        if entry.fields.get("tier") is Tier.REMOTE:  # without a server it is refused whatever its source is
            return
        if not self._vouchers.may_open(source):
            reading.fault(where, SOURCE_REFUSED)
        elif "://" not in source:
            self._opened[source] = Problem(reading.line(where), where, SOURCE_REFUSED)

    def veiled(self, error: BaseException) -> BaseException:
        """An error of a source that was opened for anybody, as if it had never been there; any other as it is."""
        if not isinstance(error, ArtifactError | ExecutorError):
            return error
        problems = [problem for source, problem in self._opened.items() if source in str(error)]
        return ManifestError(problems[:1]) if problems else error
