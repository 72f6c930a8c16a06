"""Keys of a manifest's ``hosts:`` block: defines where replicas are placed, and the secret and certificates of
connections.

Paths refer to every host's own file system, so nothing is looked up here: neither Ray nor the secret file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lockstep.cluster.manifest import HostedReplicas, Hosts
from lockstep.cluster.manifest_keys import (
    ManifestKey,
    NameShape,
    check_name,
    flag,
    mapping,
    one_of,
    read_fields,
    size,
    text,
    whole,
    written,
)
from lockstep.cluster.quantities import size_text
from lockstep.core.balancer import RoutingPolicy
from lockstep.errors import ConfigError
from lockstep.hosts.values import MAX_REPLICAS
from lockstep.yaml_reading import INVALID, YamlNode, shown

AUTO = "auto"
MAX_AMOUNT = 1_000_000
"""Largest amount of one resource other than memory."""
MIN_AMOUNT = 0.0001
"""Smallest amount of a resource that Ray counts."""
MAX_IMBALANCE = 1_000_000
_MEMORY = "memory"
_KNOWN = ("CPU", "GPU", _MEMORY)
"""Built-in resources of Ray that a replica may need."""
_STORE = "object_store_memory"


def _address(node: YamlNode) -> str:
    value = text(node)
    if value == AUTO:
        return value
    try:
        parts = urlsplit(f"//{value}")
        is_right = parts.netloc == value and "@" not in value and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        is_right = False
    if not is_right:
        hint = "; without the ray://" if value.startswith("ray://") else ""
        raise ConfigError(f"is {shown(value)}; it must be {AUTO}, or HOST:PORT of a Ray cluster{hint}")
    return value


def _path(node: YamlNode) -> str:
    """Read the path of a file on every host; it must not depend on a working directory."""
    value = text(node)
    if "${" in value:
        raise ConfigError(f"is {shown(value)}; ${{…}} is expanded in `remote:` only, so write the path out")
    if not value.isprintable() or not value.startswith(("/", "~/")):
        raise ConfigError(f"is {shown(value)}; it must be the path of a file on every host, from / or ~/")
    return value


def _amounts(node: YamlNode) -> Mapping[str, float]:
    """Read ``resources:``, by name of the resource."""
    read = {name: child.read(partial(_amount, name)) for name, child in node.entries().items()}
    return {name: amount for name, amount in read.items() if amount is not INVALID}


def _amount(name: str, node: YamlNode) -> float:
    plain = name.lower().removeprefix("num_").rstrip("s")
    known_name = next((known for known in _KNOWN if known.lower() == plain), name)
    if known_name != name:
        raise ConfigError(f"is an unknown resource; did you mean {known_name!r}?")
    if name == _STORE:
        raise ConfigError("is not used by replicas; leave it out, or write `memory:`")
    check_name(name, NameShape.ALIAS)
    if name == _MEMORY:
        if not (num_bytes := size(is_budget=True)(node)):
            raise ConfigError("is 0; leave it out to reserve no memory")
        return float(num_bytes)
    value = node.scalar()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"is {shown(value)}; it must be a number, e.g. 2 or 0.5")
    if not (value == 0 or MIN_AMOUNT <= value <= MAX_AMOUNT):
        raise ConfigError(f"is {shown(value)}; it must be 0, or a number of {MIN_AMOUNT}..{MAX_AMOUNT}")
    return value


def _amounts_written(amounts: Mapping[str, float]) -> dict[str, Any]:
    return {name: size_text(int(amount)) if name == _MEMORY else amount for name, amount in amounts.items()}


REPLICAS: Mapping[str, ManifestKey] = {
    "num": ManifestKey(whole(1, MAX_REPLICAS)),
    "resources": ManifestKey(_amounts, write=_amounts_written),
    "spread": ManifestKey(flag),
}
TLS: Mapping[str, ManifestKey] = {
    "ca": ManifestKey(_path, "tls_ca"),
    "cert": ManifestKey(_path, "tls_cert"),
    "key": ManifestKey(_path, "tls_key"),
}


def _replicas(node: YamlNode) -> dict[str, HostedReplicas]:
    """Read ``replicas:``, by id of the model."""
    read = {id_: child.read(mapping(REPLICAS)) for id_, child in node.entries().items()}
    return {id_: HostedReplicas(**fields) for id_, fields in read.items() if fields is not INVALID}


def _replicas_written(replicas: Mapping[str, HostedReplicas]) -> dict[str, Any]:
    return {id_: written(REPLICAS, demand, ("num",)) for id_, demand in replicas.items()}


HOSTS: Mapping[str, ManifestKey] = {
    "ray": ManifestKey(_address),
    "replicas": ManifestKey(_replicas, write=_replicas_written),
    "routing": ManifestKey(one_of({each.value: each for each in RoutingPolicy}), write=lambda policy: policy.value),
    "max_imbalance": ManifestKey(whole(0, MAX_IMBALANCE)),
    "secret": ManifestKey(_path),
    "tls": ManifestKey(mapping(TLS, ("ca", "cert"))),
    "allow_plain": ManifestKey(flag, "allows_plain"),
}


def hosts_block(node: YamlNode) -> dict[str, Any]:
    """Read ``hosts:`` as the well-formed fields of `Hosts`."""
    fields = read_fields(node, HOSTS)
    tls: dict[str, Any] = fields.pop("tls", {})
    return fields | tls


def hosts_written(hosts: Hosts) -> dict[str, Any]:
    """Write ``hosts:`` in the form that `hosts_block` reads. The block is never empty, because an absent block means a
    single machine."""
    plain = {key: how for key, how in HOSTS.items() if key != "tls"}
    block = {**written(plain, hosts, ("ray",)), **({"tls": written(TLS, hosts)} if hosts.tls_ca else {})}
    return {key: block[key] for key in HOSTS if key in block}
