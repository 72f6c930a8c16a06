"""The replicas of a device: who loads, who is there and of which class. Any thread may look, change and take away."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from lockstep.worker.replica import Replica


class Present(NamedTuple):
    """Who is there at one moment, in order of loading; replaced as a whole and never changed."""

    replicas: Mapping[str, Replica]
    classes: Mapping[str, int]
    """Their priority classes."""


class Fleet:
    """Keys are claimed when a load begins, and given back when it failed or the replica is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._classes: dict[str, int] = {}
        """Of all whose key is claimed."""
        self._is_closed = False
        self.present = Present({}, {})

    @property
    def classes(self) -> Mapping[str, int]:
        """Of those that are there and those that load."""
        return self._classes

    def find(self, key: str) -> Replica | None:
        return self.present.replicas.get(key)

    def claim(self, key: str, priority: int) -> bool:
        """A load is about to begin; False: the key is taken."""
        with self._lock:
            is_free = key not in self._classes
            if is_free:
                self._classes[key] = priority
            return is_free

    def prioritise(self, key: str, priority: int) -> None:
        """Change the class of a replica that is there or loads; others have none."""
        with self._lock:
            if key in self._classes:
                self._classes[key] = priority
                self._replace(self.present.replicas)

    def add(self, replica: Replica) -> bool:
        """It is loaded, under a key that was claimed; False: the device ends, and nobody wants it any more."""
        with self._lock:
            if not self._is_closed:
                self._replace({**self.present.replicas, replica.key: replica})
            return not self._is_closed

    def remove(self, key: str) -> None:
        """Nobody finds it from now on; its key stays claimed until `release`."""
        with self._lock:
            self._replace({other: kept for other, kept in self.present.replicas.items() if other != key})

    def release(self, key: str) -> None:
        with self._lock:
            self._classes.pop(key, None)

    def close(self) -> tuple[Replica, ...]:
        """The device ends: nobody is found from now on, or added. Returns who was there."""
        with self._lock:
            replicas = tuple(self.present.replicas.values())
            self._is_closed = True
            self._replace({})
            return replicas

    def _replace(self, replicas: Mapping[str, Replica]) -> None:
        self.present = Present(replicas, {key: self._classes[key] for key in replicas})
