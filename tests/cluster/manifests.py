"""Manifests of any kind that `parse` can give, as a Hypothesis strategy."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from lockstep.cluster.dispatch import NONE_OF_THESE, DispatchRule
from lockstep.cluster.manifest import (
    PRIORITIES,
    HostedReplicas,
    Hosts,
    Manifest,
    ModelEntry,
    Persona,
    Remote,
    Resources,
    Routing,
    SessionLimits,
    Tier,
)
from lockstep.core.balancer import RoutingPolicy

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,6}[A-Za-z0-9_-])?", fullmatch=True)
SETS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,6}", fullmatch=True)
ALIASES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), min_size=1).filter(str.strip)
PRINTABLE = TEXTS.filter(lambda text: "\n" not in text and "\t" not in text)
SIZES = (
    st.integers(1, 2**50) | st.integers(1, 64).map(lambda n: n * 10**9) | st.integers(1, 64).map(lambda n: n * 2**30)
)
DURATIONS = st.floats(0.05, 1e6) | st.integers(1, 3600).map(float) | st.integers(50, 5000).map(lambda ms: ms / 1000)
SOURCES = st.one_of(
    st.just("pocket://"),
    NAMES.map("stub://{}?step_ms=1".format),
    st.from_regex(r"hf://[a-z]{1,5}/[a-z]{1,5}(@[a-z]{1,4})?(#[a-z]{1,4}\.gguf)?", fullmatch=True),
    PRINTABLE.filter(lambda text: "://" not in text and "${" not in text),
)
REMOTES = st.builds(
    Remote,
    base_url=st.sampled_from(["https://api.example.com/v1", "http://127.0.0.1:9000/v1", "http://[::1]:80/$${x}"]),
    model=st.none() | PRINTABLE,
    api_key_env=st.none() | st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True),
    timeout_s=DURATIONS,
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 1e6) | st.integers(0, 2),
        "top_k": st.integers(-1, 1000),
        "top_p": st.floats(0, 1, exclude_min=True),
        "max_tokens": st.integers(1, 10**6),
        "seed": st.integers(-(2**50), 2**50),
    },
)
ENGINES = st.fixed_dictionaries(
    {},
    optional={
        "max_model_len": st.integers(2, 10**6),
        "kv_cache_memory_bytes": SIZES,
        "max_num_seqs": st.integers(1, 100),
        "max_num_step_seqs": st.integers(1, 100),
        "chunking": st.booleans(),
        "order": st.sampled_from(["fcfs", "priority", "fair"]),
    },
)
AMOUNTS = st.integers(0, 10**6) | st.floats(0.001, 64)
DEMANDS = st.builds(
    HostedReplicas,
    num=st.integers(1, 1024),
    resources=st.fixed_dictionaries(
        {}, optional={"CPU": AMOUNTS, "GPU": AMOUNTS, "memory": SIZES.map(float), "host_a": AMOUNTS}
    ),
    spread=st.booleans(),
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
).filter(bool)


@st.composite
def entries(draw: DrawFn, id_: str, set_: str | None, others: list[str]) -> ModelEntry:
    remote = draw(st.none() | REMOTES)
    tier = Tier.REMOTE if remote else draw(st.sampled_from(Tier))
    is_local = tier is not Tier.REMOTE
    sources = SOURCES if remote is None else SOURCES | st.just(remote.base_url)
    return ModelEntry(
        id=id_,
        source=draw(sources),
        tier=tier,
        set=set_,
        priority=draw(st.sampled_from(sorted(PRIORITIES.values())) | st.integers(-100, 100)),
        max_active_sessions=draw(st.none() | st.integers(1, 1000)),
        co_activation=tuple(draw(st.lists(st.sampled_from(others), unique=True, max_size=3))) if others else (),
        promotes_on_intent=draw(st.booleans()),
        system_prompt=draw(st.none() | TEXTS),
        persona=draw(st.sampled_from(Persona)),
        sampling=draw(SAMPLING),
        size_bytes=draw(st.none() | SIZES) if is_local else None,
        engine=draw(ENGINES) if is_local else {},
        chat_template=draw(st.none() | TEXTS) if is_local else None,
        keep_alive_s=draw(st.none() | DURATIONS),
        remote=remote,
    )


@st.composite
def manifests(draw: DrawFn) -> Manifest:
    """Without budgets where sizes are declared: whether they fit is not what these are for."""
    words = draw(st.lists(NAMES, min_size=2, max_size=10, unique=True))
    cluster, *ids = words
    sets = draw(st.lists(SETS.filter(lambda each: each not in ids), min_size=1, max_size=3, unique=True))
    kinds = sorted(draw(st.lists(st.integers(-1, len(sets) - 1), min_size=len(ids), max_size=len(ids))))
    made = [
        draw(entries(id_, None if kind < 0 else sets[kind], [each for each in ids if each != id_]))
        for id_, kind in zip(ids, kinds, strict=True)
    ]
    aliases = draw(st.lists(ALIASES.filter(lambda each: each not in words), max_size=len(made), unique=True))
    made = [replace(entry, aliases=tuple(aliases[index :: len(made)])) for index, entry in enumerate(made)]
    routing = draw(st.none() | routings(made))
    entry_id = None if routing is None else routing.entry
    known = [each.id for each in made if each.id != entry_id]
    return Manifest(
        cluster=cluster,
        entries=tuple(made),
        resources=draw(st.builds(Resources, kv_budget_bytes=st.none() | SIZES, disk_kv_budget_bytes=st.none() | SIZES)),
        routing=routing,
        fallback=draw(st.none() | st.sampled_from(known)) if known else None,
        sessions=draw(
            st.builds(
                SessionLimits,
                st.none() | DURATIONS,
                DURATIONS,
                sweep_interval_s=DURATIONS,
                max_active_sessions=st.none() | st.integers(1, 99),
            )
        ),
        hosts=draw(st.none() | hosts(made)),
        rollouts=draw(st.none() | PLAIN),
    )


@st.composite
def hosts(draw: DrawFn, made: list[ModelEntry]) -> Hosts:
    """Replicas of some local models; of those of one artifact, of one at most."""
    groups = {(entry.source, entry.variant): entry.id for entry in made if entry.tier is not Tier.REMOTE}
    ids = draw(st.lists(st.sampled_from(sorted(groups.values())), unique=True)) if groups else []
    paths = st.from_regex(r"(~/|/)[a-z./ ]{0,6}[a-z]", fullmatch=True)
    has_tls = draw(st.booleans())
    return Hosts(
        ray=draw(st.sampled_from(["auto", "10.0.0.1:6379", "[::1]:1"])),
        replicas={id_: draw(DEMANDS) for id_ in ids},
        routing=draw(st.sampled_from(RoutingPolicy)),
        max_imbalance=draw(st.integers(0, 99)),
        secret=draw(st.just(Hosts().secret) | paths),
        tls_ca=draw(paths) if has_tls else "",
        tls_cert=draw(paths) if has_tls else "",
        tls_key=draw(st.just("") | paths) if has_tls else "",
        allows_plain=draw(st.booleans()),
    )


@st.composite
def routings(draw: DrawFn, made: list[ModelEntry]) -> Routing | None:
    """A rule over one of the sets, asked of a model outside of it; None where there is no such pair."""
    pairs = [
        (entry.id, other.set)
        for entry in made
        for other in made
        if other.set is not None and other.set != entry.set and other.id.lower() != NONE_OF_THESE
    ]
    ids_of = {set_: [each.id for each in made if each.set == set_] for _, set_ in pairs}
    pairs = [(id_, name) for id_, name in pairs if NONE_OF_THESE not in map(str.lower, ids_of[name])]
    if not pairs:
        return None
    asked, name = draw(st.sampled_from(pairs))
    field_name = draw(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True))
    ids = ids_of[name]
    if draw(st.booleans()):
        return Routing(asked, DispatchRule(asked, field_name, name, draw(st.sampled_from(ids))))
    words = NAMES.filter(lambda word: word.lower() != NONE_OF_THESE and word not in ids)
    literal = draw(st.dictionaries(words, st.sampled_from(ids), max_size=3))
    return Routing(asked, DispatchRule(asked, field_name, name, None, literal))
