"""Phrase files: parses slots and topics from plain text, and expands them into requests and answers.

A phrase file is read line by line:

    [slot plan]                values, separated by ` | `, over as many lines as needed
    [topic refund billing]     a name, an intent, optionally `train` (never evaluated), then lines with
    ? a request                ! an answer to it
    > a follow-up request      < an answer to the follow-up

Requests after an answer start a new group of the same topic: answers belong to the requests right above them.
Text expands `(this|that|)` to one of its alternatives and `{plan}` to a value of that slot. A slot keeps its value
within a conversation, so an answer can echo the request; it is only chosen when all slots that it names are bound.
Slots whose name starts with `_` are decoration: drawn afresh each time and allowed anywhere.

About one request template and one slot value in ten is held out, by a hash of its text: the training split never sees
them, and a held-out request is always built on a held-out template.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

HELD_OUT_OF = 10
MIN_SPLIT_VALUES = 8
SLOT = re.compile(r"\{(\w+)\}")
CHOICE = re.compile(r"\(([^()]*\|[^()]*)\)")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeioAEIO]|u[^ns]|un[^i]|NDA|LLC|SMS|SSL|HTTP)(?!eu|Eu|one\b|once)")

Bound = dict[str, str]


def is_held_out(text: str) -> bool:
    """True if a text is held out, by a hash of the text, so that new phrases never move another phrase to the other
    split."""
    return hashlib.sha256(text.encode()).digest()[0] * HELD_OUT_OF < 256


@dataclass
class Topic:
    """One subject of one intent: requests, answers, and a second turn."""

    name: str
    intent: str
    requests: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    follow_ups: list[str] = field(default_factory=list)
    follow_answers: list[str] = field(default_factory=list)
    train_only: bool = False


@dataclass
class Grammar:
    """All slots and topics of the phrase files, expanded from either split."""

    slots: dict[str, list[str]] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    noise: float = 0.0  # share of slot values that training replaces by an invented word
    words: list[str] = field(default_factory=list)

    def invented(self, rng: Random) -> str:
        """A word that does not exist, made of the halves of two words, so that only its context has information."""
        if not self.words:
            values = [value for name in self.slots for value in self.values(name, False)]
            self.words = sorted({word for value in values for word in re.findall(r"[a-z]{4,}", value)})
        first, second = rng.choice(self.words), rng.choice(self.words)
        return first[: len(first) // 2 + 1] + second[len(second) // 2 :]

    def add_group(self, topic: Topic) -> Topic:
        """Add further requests with separate answers; second turns are shared within the topic."""
        name = f"{topic.name.split('/')[0]}/{len(self.topics)}"
        shared = (topic.follow_ups, topic.follow_answers)
        return self.topics.setdefault(name, Topic(name, topic.intent, [], [], *shared, topic.train_only))

    def values(self, name: str, held_out: bool) -> list[str]:
        """Values of a slot in one split; a short slot (function words) is not split."""
        every = self.slots[name]
        if len(every) < MIN_SPLIT_VALUES or name.startswith("_"):
            return every
        return [value for value in every if is_held_out(value) == held_out] or every

    def expand(self, text: str, rng: Random, bound: Bound, held_out: bool) -> str:
        """Expand alternatives, then slots, until nothing is left."""
        while True:
            text, choices = CHOICE.subn(lambda match: rng.choice(match[1].split("|")), text)
            text, slots = SLOT.subn(lambda match: self.draw(match[1], rng, bound, held_out), text)
            if not choices and not slots:
                return re.sub(r" +(?=[ ?.!,]|$)", "", text).strip()

    def draw(self, name: str, rng: Random, bound: Bound, held_out: bool) -> str:
        """Bound value of a slot, or a new value, which is then bound."""
        if name in bound:
            return bound[name]
        if name in NUMBERS:
            value = number(name, rng)
        elif self.noise and not held_out and len(self.slots[name]) >= MIN_SPLIT_VALUES and rng.random() < self.noise:
            value = self.invented(rng)
        else:
            value = self.expand(rng.choice(self.values(name, held_out)), rng, bound, held_out)
        if not name.startswith("_"):
            bound[name] = value
        return value

    def topics_of(self, intent: str, held_out: bool, train_only: bool = False) -> list[Topic]:
        """Topics with a request in this split; if held out, those for training only or the others."""
        topics = [
            t for t in self.topics.values() if t.intent == intent and (not held_out or t.train_only == train_only)
        ]
        return [topic for topic in topics if any(is_held_out(text) == held_out for text in topic.requests)]

    def request(self, topic: Topic, rng: Random, bound: Bound, held_out: bool) -> str:
        """One request of a topic; binds the slots that it uses."""
        side = [text for text in topic.requests if is_held_out(text) == held_out]
        return sentence(self.expand(rng.choice(side), rng, bound, held_out))

    def follow_up(self, topic: Topic, rng: Random, bound: Bound) -> tuple[str, str]:
        """A second request with its answer; lines are paired in order if the phrase file has equally many of both."""
        at = rng.randrange(len(topic.follow_ups))
        paired = len(topic.follow_ups) == len(topic.follow_answers)
        answer = topic.follow_answers[at] if paired else rng.choice(topic.follow_answers)
        return sentence(self.expand(topic.follow_ups[at], rng, bound, False)), sentence(
            self.expand(answer, rng, bound, False)
        )

    def answer(self, topic: Topic, rng: Random, bound: Bound) -> str:
        """One answer without unbound slots; raises an error if the phrase file has none."""
        fits = [text for text in topic.answers if all(n in bound or n.startswith("_") for n in SLOT.findall(text))]
        if not fits:
            raise ValueError(
                f"topic {topic.name}: no answer fits a request with {sorted(bound)}; add one without slots"
            )
        richest = max(len(set(SLOT.findall(text))) for text in fits)
        rich = [text for text in fits if len(set(SLOT.findall(text))) == richest]
        return sentence(self.expand(rng.choice(rich if rng.random() < 0.6 else fits), rng, bound, False))


NUMBERS = {"amount", "order", "code", "days", "small", "year", "clock", "percent", "version", "count", "big"}


def number(name: str, rng: Random) -> str:
    """Value of a slot that is drawn and not listed, because numbers need not be memorised."""
    if name == "amount":
        whole = rng.choice([rng.randint(1, 99), rng.randint(1, 99), rng.randint(100, 999), rng.randint(1000, 9999)])
        cents = rng.choice(["", "", ".00", ".99", ".50", f".{rng.randint(1, 99):02d}"])
        return rng.choice(
            [f"${whole}{cents}", f"${whole}{cents}", f"{whole} dollars", f"€{whole}{cents}", f"£{whole}{cents}"]
        )
    ranges = {
        "days": (2, 30),
        "small": (2, 12),
        "year": (2005, 2026),
        "percent": (2, 80),
        "count": (2, 500),
        "big": (10, 9999),
    }
    if name in ranges:
        return str(rng.randint(*ranges[name]))
    if name == "clock":
        return f"{rng.randint(1, 12)}{rng.choice(['', ':15', ':30', ':45'])} {rng.choice(['am', 'pm'])}"
    if name == "version":
        return ".".join(str(rng.randint(0, 20)) for _ in range(rng.choice([2, 3])))
    if name == "order":
        return f"{rng.choice(['', '#', 'INV-', 'A', 'ORD-', '#'])}{rng.randint(1000, 999999)}"
    return rng.choice(
        [
            "400",
            "401",
            "403",
            "404",
            "408",
            "413",
            "429",
            "500",
            "500",
            "502",
            "503",
            "504",
            "E12",
            "0x80070005",
            f"E{rng.randint(1, 999)}",
            f"{rng.randint(1000, 9999)}",
            "ERR_TIMEOUT",
            "ECONNREFUSED",
            "SSL_ERROR",
        ]
    )


def sentence(text: str) -> str:
    """Text with an initial capital and the article that fits the value of a slot."""
    text = ARTICLE.sub(r"\1n ", text)
    return text[:1].upper() + text[1:]


def read_grammar(folder: Path) -> Grammar:
    """Read every phrase file of a folder in the order of names; a malformed line is an error with its location."""
    grammar = Grammar()
    marks = {"?": "requests", "!": "answers", ">": "follow_ups", "<": "follow_answers"}
    slot, topic = None, None
    for path in sorted(folder.glob("*.txt")):
        for place, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if line.startswith("["):
                kind, name, *intent = line.strip("[]").split()
                train_only = intent[1:] == ["train"]
                slot, topic = (name, None) if kind == "slot" else (None, Topic(name, intent[0], train_only=train_only))
                if slot is not None:
                    grammar.slots.setdefault(slot, [])
                if topic is not None:
                    topic = grammar.topics.setdefault(name, topic)
            elif slot is not None:
                grammar.slots[slot] += [value.strip() for value in line.split(" | ")]
            elif topic is not None and line[0] in marks:
                if line[0] == "?" and topic.answers:
                    topic = grammar.add_group(topic)
                getattr(topic, marks[line[0]]).append(line[1:].strip())
            else:
                raise ValueError(
                    f"{path.name}:{place}: expected a slot value or one of {' '.join(marks)}, got {line!r}"
                )
    return grammar
