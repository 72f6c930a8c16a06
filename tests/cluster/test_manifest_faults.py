"""Every fault of a manifest is told with its line, its path, what it is and what would be right; all at once."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from lockstep.cluster.manifest_file import parse
from lockstep.cluster.manifest_nodes import MAX_MANIFEST_BYTES, MAX_PROBLEMS
from lockstep.errors import ConfigError, ManifestError, Problem

BASE = """\
cluster: shop
resources:
  gpu_budget: 18GB
  ram_budget: 32GB
models:
  router:
    source: hf://org/router
    tier: resident
  specialists:
    - id: billing
      source: hf://org/billing
      co_activation: router
    - id: legal
      source: hf://org/legal
      tier: standby
fallback:
  source: hf://org/haiku
  tier: remote
routing:
  entry: router
  dispatch_rule: router.output.intent -> specialists.{intent}
"""
FALLBACK = "fallback:\n  source: hf://org/haiku\n  tier: remote\n"
RULE = "router.output.intent -> specialists.{intent}"
END = len(BASE.splitlines()) + 1

# What is replaced in BASE, by what; the line and path of the one fault; words that its message has.
Case = tuple[str, str, int, str, Sequence[str]]

SHAPE: dict[str, Case] = {
    "unknown key at the top": ("resources:", "resource:", 2, "resource", ["did you mean 'resources'?"]),
    "unknown key of a model": ("    tier: resident\n", "    teir: resident\n", 8, "models.router.teir", ["'tier'"]),
    "unknown key, nothing near": ("    tier: resident\n", "    zzz: 1\n", 8, "models.router.zzz", ["known here are"]),
    "unknown key of the budgets": ("ram_budget", "rambudget", 4, "resources.rambudget", ["'ram_budget'"]),
    "key given twice": ("  ram_budget: 32GB", "  gpu_budget: 32GB", 4, "resources.gpu_budget", ["twice", "line 3"]),
    "model given twice": (
        "  specialists:\n",
        "  router:\n    source: pocket://\n  specialists:\n",
        9,
        "models.router",
        ["twice", "line 6"],
    ),
    "no cluster": ("cluster: shop\n", "", 1, "", ["`cluster:`", "required"]),
    "no source": ("    source: hf://org/router\n", "", 6, "models.router", ["`source:`", "hf://org/name"]),
    "no id": ("    - id: legal\n      source", "    - source", 13, "models.specialists[1]", ["`id:`", "required"]),
    "empty list": (
        "fallback:\n",
        "  extra: []\nfallback:\n",
        16,
        "models.extra",
        ["empty list", "at least one model"],
    ),
    "a list where a map is expected": (
        "  gpu_budget: 18GB\n  ram_budget: 32GB",
        "  - 18GB",
        2,
        "resources",
        ["a list", "map"],
    ),
    "a value where a model is expected": (
        "fallback:\n",
        "  extra: hf://org/extra\nfallback:\n",
        16,
        "models.extra",
        ["'hf://org/extra'", "map"],
    ),
    "merge key": ("    tier: resident\n", "    <<: {tier: resident}\n", 8, "models.router.<<", ["write the keys out"]),
    "a tag of another language": (
        "hf://org/router",
        "!!python/object/apply:os.system ['true']",
        7,
        "models.router.source",
        ["a list"],
    ),
    "a tagged map": ("  gpu_budget", "  !!python/object:os.x\n  gpu_budget", 2, "resources", ["tag", "leave it out"]),
    "a tagged scalar": ("hf://org/router", "!env HOME", 7, "models.router.source", ["tag '!env'", "plain string"]),
    "not YAML": ("  gpu_budget: 18GB", "  gpu_budget: [18GB", 4, "", ["is not YAML"]),
    "a tabulator": ("  gpu_budget: 18GB", "\tgpu_budget: 18GB", 3, "", ["is not YAML", "\\t"]),
    "a control character": ("hf://org/router", "hf://org/\x07router", 7, "", ["character", "does not allow"]),
    "two documents": ("routing:\n", "---\nrouting:\n", 19, "", ["is not YAML", "another document"]),
    "block of nobody": (
        "routing:\n",
        "rollouts:\n  - model: billing\nrouting:\n",
        19,
        "rollouts",
        ["nothing that was started reads it"],
    ),
}

VALUES: dict[str, Case] = {
    "size without unit": ("18GB", "18", 3, "resources.gpu_budget", ["'18'", "without a unit", "18GB", "18GiB"]),
    "size in an unknown unit": ("18GB", "18GX", 3, "resources.gpu_budget", ["unknown unit", "GiB"]),
    "size in a doubtful unit": ("18GB", "18G", 3, "resources.gpu_budget", ["GB (powers of 1000)", "GiB"]),
    "size in the wrong case": ("18GB", "18gb", 3, "resources.gpu_budget", ["did you mean GB?"]),
    "negative budget": ("18GB", "-18GB", 3, "resources.gpu_budget", ["'-18GB'", "never negative"]),
    "no budget": ("18GB", "0GB", 3, "resources.gpu_budget", ["is 0"]),
    "half a byte": ("18GB", "0.5B", 3, "resources.gpu_budget", ["whole number of bytes"]),
    "more than there is": ("18GB", "9000000TB", 3, "resources.gpu_budget", ["at most"]),
    "size that is no number": ("18GB", "lots", 3, "resources.gpu_budget", ["'lots'", "number with a unit"]),
    "size that is a map": ("18GB", "{gpu: 18GB}", 3, "resources.gpu_budget", ["a map", "one value"]),
    "size that is nothing": ("18GB", "", 3, "resources.gpu_budget", ["is empty", "18GB"]),
    "unknown tier": ("tier: standby", "tier: stanby", 15, "models.specialists[1].tier", ["'stanby'", "'standby'?"]),
    "tier of a wrong type": (
        "tier: standby",
        "tier: true",
        15,
        "models.specialists[1].tier",
        ["is true", "resident, standby or remote"],
    ),
    "unknown priority": ("tier: resident", "priority: urgent", 8, "models.router.priority", ["'urgent'", "critical"]),
    "priority far off": ("tier: resident", "priority: 4711", 8, "models.router.priority", ["4711", "-100..100"]),
    "no sessions": ("tier: resident", "max_active_sessions: 0", 8, "models.router.max_active_sessions", ["at least 1"]),
    "sessions in words": (
        "tier: resident",
        "max_active_sessions: many",
        8,
        "models.router.max_active_sessions",
        ["'many'", "whole number"],
    ),
    "duration without unit": (
        "tier: resident",
        "keep_alive: 30",
        8,
        "models.router.keep_alive",
        ["30s", "without a unit"],
    ),
    "negative duration": ("tier: resident", "keep_alive: -5m", 8, "models.router.keep_alive", ["never negative"]),
    "unknown duration unit": (
        "tier: resident",
        "keep_alive: 3weeks",
        8,
        "models.router.keep_alive",
        ["unknown unit", "ms, s"],
    ),
    "sweeping all the time": (
        "routing:\n",
        "sessions: {sweep_interval: 1ms}\nrouting:\n",
        19,
        "sessions.sweep_interval",
        ["1ms", "at least 10ms"],
    ),
    "persona nowhere": ("tier: resident", "persona: infix", 8, "models.router.persona", ["prefix or suffix"]),
    "unknown hint": ("tier: resident", "promotion_hint: on_demand", 8, "models.router.promotion_hint", ["on_router"]),
    "a number for a name": ("id: legal", "id: 404", 13, "models.specialists[1].id", ["404", "in quotes"]),
    "an id with a space": ("id: legal", "id: legal team", 13, "models.specialists[1].id", ["letters, digits"]),
    "a key with a slash": (
        "fallback:\n",
        "  org/extra: {source: 'pocket://'}\nfallback:\n",
        16,
        "models.org/extra",
        ["letters, digits"],
    ),
    "id beside the key": ("tier: resident", "id: route", 8, "models.router.id", ["its key 'router' is its id"]),
    "unknown scheme": ("hf://org/router", "hg://org/router", 7, "models.router.source", ["'hg'", "hf://org/name"]),
    "half a hub name": ("hf://org/router", "hf://router", 7, "models.router.source", ["hf://org/name"]),
    "unknown stub option": ("hf://org/router", "stub://r?speed=9", 7, "models.router.source", ["'speed'", "step_ms"]),
    "a server as source": ("hf://org/router", "https://x.org/v1", 7, "models.router.source", ["remote: {base_url"]),
    "variable out of place": ("hf://org/router", "${HOME}/router", 7, "models.router.source", ["in `remote:` only"]),
    "temperature too high": (
        "tier: resident",
        "sampling: {temperature: -1}",
        8,
        "models.router.sampling.temperature",
        ["is -1", "at least 0"],
    ),
    "unknown sampling": (
        "tier: resident",
        "sampling: {temprature: 1}",
        8,
        "models.router.sampling.temprature",
        ["'temperature'"],
    ),
    "unknown engine limit": (
        "tier: resident",
        "engine: {max_seqs: 4}",
        8,
        "models.router.engine.max_seqs",
        ["'max_num_seqs'"],
    ),
    "engine limit of a wrong type": (
        "tier: resident",
        "engine: {chunking: often}",
        8,
        "models.router.engine.chunking",
        ["true or false"],
    ),
    "engine limits that do not fit": (
        "tier: resident",
        "engine: {max_num_seqs: 64, max_num_batched_tokens: 8}",
        8,
        "models.router.engine",
        ["cannot work: max_num_batched_tokens is 8", "at least"],
    ),
    "unknown engine policy": (
        "tier: resident",
        "engine: {order: lifo}",
        8,
        "models.router.engine.order",
        ["'lifo'", "fcfs, priority or fair"],
    ),
}

NAMES: dict[str, Case] = {
    "duplicate id": ("id: legal", "id: billing", 13, "models.specialists[1].id", ["'billing'", "line 10"]),
    "id of a model by key": ("id: legal", "id: router", 13, "models.specialists[1].id", ["'router'", "line 6"]),
    "the fallback's id taken": ("id: legal", "id: fallback", 16, "fallback", ["'fallback'", "line 13"]),
    "the cluster's name as id": ("id: legal", "id: shop", 13, "models.specialists[1].id", ["the cluster's name"]),
    "alias that is an id": (
        "      tier: standby",
        "      aliases: [billing]",
        15,
        "models.specialists[1].aliases[0]",
        ["line 10"],
    ),
    "alias of two models": (
        "      tier: standby",
        "      aliases: [law, law2]\n    - {id: tax, source: pocket://, aliases: law2}",
        16,
        "models.specialists[2].aliases",
        ["'law2'", "line 15"],
    ),
    "alias that is the cluster": (
        "      tier: standby",
        "      aliases: shop",
        15,
        "models.specialists[1].aliases",
        ["routing"],
    ),
    "alias named twice": (
        "      tier: standby",
        "      aliases: [law, law]",
        15,
        "models.specialists[1].aliases[1]",
        ["second time"],
    ),
    "unknown co_activation": (
        "co_activation: router",
        "co_activation: ruoter",
        12,
        "models.specialists[0].co_activation",
        ["'ruoter'", "did you mean 'router'?"],
    ),
    "one unknown of several": (
        "co_activation: router",
        "co_activation:\n        - router\n        - nobody",
        14,
        "models.specialists[0].co_activation[1]",
        ["'nobody'", "known models are router, billing"],
    ),
    "co_activation of itself": (
        "co_activation: router",
        "co_activation: billing",
        12,
        "models.specialists[0].co_activation",
        ["the model itself"],
    ),
    "unknown entry": ("entry: router", "entry: roter", 20, "routing.entry", ["did you mean 'router'?"]),
    "unknown fallback": (FALLBACK, "fallback: bilings\n", 16, "fallback", ["'bilings'", "'billing'?"]),
    "the entry as fallback": (FALLBACK, "fallback: router\n", 16, "fallback", ["the entry's own answer"]),
    "malformed rule": (RULE, "router.intent => specialists", 21, "routing.dispatch_rule", ["<entry>.output.<field>"]),
    "rule with two fields": (
        RULE,
        "router.output.intent -> specialists.{topic}",
        21,
        "routing.dispatch_rule",
        ["{intent}"],
    ),
    "rule of another entry": (
        RULE,
        "billing.output.intent -> specialists.{intent}",
        21,
        "routing.dispatch_rule",
        ["`entry:` is 'router'"],
    ),
    "rule of an unknown entry": (
        RULE,
        "rooter.output.i -> specialists.{i}",
        21,
        "routing.dispatch_rule",
        ["'router'?"],
    ),
    "rule into an unknown list": (
        RULE,
        "router.output.intent -> specialist.{intent}",
        21,
        "routing.dispatch_rule",
        ["'specialists'?"],
    ),
    "rule to an unknown id": (
        RULE,
        "router.output.intent -> specialists.leagl",
        21,
        "routing.dispatch_rule",
        ["models of specialists", "'legal'?"],
    ),
    "no rule": (f"  dispatch_rule: {RULE}\n", "", 19, "routing", ["`dispatch_rule:`"]),
    "literal to nobody": (
        RULE,
        f"{RULE}\n  literal: {{refund: bill}}",
        22,
        "routing.literal.refund",
        ["'bill'", "'billing'?"],
    ),
    "literal in a line, malformed": (RULE, f"{RULE}\n  literal: refund", 22, "routing.literal", ["value=id pairs"]),
    "literal given twice": (RULE, f"{RULE}\n  literal: a=legal, a=billing", 22, "routing.literal", ["'a' twice"]),
    "literal of none": (RULE, f"{RULE}\n  literal: none=legal", 22, "routing.literal", ["leads to the fallback"]),
    "literal with a fixed target": (
        RULE,
        "router.output.intent -> specialists.legal\n  literal: a=legal",
        21,
        "routing.dispatch_rule",
        ["always leads to 'legal'"],
    ),
    "literal that hides a model": (
        RULE,
        f"{RULE}\n  literal: legal=billing",
        22,
        "routing.literal",
        ["takes the word 'legal'"],
    ),
    "a specialist called none": (
        "id: legal",
        "id: none",
        13,
        "models.specialists[1].id",
        ["the word for no specialist"],
    ),
    "the entry among its targets": (
        "  entry: router\n  dispatch_rule: router.",
        "  entry: legal\n  dispatch_rule: legal.",
        13,
        "models.specialists[1].id",
        ["cannot be a target"],
    ),
    "resident over the budget": (
        "    tier: resident\n",
        "    size: 20GB\n",
        3,
        "resources.gpu_budget",
        ["18GB", "needs 20GB", "router 20GB", "standby"],
    ),
    "standby over the budget": (
        "      tier: standby\n",
        "      tier: standby\n      size: 32GiB\n",
        4,
        "resources.ram_budget",
        ["32GB", "legal 32GiB"],
    ),
    "KV over the whole": ("32GB\n", "32GB\n  kv_budget: 19GB\n", 5, "resources.kv_budget", ["more than `gpu_budget:`"]),
    "size of a remote": ("  tier: remote", "  tier: remote\n  size: 1GB", 19, "fallback.size", ["remote model"]),
    "remote and resident": (
        "    tier: resident\n",
        "    tier: resident\n    remote: {base_url: https://x.org/v1}\n",
        8,
        "models.router.tier",
        ["`remote:` names a server"],
    ),
}

REMOTE: dict[str, Case] = {
    "no server": ("  tier: remote", "  remote: {model: haiku}", 18, "fallback.remote", ["`base_url:`"]),
    "no URL": ("  tier: remote", "  remote: {base_url: api.org}", 18, "fallback.remote.base_url", ["https://"]),
    "a port that is none": (
        "  tier: remote",
        "  remote: {base_url: 'http://x:99999'}",
        18,
        "fallback.remote.base_url",
        ["URL"],
    ),
    "a password in the URL": (
        "  tier: remote",
        "  remote: {base_url: 'https://me:secret@x.org/v1'}",
        18,
        "fallback.remote.base_url",
        ["api_key_env"],
    ),
    "a key in the place of its variable": (
        "  tier: remote",
        "  remote: {base_url: 'https://x.org', api_key_env: sk-123}",
        18,
        "fallback.remote.api_key_env",
        ["environment variable"],
    ),
    "a variable that is not set": (
        "  tier: remote",
        "  remote: {base_url: 'https://${NOWHERE}/v1'}",
        18,
        "fallback.remote.base_url",
        ["${NOWHERE}", "not set"],
    ),
    "a variable without an end": (
        "  tier: remote",
        "  remote: {base_url: 'https://${HOST/v1'}",
        18,
        "fallback.remote.base_url",
        ["${NAME}"],
    ),
    "no time to answer": (
        "  tier: remote",
        "  remote: {base_url: 'https://x.org', timeout: 0s}",
        18,
        "fallback.remote.timeout",
        ["at least 1ms"],
    ),
}
CASES = {**SHAPE, **VALUES, **NAMES, **REMOTE}


def problems_of(text: str) -> tuple[Problem, ...]:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return caught.value.problems


def test_what_the_cases_change_is_right_before() -> None:
    assert len(parse(BASE).entries) == 4
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_told_where_it_is(name: str) -> None:
    """Each gives exactly one problem: no fault brings others along."""
    old, new, line, where, words = CASES[name]
    assert BASE.count(old) == 1
    (problem,) = problems_of(BASE.replace(old, new))
    assert (problem.line, problem.where) == (line, where), problem
    for word in words:
        assert word in str(problem), problem


def test_faults_have_messages_of_their_own() -> None:
    messages = [problems_of(BASE.replace(old, new))[0].message for old, new, *_ in CASES.values()]
    assert len(set(messages)) >= len(messages) - 5  # a few faults are told with the same words at other places


def test_all_faults_of_a_text_are_told_at_once_in_the_order_of_lines() -> None:
    text = """\
cluster: [shop]
resources:
  gpu_budget: 18
  ram_budget: -1GB
  disk: 4GB
models:
  router:
    source: hf://org/router
    tier: resitent
    co_activation: router
  specialists:
    - id: billing
      priority: urgent
    - id: billing
      source: hf://org/billing
      keep_alive: 5
      keep_alive: 6
fallback: biling
sessions: {idle_threshold: 30}
rollouts: []
routing:
  entry: roter
  dispatch_rule: router.output -> specialists
"""
    problems = problems_of(text)
    assert [(problem.line, problem.where) for problem in problems] == [
        (1, "cluster"),
        (3, "resources.gpu_budget"),
        (4, "resources.ram_budget"),
        (5, "resources.disk"),
        (9, "models.router.tier"),
        (10, "models.router.co_activation"),
        (12, "models.specialists[0]"),
        (13, "models.specialists[0].priority"),
        (14, "models.specialists[1].id"),
        (16, "models.specialists[1].keep_alive"),
        (17, "models.specialists[1].keep_alive"),
        (18, "fallback"),
        (19, "sessions.idle_threshold"),
        (20, "rollouts"),
        (22, "routing.entry"),
        (23, "routing.dispatch_rule"),
    ]


def test_the_error_names_the_text_and_every_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(BASE.replace("18GB", "18").replace("standby", "stand-by"), "shop.yaml")
    first, second = str(caught.value).splitlines()
    assert first.startswith("shop.yaml, line 3: resources.gpu_budget is '18', a size without a unit")
    assert second.startswith("shop.yaml, line 15: models.specialists[1].tier is 'stand-by'")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("# nothing\n", "empty"),
        ("- cluster\n", "a list"),
        ("cluster\n", "'cluster'"),
        ("{}\n", "`cluster:`"),
        ("cluster: x\nmodels: {}\n", "at least one model"),
        ("cluster: x\nmodels:\n", "empty"),
        ("? [a]\n: b\ncluster: x\nmodels: {m: {source: 'pocket://'}}\n", "key that is not a name"),
        ("*nobody\n", "undefined alias"),
        ("%YAML 9.9\n---\ncluster: x\n", "is not YAML"),
        ("cluster: x\nmodels: {m: {source: 'pocket://', max_active_sessions: 1" + "0" * 5000 + "}}\n", "no number"),
        ("cluster: x\nmodels: {m: {source: 'pocket://', priority: !!int abc}}\n", "no number"),
        ("cluster: x\nmodels: {m: {source: 'pocket://', sampling: {temperature: .nan}}}\n", "a number"),
    ],
)
def test_texts_that_are_no_manifest_at_all(text: str, words: str) -> None:
    assert words in " ".join(map(str, problems_of(text)))


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9) if i else 'lol'}]" for i in range(12)]
    started_s = time.process_time()
    (problem,) = problems_of("\n".join(levels))
    assert "once its aliases are written out" in problem.message
    assert problem.line > 1
    assert time.process_time() - started_s < 5, "not what 9^12 values would take"


def test_what_contains_itself_is_refused() -> None:
    (problem,) = problems_of("cluster: x\nmodels: &m\n  a: *m\n")
    assert (problem.line, "*m" in problem.message) == (3, True)


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{b: " * 60_000, "- " * 50_000])
def test_depth_is_bounded_before_anything_recurses(text: str) -> None:
    (problem,) = problems_of(text)
    assert "deep" in problem.message


def test_a_text_that_is_too_large_is_not_read() -> None:
    (problem,) = problems_of(BASE + "#" * MAX_MANIFEST_BYTES)
    assert "larger than" in problem.message


def test_a_text_full_of_faults_gives_a_bounded_list() -> None:
    many = "".join(f"    - {{id: m{i}, source: pocket://, teir: x}}\n" for i in range(2 * MAX_PROBLEMS))
    problems = problems_of(f"cluster: x\nmodels:\n  all:\n{many}")
    assert len(problems) == MAX_PROBLEMS


def test_an_alias_stands_for_what_it_names() -> None:
    text = BASE.replace("source: hf://org/billing", "source: &shared hf://org/shared").replace(
        "hf://org/legal", "*shared"
    )
    manifest = parse(text)
    assert manifest.entry("billing").source == manifest.entry("legal").source == "hf://org/shared"


def test_a_validator_tells_faults_of_its_block_with_their_lines() -> None:
    text = BASE + "rollouts:\n  - model: billing\n    gate:\n      alpha: 2\n"

    def check(block: object) -> list[Problem]:
        assert block == [{"model": "billing", "gate": {"alpha": 2}}]
        return [Problem(0, "rollouts[0].gate.alpha", "is 2; it must be below 1"), Problem(0, "", "is wrong")]

    with pytest.raises(ManifestError) as caught:
        parse(text, validators={"rollouts": check})
    assert [(p.line, p.where) for p in caught.value.problems] == [
        (END, "rollouts"),
        (END + 3, "rollouts[0].gate.alpha"),
    ]
    assert parse(text, validators={"rollouts": lambda block: ()}).rollouts == [
        {"model": "billing", "gate": {"alpha": 2}}
    ]
