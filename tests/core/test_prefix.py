"""Hashes that are equal in every process, and a cache that maps them one to one."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.prefix import AdapterStart, PrefixCache, block_hashes, namespace_of
from tests.core.drive import prompt, run, scheduler


def test_hashes_are_the_documented_chain() -> None:
    root = blake2b(b"model", digest_size=16).digest()
    first = blake2b(root + struct.pack("<2I", 1, 2), digest_size=16).digest()
    second = blake2b(first + struct.pack("<2I", 3, 2**32 - 1), digest_size=16).digest()
    assert block_hashes(b"model", [1, 2, 3, 2**32 - 1, 5], 2) == (first, second)


def test_a_published_hash_vector() -> None:
    assert [h.hex() for h in block_hashes(b"", range(8), 4)] == [
        "de2b1b0617e7d6fda4d4aab2b6241a61",
        "431ce80d152c6058d44bdae6f5f324c7",
    ]
    assert namespace_of("ab", "salt") == b"ab\0salt"


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(b"", [0] * n, 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert len(block_hashes(b"", [0] * 55, 16)) == 3


def test_equal_prefixes_have_equal_hashes_except_in_other_namespaces() -> None:
    ours, theirs = block_hashes(b"a", range(12), 4), block_hashes(b"a", [*range(8), 99, 98, 97, 96], 4)
    assert ours[:2] == theirs[:2]
    assert ours[2] != theirs[2]
    salted = block_hashes(b"a\0salt", range(12), 4)
    assert not set(ours) & set(salted)
    assert salted == block_hashes(b"a\0salt", range(12), 4)


def test_a_change_in_a_block_changes_all_later_hashes() -> None:
    ours, theirs = block_hashes(b"", [1] * 12, 4), block_hashes(b"", [2] + [1] * 11, 4)
    assert not set(ours) & set(theirs)


def test_hashes_do_not_depend_on_the_process() -> None:
    code = "from lockstep.core.prefix import block_hashes; print([h.hex() for h in block_hashes(b'x', range(9), 3)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(outputs) == 1


def test_the_first_block_of_a_content_is_the_cached_one() -> None:
    cache = PrefixCache(9)
    cache.publish([1], [b"h"])
    cache.publish([2], [b"h"])
    cache.publish([1], [b"other"])
    assert cache.find(b"h") == (1,)
    assert cache.find(b"other") == ()
    assert dict(cache.blocks) == {1: b"h"}
    cache.forget(1)
    cache.publish([2], [b"h"])
    assert cache.find(b"h") == (2,)
    assert len(cache) == 1
    cache.check()


def test_match_stops_at_the_first_gap_and_changes_nothing() -> None:
    cache = PrefixCache(9)
    hashes = [b"0", b"1", b"2", b"3"]
    for block, block_hash in ((5, b"0"), (6, b"1"), (8, b"3")):
        cache.publish([block], [block_hash])
    assert cache.match(hashes, 0, 4) == (5, 6)
    assert cache.match(hashes, 0, 1) == (5,)
    assert cache.match(hashes, 3, 9) == (8,)
    assert cache.match(hashes, 0, -1) == ()
    cache.check()


def test_pins_are_counted_and_independent_of_blocks() -> None:
    cache = PrefixCache(9)
    cache.publish([1], [b"a"])
    assert cache.pin([b"a", b"b"]) == [1]
    assert cache.pin([b"a"]) == [1]
    cache.publish([2], [b"b"])
    assert 2 in cache.pinned
    assert cache.unpin([b"a"]) == []
    assert 1 in cache.pinned
    cache.check()
    cache.forget(2)
    cache.clear()
    cache.publish([3], [b"b"])
    assert 3 in cache.pinned
    assert cache.unpin([b"a", b"b", b"unknown"]) == [3]
    assert 3 not in cache.pinned
    cache.check()


def test_a_scheduler_reports_added_and_evicted_contents() -> None:
    core = scheduler(num_blocks=6)
    assert core.drain_contents() == (), "nobody follows them"
    first, second = prompt([1] * 9, 1), prompt([2] * 20, 1)
    core.add(first)
    run(core)
    core.follow_contents()
    assert core.drain_contents() == tuple((block_hash, True) for block_hash in first.block_hashes)
    core.add(second)
    run(core)
    news = core.drain_contents()
    assert {(block_hash, True) for block_hash in second.block_hashes} <= set(news)
    gone = [block_hash for block_hash, is_there in news if not is_there]
    assert gone, "the second prompt took their blocks"
    assert set(gone) <= set(first.block_hashes)
    core.reset_prefix_cache()
    assert {is_there for _, is_there in core.drain_contents()} == {False}
    assert core.drain_contents() == ()


def test_a_chain_continues_from_known_hashes() -> None:
    whole = block_hashes(b"ns", range(40), 4)
    assert [block_hashes(b"ns", range(40), 4, whole[:known]) for known in (0, 1, 9, 10)] == [whole] * 4


# -- adapters ---------------------------------------------------------------------------------------------------------

ADAPTER, OTHER = b"a" * 16, b"b" * 16


def adapted(ids: tuple[int, ...], position: int, fingerprint: bytes = ADAPTER) -> tuple[bytes, ...]:
    return block_hashes(b"model", ids, 4, adapter=AdapterStart(position, fingerprint))


def test_blocks_before_an_adapter_are_shared_with_the_base_and_no_later_ones() -> None:
    ids = tuple(range(20))
    base = block_hashes(b"model", ids, 4)
    for position in range(20):
        hashes = adapted(ids, position)
        assert [one == other for one, other in zip(base, hashes, strict=True)] == [
            block < position // 4 for block in range(5)
        ]


def test_adapters_share_no_blocks() -> None:
    ids = tuple(range(20))
    assert not set(adapted(ids, 0)) & set(adapted(ids, 0, OTHER))


def test_equal_blocks_differ_if_the_adapter_begins_at_another_token_of_them() -> None:
    """Invocation tokens may cross the border of a block, so a later block decides where the adapter begins."""
    ids = tuple(range(20))
    assert len({adapted(ids, position)[1] for position in (4, 5, 6, 7, 8)}) == 5


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(0, 40), st.integers(0, 10), st.integers(1, 5))
def test_a_chain_with_an_adapter_continues_from_known_hashes(
    tokens: list[int], position: int, num_known: int, block_size: int
) -> None:
    start = AdapterStart(position, ADAPTER)
    whole = block_hashes(b"model", tokens, block_size, adapter=start)
    assert block_hashes(b"model", tokens, block_size, whole[:num_known], start) == whole
