"""Random histories of groups for recorders of routes, with all events of balancers."""

from __future__ import annotations

import random
from hashlib import blake2b
from pathlib import Path
from typing import Any

from lockstep.cluster.route_recorder import RouteRecorder
from lockstep.core.balancer import Balancer, RoutingPolicy
from lockstep.replay.recorded_routes import ROUTES
from lockstep.worker.flight.options import TraceOptions
from tests.replay.recordings import read_whole


def chain(*names: int) -> tuple[bytes, ...]:
    """Hashes of a prompt's blocks: each depends on all blocks before it."""
    return tuple(blake2b(bytes(names[: end + 1]), digest_size=16).digest() for end in range(len(names)))


class History:
    """Groups whose balancers and recorder get the same events.

    Args:
        policy: of every group; None: drawn.
    """

    def __init__(self, recorder: RouteRecorder, seed: int, policy: RoutingPolicy | None = None) -> None:
        self.recorder = recorder
        self.draw = random.Random(seed)
        self.policy = policy
        self.balancers: dict[str, Balancer] = {}
        self.open: list[tuple[str, int]] = []
        self.num_routes = 0

    def begin(self, group: str) -> None:
        policy = self.policy or self.draw.choice(list(RoutingPolicy))
        num, max_imbalance = self.draw.randrange(1, 6), self.draw.randrange(4)
        self.recorder.opened(group, num, policy, max_imbalance)
        self.balancers[group] = Balancer(num, policy, max_imbalance)
        self.open = [each for each in self.open if each[0] != group]

    def live(self, num_events: int) -> None:
        for _ in range(num_events):
            self.happen()

    def happen(self) -> None:
        draw, recorder = self.draw, self.recorder
        if not self.balancers or draw.random() < 0.01:
            self.begin(draw.choice("ab"))
        group = draw.choice(sorted(self.balancers))
        balancer = self.balancers[group]
        replica = draw.randrange(balancer.num_replicas)
        hashes = chain(*(draw.randrange(2) for _ in range(draw.randrange(6))))
        match draw.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                session = draw.choice((None, "anna", "bert"))
                choice = balancer.choose(hashes, session)
                recorder.chosen(group, hashes, session, choice)
                self.num_routes += 1
                if choice is not None:
                    self.open.append((group, choice.replica))
            case 5 | 6:
                if self.open:
                    group, replica = self.open.pop(draw.randrange(len(self.open)))
                    self.balancers[group].ended(replica)
                    recorder.ended(group, replica)
            case 7 | 8 | 9:
                news = [(each, draw.random() < 0.7) for each in hashes]
                balancer.learn(replica, news)
                recorder.learned(group, replica, news)
            case 10:
                is_lost = draw.random() < 0.5
                balancer.withdraw(replica, is_lost)
                recorder.withdrawn(group, replica, is_lost)
                if is_lost:
                    self.open = [each for each in self.open if each != (group, replica)]
            case 11:
                balancer.admit(replica)
                recorder.admitted(group, replica)


def recorded(folder: Path, seed: int, num_events: int = 200, policy: RoutingPolicy | None = None) -> History:
    """Record a history in a folder, in one file."""
    life = History(RouteRecorder(TraceOptions(str(folder))), seed, policy)
    life.live(num_events)
    life.recorder.close()
    return life


def entries_in(path: Path) -> list[Any]:
    """Entries of a file, including its header and its end."""
    return read_whole(path, ROUTES)
