"""Training conversations: draws messages, personas and the weights of their tokens in the loss.

A conversation is a list of `Part`s (role, text, weight of its loss). The router's answer weighs most, a specialist's
answer one, a user's words a little: predicting them teaches the language of requests. All draws come from one seeded
generator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from lockstep.pocket import INTENTS, PERSONAS
from tools.pocket.grammar import Grammar, Topic
from tools.pocket.public import Message

LABEL_WEIGHT, ANSWER_WEIGHT, HISTORY_WEIGHT, USER_WEIGHT = 4.0, 1.0, 0.3, 0.2
PUBLIC_SHARE = {"billing": 0.5, "technical": 0.0, "legal": 0.0, "none": 0.6}
ROUTED_SHARE, OUT_OF_SCOPE_COPIES = 0.72, 10
# Weight of a request that is only for training, relative to others: for learning a route, and for learning its answer.
LEXICON_SHARE = {True: 3.0, False: 0.5}
# Out-of-scope messages of CLINC150 with such words may belong to a specialist here, so they are not used for training.
OTHER_SPECIALIST = re.compile(
    r"\b(bank|fee|bill|billing|credit|card|transfer|tax|price|invest|share|law|legal|phone|android|stock|saas)", re.I
)

PARAPHRASES = {
    "router": [
        "You are a router. Which specialist should answer the last message: billing, technical, legal or none?",
        "Classify the last user message as billing, technical, legal or none. Answer with the word only.",
        "Choose the specialist for this request. Reply with exactly one of: billing, technical, legal, none.",
        "Pick the intent of the last message: billing, technical, legal, none.",
        "You route support requests. Answer only billing, technical, legal or none.",
    ],
    "billing": [
        "You are the billing specialist of the support team.",
        "You answer questions about billing.",
        "You handle payments, refunds and invoices. Answer in a few sentences.",
    ],
    "technical": [
        "You are the technical specialist of the support team.",
        "You are a technical support engineer.",
        "You solve technical problems. Answer in a few sentences.",
    ],
    "legal": [
        "You are the legal specialist of the support team.",
        "You answer legal questions in general terms.",
        "You explain the law. Answer in a few sentences.",
    ],
    "general": [
        "You are a helpful assistant.",
        "You are the general assistant of the support team.",
        "Answer the user in a few friendly sentences.",
    ],
}


@dataclass(frozen=True)
class Part:
    """One message of a conversation, with the weight of its tokens in the loss and a request's intent."""

    role: str
    text: str
    weight: float
    intent: str = ""


@dataclass(frozen=True)
class Turn:
    """A request with its intent and an answer, and the templates of all answers that the request may get."""

    request: str
    intent: str
    answer: str
    answers: tuple[str, ...] = ()


def typo(text: str, rng: Random) -> str:
    """Add one typing error to a word of four letters or more."""
    places = [m.start() for m in re.finditer(r"(?<=[a-z])[a-z](?=[a-z]{2})", text)]
    if not places:
        return text
    at = rng.choice(places)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at + 1 :] if kind == 1 else text[:at] + text[at] + text[at:]


def rough(text: str, rng: Random) -> str:
    """Imitate typed text: casing, punctuation, apostrophes, errors."""
    if rng.random() < 0.45:
        text = text.rstrip("?.! ")
    if rng.random() < 0.4:
        text = text.lower()
    if rng.random() < 0.15:
        text = text.replace("'", "")
    if rng.random() < 0.1:
        text = re.sub(r"[,.;:?!](?=\s|$)", "", text)
    if rng.random() < 0.02:
        text = text.upper()
    for _ in range(rng.choice([0] * 9 + [1, 1, 2])):
        text = typo(text, rng)
    return text


class Writer:
    """Draws turns and conversations from the phrase files and the public messages of one split."""

    def __init__(
        self, grammar: Grammar, public: list[Message], held_out: bool, rng: Random, train_only: bool = False
    ) -> None:
        self.grammar, self.held_out, self.rng = grammar, held_out, rng
        self.topics = {intent: grammar.topics_of(intent, held_out, train_only) for intent in INTENTS}
        self.weights = {
            (intent, routed): [len(t.requests) * (share if t.train_only else 1.0) for t in topics]
            for intent, topics in self.topics.items()
            for routed, share in LEXICON_SHARE.items()
        }
        self.public = {intent: [m for m in public if m.intent == intent] for intent in INTENTS}
        self.public["none"] = [
            copy
            for m in self.public["none"]
            if m.public != "oos" or not OTHER_SPECIALIST.search(m.text)
            for copy in [m] * (OUT_OF_SCOPE_COPIES if m.public == "oos" else 1)
        ]

    def phrase(self, slot: str) -> str:
        """A decoration, independent of bound slots."""
        return self.grammar.draw(slot, self.rng, {}, False)

    def dress(self, text: str) -> str:
        """Add greetings, stories and closings around a request, alike for every intent."""
        rng = self.rng
        if rng.random() < 0.22:
            keep = text.startswith(("I ", "I'"))
            text = f"{self.phrase('_opener')} {text if keep else text[:1].lower() + text[1:]}"
        if rng.random() < 0.14:
            story = self.phrase("_story")
            end = "" if text.endswith(("?", ".", "!")) else "."
            text = f"{story} {text}" if rng.random() < 0.5 else f"{text}{end} {story}"
        if rng.random() < 0.2:
            end = "" if text.endswith(("?", ".", "!")) else rng.choice([".", ",", ""])
            text = f"{text}{end} {self.phrase('_closer')}"
        return rough(text, rng)

    def topic(self, intent: str, routed: bool) -> Topic:
        """A topic for learning a route or an answer, weighted by the number of its requests."""
        return self.rng.choices(self.topics[intent], self.weights[intent, routed])[0]

    def turns(self, intent: str, follow_up: bool = False, routed: bool = True) -> list[Turn]:
        """One turn of an intent, or two about the same topic."""
        rng = self.rng
        if not follow_up and self.public[intent] and rng.random() < PUBLIC_SHARE[intent]:
            message = rng.choice(self.public[intent])
            text = self.dress(message.text) if rng.random() < 0.5 else message.text
            return [Turn(text, intent, message.answer, (message.answer,))]
        topic, bound = self.topic(intent, routed), dict[str, str]()
        first = Turn(self.dress(self.grammar.request(topic, rng, bound, self.held_out)), intent, "")
        turns = [Turn(first.request, intent, self.grammar.answer(topic, rng, bound), tuple(topic.answers))]
        if follow_up and topic.follow_ups:
            pair = self.grammar.follow_up(topic, rng, bound)
            turns.append(Turn(rough(pair[0], rng), intent, pair[1], tuple(topic.follow_answers)))
        return turns

    def history(self) -> list[Turn]:
        """Earlier turns: mostly none, sometimes many, so that longer contexts are trained."""
        rng, turns = self.rng, list[Turn]()
        for _ in range(rng.choice([0] * 46 + [1, 1, 1, 1, 2, rng.randint(3, 12)])):
            turns += self.turns(rng.choice(INTENTS), rng.random() < 0.3)
        return turns

    def persona(self, role: str) -> str:
        """The persona's text, or in three of ten cases a paraphrase."""
        return self.rng.choice(PARAPHRASES[role]) if self.rng.random() < 0.3 else PERSONAS[role]

    def conversation(self) -> list[Part]:
        """One training sample: a hop of the router, or an answer."""
        rng = self.rng
        intent, routed = rng.choice(INTENTS), rng.random() < ROUTED_SHARE
        turns = self.history() + self.turns(intent, rng.random() < 0.2, routed)
        if routed:
            system: str | None = self.persona("router")
            last, weight = intent, LABEL_WEIGHT
        else:
            role = rng.choice([intent, intent, intent, "general", "none"])
            bare = role == "none" and intent != "none"
            system = None if bare else self.persona("general" if role == "none" else role)
            last, weight = turns[-1].answer, ANSWER_WEIGHT
            if intent == "none" and rng.random() < 0.25:
                system = None
        return self.rendered(turns, system, last, weight)

    def answered(self, specialist: str) -> list[Part]:
        """One training sample of a specialist that is an adapter: its answer, without a system message."""
        turns = self.history() + self.turns(specialist, self.rng.random() < 0.2, False)
        return self.rendered(turns, None, turns[-1].answer, ANSWER_WEIGHT)

    def rendered(self, turns: list[Turn], system: str | None, last: str, weight: float) -> list[Part]:
        """Messages of a conversation with a last answer, and a system message mostly behind the requests."""
        parts = [Part("user", turns[0].request, USER_WEIGHT, turns[0].intent)]
        for before, turn in pairwise(turns):
            parts.append(Part("assistant", before.answer, HISTORY_WEIGHT))
            parts.append(Part("user", turn.request, USER_WEIGHT, turn.intent))
        if system is not None:
            parts.insert(len(parts) if self.rng.random() < 0.82 else 0, Part("system", system, 0.0))
        return [*parts, Part("assistant", last, weight)]
