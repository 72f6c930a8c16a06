"""What can be told of a chat template without rendering it: its names, its own text, the words that it looks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

from lockstep.engine.chat_messages import ROLES

if TYPE_CHECKING:
    from jinja2.nodes import Node, Template

_CUTTING_METHODS = frozenset(
    [
        "endswith",
        "find",
        "index",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
        "rpartition",
        "rsplit",
        "split",
        "startswith",
    ]
)


def cut_words(tree: Template) -> frozenset[str]:
    """Strings that the template looks for in values, as in ``content.split('</think>')`` or ``'x' in content``."""
    from jinja2 import nodes

    words: set[object] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _CUTTING_METHODS:
            words |= {arg.value for arg in call.args if isinstance(arg, nodes.Const)}
    for filtered in tree.find_all(nodes.Filter):
        words |= {arg.value for arg in filtered.args if isinstance(arg, nodes.Const)}
    for compare in tree.find_all(nodes.Compare):
        if isinstance(compare.expr, nodes.Const) and any(op.op in ("in", "notin") for op in compare.ops):
            words.add(compare.expr.value)
    return frozenset(word for word in words if isinstance(word, str))


def names(tree: Template) -> frozenset[str]:
    """Names that the template looks up, its own included."""
    from jinja2 import nodes

    return frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")


def literals(tree: Template) -> frozenset[str]:
    """Every piece of text that the template itself holds.

    Where the role of a message stands between pieces, as in ``'<|' + message.role + '|>'``, the whole is a piece for
    each role that a message can have: no caller has a hand in it.
    """
    from jinja2 import nodes

    roles = _roles(tree)
    texts: set[str] = set()
    joined: set[Node] = set()
    for written in tree.find_all((nodes.Output, nodes.Add, nodes.Concat)):
        if written in joined:
            continue
        parts = list(_parts(written, joined))
        for run in _runs(parts, roles):
            if not roles.isdisjoint(run):
                joined.update(run)
                texts |= {"".join(role if part in roles else _text(part) or "" for part in run) for role in ROLES}
    alone = [_text(part) for part in tree.find_all((nodes.TemplateData, nodes.Const)) if part not in joined]
    return frozenset(texts.union(text for text in alone if text is not None))


def _parts(node: Node, seen: set[Node]) -> Iterator[Node]:
    """What is written one behind the other; ``seen`` is told of sums and the like that were taken apart for it."""
    from jinja2 import nodes

    if isinstance(node, nodes.Add):
        seen.add(node)
        yield from _parts(node.left, seen)
        yield from _parts(node.right, seen)
    elif isinstance(node, (nodes.Output, nodes.Concat)):
        seen.add(node)
        for child in node.nodes:
            yield from _parts(child, seen)
    else:
        yield node


def _runs(parts: Sequence[Node], roles: Set[Node]) -> Iterator[list[Node]]:
    """What of some parts stands together and is the template's own."""
    run: list[Node] = []
    for part in parts:
        if part in roles or _text(part) is not None:
            run.append(part)
        else:
            yield run
            run = []
    yield run


def _text(node: Node) -> str | None:
    from jinja2 import nodes

    if isinstance(node, nodes.TemplateData):
        return node.data
    return node.value if isinstance(node, nodes.Const) and isinstance(node.value, str) else None


def _roles(tree: Template) -> Set[Node]:
    """Every ``message.role`` and ``message['role']`` within a loop over ``messages`` that alone gives the name."""
    from jinja2 import nodes

    bound = [name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"]
    loops = [
        (loop, loop.target.name)
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages" and isinstance(loop.target, nodes.Name)
    ]
    names_of_loops = [name for _, name in loops]
    return {
        node
        for loop, name in loops
        if "messages" not in bound and not loop.recursive and bound.count(name) == names_of_loops.count(name)
        for statement in loop.body
        for node in statement.find_all((nodes.Getattr, nodes.Getitem))
        if _is_role_of(name, node)
    }


def _is_role_of(name: str, node: Node) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Getattr):
        is_role = node.attr == "role"
    else:
        assert isinstance(node, nodes.Getitem), "there are two ways to write it"
        is_role = isinstance(node.arg, nodes.Const) and node.arg.value == "role"
    return is_role and isinstance(node.node, nodes.Name) and node.node.name == name
