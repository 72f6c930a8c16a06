"""Every fault of a manifest is told with its line, its path, what it is and what would be right; all at once."""

from __future__ import annotations

import pytest

from lockstep.cluster.manifest_file import parse
from lockstep.errors import ConfigError, ManifestError, Problem
from lockstep.yaml_reading import MAX_BYTES, MAX_PROBLEMS
from tests.cluster.faulty_forms import BASE, SHAPE, VALUES
from tests.cluster.faulty_hosts import HOSTS
from tests.cluster.faulty_names import NAMES, REMOTE

END = len(BASE.splitlines()) + 1
CASES = {**SHAPE, **VALUES, **NAMES, **REMOTE, **HOSTS}


def problems_of(text: str) -> tuple[Problem, ...]:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return caught.value.problems


def test_base_manifest_of_the_cases_is_valid() -> None:
    assert len(parse(BASE).entries) == 4
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_a_fault_reports_its_line_and_field(name: str) -> None:
    """Each gives exactly one problem: no fault brings others along."""
    old, new, line, where, words = CASES[name]
    assert BASE.count(old) == 1
    (problem,) = problems_of(BASE.replace(old, new))
    assert (problem.line, problem.where) == (line, where), problem
    for word in words:
        assert word in str(problem), problem


@pytest.mark.parametrize("source", ["pocket://+lora=pocket://", "pocket://+lora=", "stub://r+lora=a", "hf://o+lora=a"])
def test_a_source_and_the_adapter_merged_into_it_are_both_checked(source: str) -> None:
    (problem,) = problems_of(BASE.replace("hf://org/router", source))
    assert (problem.line, problem.where) == (7, "models.router.source")
    (entry, *_) = parse(BASE.replace("hf://org/router", "hf://org/router+lora=hf://org/billing+lora=a/b")).entries
    assert entry.source == "hf://org/router+lora=hf://org/billing+lora=a/b"


def test_faults_have_messages_of_their_own() -> None:
    messages = [problems_of(BASE.replace(old, new))[0].message for old, new, *_ in CASES.values()]
    assert len(set(messages)) == len(messages)


def test_all_faults_are_reported_at_once_in_the_order_of_lines() -> None:
    text = """\
cluster: [shop]
resources:
  gpu_budget: 18GX
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
        parse(BASE.replace("18GB", "18GX").replace("standby", "stand-by"), "shop.yaml")
    first, second = str(caught.value).splitlines()
    assert first.startswith("shop.yaml, line 3: resources.gpu_budget is '18GX', in an unknown unit")
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
        (
            "cluster: x\nmodels: {m: {source: 'pocket://', max_active_sessions: 1" + "0" * 5000 + "}}\n",
            "not a finite number",
        ),
        ("cluster: x\nmodels: {m: {source: 'pocket://', priority: !!int abc}}\n", "not a finite number"),
        ("cluster: x\nmodels: {m: {source: 'pocket://', sampling: {temperature: .nan}}}\n", "a number"),
    ],
)
def test_invalid_manifest_texts(text: str, words: str) -> None:
    assert words in " ".join(map(str, problems_of(text)))


@pytest.mark.parametrize(
    ("old", "new", "where", "words"),
    [
        ("models:", "mod\u0435ls:", "mod\u0435ls", ("U+0435 CYRILLIC SMALL LETTER IE", "looks like e", "'models'")),
        ("    tier: s", "    ti\u0435r: s", "models.specialists[1].ti\u0435r", ("U+0435", "did you mean 'tier'?")),
        ("resident", "r\u0435sident", "models.router.tier", ("U+0435", "did you mean 'resident'?")),
        ("id: billing", "id: b\u0456lling", "models.specialists[0].id", ("U+0456", "looks like i")),
        ("  router:", "  r\u03bfuter:", "models.r\u03bfuter", ("U+03BF GREEK SMALL LETTER OMICRON",)),
        ("hf://org/legal", "hf://\u043erg/legal", "models.specialists[1].source", ("U+043E", "looks like o")),
        ("cluster: shop", "cluster: sho\uff50", "cluster", ("FULLWIDTH LATIN SMALL LETTER P", "looks like p")),
        ("    tier: s", "    ti\u200ber: s", "models.specialists[1].ti\u200ber", ("U+200B ZERO WIDTH SPACE", "'tier'")),
        ("18GB", "18\u200bGB", "resources.gpu_budget", ("U+200B", "cannot be seen")),
        ("  ram_budget", "\u00a0 ram_budget", "\u00a0 ram_budget", ("U+00A0 NO-BREAK SPACE",)),
        ("    tier: s", "   \u00a0tier: s", "", ("is not YAML", "U+00A0 NO-BREAK SPACE")),
        ("  ram_budget", "\tram_budget", "", ("has a tab; write spaces",)),
    ],
)
def test_lookalike_character_is_reported_with_its_code_point(
    old: str, new: str, where: str, words: tuple[str, ...]
) -> None:
    told = [problem for problem in problems_of(BASE.replace(old, new, 1)) if problem.where == where]
    assert any(all(word in problem.message for word in words) for problem in told), told


def test_accented_letters_are_not_reported_as_lookalikes() -> None:
    (problem,) = problems_of(BASE.replace("tier: standby", "tier: r\u00e9serve"))
    assert "U+" not in problem.message


@pytest.mark.parametrize(
    ("old", "new", "line", "where"),
    [
        ("tier: resident", "tier: !!python/object/apply:os.system [touch ran]", 8, "models.router.tier"),
        ("tier: resident", "tier: !!python/name:os.system", 8, "models.router.tier"),
        ("tier: resident", "tier: !!python/object/new:os.system {a: b}", 8, "models.router.tier"),
        ("  router:", "  router: !!python/object:os.system", 6, "models.router"),
        ("  specialists:", "  specialists: !!python/tuple", 9, "models.specialists"),
        ("tier: resident", "!!python/name:os.system tier: resident", 8, "models.router.tier"),
        ("cluster: shop", "--- !!python/object/apply:os.system\ncluster: shop", 1, ""),
        ("tier: resident", "tier: !secret resident", 8, "models.router.tier"),
    ],
)
def test_yaml_tag_is_reported_as_written(old: str, new: str, line: int, where: str) -> None:
    (tag,) = (word for word in new.split() if word.startswith("!"))
    told = [(problem.line, problem.where) for problem in problems_of(BASE.replace(old, new, 1)) if tag in str(problem)]
    assert told == [(line, where)]


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9) if i else 'lol'}]" for i in range(12)]
    (problem,) = problems_of("\n".join(levels))
    assert "once its aliases are written out" in problem.message
    assert problem.line > 1


def test_alias_that_contains_itself_is_rejected() -> None:
    (problem,) = problems_of("cluster: x\nmodels: &m\n  a: *m\n")
    assert (problem.line, "*m" in problem.message) == (3, True)


@pytest.mark.parametrize("text", ["[" * 100_000, "a: " + "{b: " * 60_000, "- " * 50_000])
def test_depth_is_bounded_before_anything_recurses(text: str) -> None:
    (problem,) = problems_of(text)
    assert "deep" in problem.message


def test_a_text_that_is_too_large_is_not_read() -> None:
    (problem,) = problems_of(BASE + "#" * MAX_BYTES)
    assert "larger than" in problem.message


def test_a_text_full_of_faults_gives_a_bounded_list() -> None:
    many = "".join(f"    - {{id: m{i}, source: pocket://, teir: x}}\n" for i in range(2 * MAX_PROBLEMS))
    problems = problems_of(f"cluster: x\nmodels:\n  all:\n{many}")
    assert len(problems) == MAX_PROBLEMS


def test_alias_has_the_value_of_its_anchor() -> None:
    text = BASE.replace("source: hf://org/billing", "source: &shared hf://org/shared").replace(
        "hf://org/legal", "*shared"
    )
    manifest = parse(text)
    assert manifest.entry("billing").source == manifest.entry("legal").source == "hf://org/shared"


def test_validator_problems_have_the_lines_of_their_block() -> None:
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
