"""Manifests with one fault in a key or a value: what is replaced in a good one, and what is told."""

from __future__ import annotations

from collections.abc import Sequence

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

# What is replaced in BASE, by what; the line and path of the one fault; words that its message has.
Case = tuple[str, str, int, str, Sequence[str]]

SHAPE: dict[str, Case] = {
    "unknown key at the top": ("resources:", "resource:", 2, "resource", ["did you mean 'resources'?"]),
    "unknown key of a model": ("    tier: resident\n", "    teir: resident\n", 8, "models.router.teir", ["'tier'"]),
    "unknown key, nothing near": ("    tier: resident\n", "    zzz: 1\n", 8, "models.router.zzz", ["known keys are"]),
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
        ["!!python/object/apply:os.system", "only plain data"],
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
        ["is not supported by this command"],
    ),
}

VALUES: dict[str, Case] = {
    "size without unit": (
        "tier: resident",
        "size: 18",
        8,
        "models.router.size",
        ["'18'", "without a unit", "18GB", "18GiB"],
    ),
    "size in an unknown unit": ("18GB", "18GX", 3, "resources.gpu_budget", ["unknown unit", "GiB"]),
    "size in a doubtful unit": (
        "tier: resident",
        "size: 18G",
        8,
        "models.router.size",
        ["GB (decimal)", "GiB"],
    ),
    "size in the wrong case": ("tier: resident", "size: 18gb", 8, "models.router.size", ["did you mean GB?"]),
    "budget in NRT's MiB": (
        "18GB",
        '"18432"',
        3,
        "resources.gpu_budget",
        ["'18432'", "without a unit", "18432MiB", "NRT", "18432B for bytes"],
    ),
    "negative budget": ("18GB", "-18GB", 3, "resources.gpu_budget", ["'-18GB'", "cannot be negative"]),
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
    "negative duration": ("tier: resident", "keep_alive: -5m", 8, "models.router.keep_alive", ["cannot be negative"]),
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
    "id beside the key": ("tier: resident", "id: route", 8, "models.router.id", ["the key 'router' is the model's id"]),
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
        ["is -1", "0 to 1,000,000"],
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
    "sequences at once, negative": (
        "tier: resident",
        "engine: {max_num_seqs: -1}",
        8,
        "models.router.engine.max_num_seqs",
        ["is -1", "1 to 65,536"],
    ),
    "a chunk that no prompt moves on with": (
        "tier: resident",
        "engine: {max_chunk_tokens: -3}",
        8,
        "models.router.engine.max_chunk_tokens",
        ["is -3", "at least 1"],
    ),
    "skips, negative": (
        "tier: resident",
        "engine: {max_skips: -1}",
        8,
        "models.router.engine.max_skips",
        ["is -1", "at least 0"],
    ),
    "half a character in a prompt": (
        "tier: resident",
        'system_prompt: "be\\ud83dbrief"',
        8,
        "models.router.system_prompt",
        ["'be\\ud83dbrief'", "half of a surrogate pair (\\ud83d)", "character 3"],
    ),
    "half a character in a template": (
        "tier: resident",
        'chat_template: "\\udc00"',
        8,
        "models.router.chat_template",
        ["\\udc00"],
    ),
    "half a character in a key": (
        "tier: resident",
        '"ti\\ud800er": resident',
        8,
        "models.router",
        ["has a key that is", "\\ud800"],
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
