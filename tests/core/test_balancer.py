"""Balancer compared with a plain implementation, and properties of every choice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.balancer import MAX_SESSIONS, Balancer, RoutingChoice, RoutingPolicy, Why
from lockstep.errors import ConfigError


def chain(*names: int) -> tuple[bytes, ...]:
    """Contents of a prompt: each depends on all blocks before it."""
    return tuple(bytes(names[: end + 1]) for end in range(len(names)))


class Plain:
    """Plain implementation of the same choices with lists and searches."""

    def __init__(self, num_replicas: int, policy: RoutingPolicy, max_imbalance: int) -> None:
        self.policy, self.max_imbalance = policy, max_imbalance
        self.loads = [0] * num_replicas
        self.there = [True] * num_replicas
        self.contents: list[dict[bytes, None]] = [{} for _ in range(num_replicas)]
        self.sessions: dict[str, int] = {}
        self.last = num_replicas - 1

    def depth(self, replica: int, hashes: tuple[bytes, ...]) -> int:
        missing = [place for place, each in enumerate(hashes) if each not in self.contents[replica]]
        return missing[0] if missing else len(hashes)

    def choose(self, hashes: tuple[bytes, ...], session: str | None) -> RoutingChoice | None:
        size = len(self.loads)
        in_turn = [(self.last + 1 + place) % size for place in range(size)]
        in_turn = [each for each in in_turn if self.there[each]]
        if not in_turn:
            return None
        choice = self.chosen(in_turn, hashes, session)
        self.last = choice.replica
        self.loads[choice.replica] += 1
        if session is not None:
            self.sessions[session] = choice.replica
        return choice

    def chosen(self, in_turn: list[int], hashes: tuple[bytes, ...], session: str | None) -> RoutingChoice:
        if self.policy is RoutingPolicy.ROUND_ROBIN:
            return RoutingChoice(in_turn[0], Why.TURN, 0)
        least = min(self.loads[each] for each in in_turn)
        allowed = [each for each in in_turn if self.loads[each] <= least + self.max_imbalance]
        before = self.sessions.get(session or "")
        if self.policy is not RoutingPolicy.LEAST_LOADED and before in allowed:
            assert before is not None
            return RoutingChoice(before, Why.SESSION, self.depth(before, hashes))
        depth = max(self.depth(each, hashes) for each in allowed)
        if self.policy is RoutingPolicy.PREFIX and depth:
            best = [each for each in allowed if self.depth(each, hashes) == depth]
            return RoutingChoice(min(best, key=lambda each: self.loads[each]), Why.PREFIX, depth)
        return RoutingChoice(min(in_turn, key=lambda each: self.loads[each]), Why.LOAD, 0)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_replicas=st.integers(1, 9),
    policy=st.sampled_from(RoutingPolicy),
    max_imbalance=st.integers(0, 5) | st.just(10**12),
)
def test_choices_equal_those_of_a_plain_implementation(
    seed: int, num_replicas: int, policy: RoutingPolicy, max_imbalance: int
) -> None:
    """With any sequence of choices, ends, contents, withdrawals, losses, admissions and state transfers."""
    draw = random.Random(seed)
    ours, plain = Balancer(num_replicas, policy, max_imbalance), Plain(num_replicas, policy, max_imbalance)
    for step in range(80):
        if step == 40:
            state, ours = ours.state(), Balancer(num_replicas, policy, max_imbalance)
            ours.restore(state)
            assert ours.state() == state
        replica = draw.randrange(num_replicas)
        match draw.randrange(10):
            case 0 | 1 | 2 | 3:
                hashes = chain(*(draw.randrange(2) for _ in range(draw.randrange(5))))
                session = draw.choice((None, "a", "b"))
                assert ours.choose(hashes, session) == plain.choose(hashes, session)
            case 4 | 5:
                if plain.loads[replica]:
                    plain.loads[replica] -= 1
                    ours.ended(replica)
            case 6 | 7:
                contents = chain(*(draw.randrange(2) for _ in range(draw.randrange(5))))
                is_held = draw.random() < 0.7
                ours.learn(replica, [(each, is_held) for each in contents])
                for each in contents:
                    if is_held:
                        plain.contents[replica][each] = None
                    else:
                        plain.contents[replica].pop(each, None)
            case 8:
                is_lost = draw.random() < 0.5
                ours.withdraw(replica, is_lost)
                plain.there[replica] = False
                if is_lost:
                    plain.loads[replica] = 0
                    plain.contents[replica] = {}
            case 9:
                ours.admit(replica)
                plain.there[replica] = True
        assert [ours.load(each) for each in range(num_replicas)] == plain.loads
        assert [ours.is_there(each) for each in range(num_replicas)] == plain.there
        assert [ours.num_held(each) for each in range(num_replicas)] == [len(each) for each in plain.contents]


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_replicas=st.integers(2, 70),
    policy=st.sampled_from(RoutingPolicy),
    max_imbalance=st.integers(0, 6),
)
def test_no_replica_starves_and_none_is_chosen_beyond_the_imbalance_limit(
    seed: int, num_replicas: int, policy: RoutingPolicy, max_imbalance: int
) -> None:
    """Even if all requests prefer the same replica."""
    draw = random.Random(seed)
    balancer = Balancer(num_replicas, policy, max_imbalance)
    balancer.learn(draw.randrange(num_replicas), [(each, True) for each in chain(1, 1, 1)])
    open_requests = list[int]()
    num_chosen = 12 * num_replicas
    may_end = draw.random() < 0.5
    for _ in range(num_chosen):
        least = min(balancer.load(each) for each in range(num_replicas))
        choice = balancer.choose(chain(1, 1, 1, draw.randrange(3)), draw.choice((None, "s")))
        assert choice is not None
        if policy is not RoutingPolicy.ROUND_ROBIN:
            assert balancer.load(choice.replica) - 1 <= least + max_imbalance
        open_requests.append(choice.replica)
        balancer.learn(choice.replica, [(each, True) for each in chain(1, 1, 1)])
        if may_end and len(open_requests) > 3 * num_replicas:
            balancer.ended(open_requests.pop(draw.randrange(len(open_requests))))
    if not may_end:
        loads = [balancer.load(each) for each in range(num_replicas)]
        assert sum(loads) == num_chosen
        assert max(loads) - min(loads) <= max_imbalance + 1
        assert min(loads) >= num_chosen // num_replicas - max_imbalance - 1


def test_a_session_stays_on_its_replica_up_to_the_imbalance_limit() -> None:
    balancer = Balancer(3, RoutingPolicy.SESSION, max_imbalance=1)
    whos = [balancer.choose(session="s") for _ in range(3)]
    assert [each and (each.replica, each.why) for each in whos] == [
        (0, Why.LOAD),
        (0, Why.SESSION),
        (1, Why.LOAD),
    ]


def test_a_draining_replica_gets_no_requests_and_its_sessions_move() -> None:
    balancer = Balancer(2)
    first = balancer.choose(chain(1), "s")
    assert first is not None
    balancer.withdraw(first.replica)
    again = balancer.choose(chain(1), "s")
    assert again is not None
    assert again.replica != first.replica
    balancer.withdraw(again.replica)
    assert balancer.choose(chain(1), "s") is None
    balancer.ended(first.replica)
    balancer.admit(first.replica)
    assert balancer.choose() == RoutingChoice(first.replica, Why.LOAD, 0)


def test_the_state_of_the_balancer_is_bounded() -> None:
    """Contents are bounded by those of the replicas, sessions by a number."""
    balancer = Balancer(4)
    for number in range(MAX_SESSIONS + 10):
        choice = balancer.choose(session=f"s{number}")
        assert choice is not None
        balancer.ended(choice.replica)
    assert len(balancer.state().sessions) == MAX_SESSIONS
    for replica in range(4):
        balancer.learn(replica, [(each, True) for each in chain(*range(50))])
    assert all(balancer.is_held(each) for each in chain(*range(50)))
    for replica in range(4):
        balancer.learn(replica, [(each, False) for each in chain(*range(50))])
    assert not balancer.state().holders


@pytest.mark.parametrize(("num_replicas", "max_imbalance"), [(0, 4), (2, -1)])
def test_invalid_arguments_are_refused(num_replicas: int, max_imbalance: int) -> None:
    with pytest.raises(ConfigError):
        Balancer(num_replicas, max_imbalance=max_imbalance)
