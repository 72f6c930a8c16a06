"""Manifests with one fault in ``hosts:``: what is replaced in a good one, and what is told."""

from __future__ import annotations

from tests.cluster.faulty_forms import Case

_FIRST = "cluster: shop"


def _hosts(block: str, where: str, *words: str, line: int = 2) -> Case:
    return (_FIRST, f"{_FIRST}\nhosts: {block}", line, where, words)


HOSTS: dict[str, Case] = {
    "hosts without keys": _hosts("", "hosts", "empty", "a map"),
    "unknown key of the hosts": _hosts("{replica: {}}", "hosts.replica", "did you mean 'replicas'?"),
    "Ray by its client's scheme": _hosts("{ray: 'ray://head:10001'}", "hosts.ray", "HOST:PORT", "without the ray://"),
    "Ray without a port": _hosts("{ray: head}", "hosts.ray", "'head'", "auto, or HOST:PORT"),
    "Ray at a port that is none": _hosts("{ray: 'head:70000'}", "hosts.ray", "'head:70000'"),
    "replicas of nobody": _hosts("{replicas: {biling: {num: 2}}}", "hosts.replicas.biling", "did you mean 'billing'?"),
    "replicas of a remote model": _hosts("{replicas: {fallback: {num: 2}}}", "hosts.replicas.fallback", "remote model"),
    "replicas as a number": _hosts("{replicas: {billing: 2}}", "hosts.replicas.billing", "the value '2'", "a map"),
    "no replica": _hosts("{replicas: {billing: {num: 0}}}", "hosts.replicas.billing.num", "is 0", "1 to 1,024"),
    "too many replicas": _hosts(
        "{replicas: {billing: {num: 1025}}}", "hosts.replicas.billing.num", "1025", "1 to 1,024"
    ),
    "unknown key of replicas": _hosts(
        "\n  replicas:\n    billing:\n      nun: 2", "hosts.replicas.billing.nun", "did you mean 'num'?", line=5
    ),
    "spread by another word": _hosts("{replicas: {billing: {spread: 1}}}", "hosts.replicas.billing.spread", "or false"),
    "memory without a unit that there is": _hosts(
        "{replicas: {billing: {resources: {memory: 4GX}}}}", "hosts.replicas.billing.resources.memory", "'4GX'"
    ),
    "no memory": _hosts(
        "{replicas: {billing: {resources: {memory: 0B}}}}", "hosts.replicas.billing.resources.memory", "leave it out"
    ),
    "a resource in other letters": _hosts(
        "{replicas: {billing: {resources: {cpu: 2}}}}", "hosts.replicas.billing.resources.cpu", "did you mean 'CPU'?"
    ),
    "a resource as Ray's parameter": _hosts(
        "{replicas: {billing: {resources: {num_gpus: 1}}}}",
        "hosts.replicas.billing.resources.num_gpus",
        "did you mean 'GPU'?",
    ),
    "the object store": _hosts(
        "{replicas: {billing: {resources: {object_store_memory: 1GB}}}}",
        "hosts.replicas.billing.resources.object_store_memory",
        "`memory:`",
    ),
    "an amount in words": _hosts(
        "{replicas: {billing: {resources: {CPU: two}}}}", "hosts.replicas.billing.resources.CPU", "'two'", "a number"
    ),
    "a negative amount": _hosts(
        "{replicas: {billing: {resources: {disk: -1}}}}", "hosts.replicas.billing.resources.disk", "is -1", "0.0001.."
    ),
    "a resource without a name": _hosts(
        "{replicas: {billing: {resources: {'a b': 1}}}}", "hosts.replicas.billing.resources.a b", "a name has"
    ),
    "unknown policy": _hosts("{routing: prefixes}", "hosts.routing", "'prefixes'", "did you mean 'prefix'?"),
    "negative imbalance": _hosts("{max_imbalance: -1}", "hosts.max_imbalance", "is -1"),
    "a secret that is no path": _hosts("{secret: 4f2a9c}", "hosts.secret", "'4f2a9c'", "from / or ~/"),
    "a secret from the environment": _hosts("{secret: '${SECRET}'}", "hosts.secret", "`remote:` only"),
    "certificates without authorities": _hosts("{tls: {cert: /c, key: /k}}", "hosts.tls", "no `ca:`"),
    "certificates by a relative path": _hosts("{tls: {ca: ca.pem, cert: /c}}", "hosts.tls.ca", "'ca.pem'"),
    "allow_plain by another word": _hosts("{allow_plain: yes}", "hosts.allow_plain", "'yes'", "true or false"),
    "two demands for one replica": (
        "      tier: standby",
        "      tier: standby\n    - {id: tax, source: hf://org/legal}\nhosts:\n"
        "  replicas:\n    legal: {num: 2}\n    tax: {num: 3}",
        20,
        "hosts.replicas.tax",
        ["differs from 'legal' on line 19", "write equal values"],
    ),
}
