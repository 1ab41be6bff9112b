"""Pages: handed out and taken back, shared by requests, found by their tokens, evicted when no request holds them."""

import subprocess
import sys
import time

import pytest

from jaxspec.engine.pages import HeldPages, PageAllocator, PrefixCache


def cache_of(num_pages: int, page_size: int = 2, enabled: bool = True) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages, page_size), enabled)


def hold(cache: PrefixCache, tokens: str, slots: int | None = None) -> HeldPages:
    """As a request does that computes these tokens, one per letter."""
    held = cache.match(ids(tokens))
    assert cache.grow(held, slots or len(tokens))
    cache.publish(held, ids(tokens), len(tokens))
    return held


def leave(cache: PrefixCache, tokens: str) -> list[int]:
    """Computes these tokens and lets go of them; returns their pages."""
    held = hold(cache, tokens)
    pages = list(held.pages)
    cache.release(held)
    return pages


def found(cache: PrefixCache, tokens: str) -> list[int]:
    """The pages known for these tokens."""
    held = cache.match(ids(tokens))
    pages = list(held.pages)
    cache.release(held)
    return pages


def ids(tokens: str) -> list[int]:
    return [ord(letter) for letter in tokens]


def test_finds_the_longest_prefix_in_full_pages():
    cache = cache_of(10)
    pages = leave(cache, "abcdefg")
    assert found(cache, "abcdefg") == found(cache, "abcdefxy") == pages[:3]  # the page of the g alone is not full
    assert found(cache, "abcdxfgh") == pages[:2] and found(cache, "abc") == pages[:1]
    assert found(cache, "cdef") == found(cache, "a") == found(cache, "") == []
    cache.check([])


def test_requests_share_pages_and_the_last_one_lets_go():
    cache = cache_of(10)
    one, other = hold(cache, "abcd"), hold(cache, "abxy")
    assert one.pages[0] == other.pages[0] and one.pages[1] != other.pages[1]
    assert [node.references for node in one.nodes] == [2, 1]
    cache.check([one, other])
    assert cache.held_pages == 3 and cache.cached_pages == 0
    cache.release(one)
    cache.check([other])
    assert one.pages == one.nodes == [] and cache.held_pages == 2 and cache.cached_pages == 1
    cache.release(other)
    cache.check([])
    assert cache.cached_pages == 3 and cache.pages.free == 7 and cache.available == 10


def test_prefixes_are_found_under_their_own_salt_only():
    cache = cache_of(4)

    def pages_under(salt: str | None, *, leaves: bool = False) -> list[int]:
        held = cache.match(ids("abcd"), salt)
        pages = list(held.pages)
        if leaves:
            assert cache.grow(held, 4)
            cache.publish(held, ids("abcd"), 4)
        cache.release(held)
        cache.check([])
        return pages

    pages_under("x", leaves=True)
    assert pages_under(None) == pages_under("y") == pages_under("") == [] and len(pages_under("x")) == 2
    pages_under(None, leaves=True)
    assert len(pages_under(None)) == len(pages_under("x")) == 2 and not set(pages_under(None)) & set(pages_under("x"))
    for number in range(20):  # salts that are used once are forgotten with their pages
        pages_under(str(number), leaves=True)
    assert pages_under("x") == [] and len(pages_under("19")) == 2
    assert len(cache._roots) == 2
    cache.flush()
    assert pages_under("19") == []


def test_publishes_what_is_committed_and_no_page_more():
    cache, held = cache_of(10), HeldPages()
    assert cache.grow(held, 8)
    cache.publish(held, ids("abcdefgh"), 3)
    assert len(held.nodes) == 1 and found(cache, "abcdefgh") == held.pages[:1]
    cache.publish(held, ids("abcdefgh"), 6)
    assert len(held.nodes) == 3 and found(cache, "abcdefgh") == held.pages[:3]
    cache.check([held])


def test_a_page_that_is_known_already_takes_the_place_of_the_own_one():
    cache = cache_of(10)
    slow, fast = HeldPages(), HeldPages()
    assert cache.grow(slow, 5) and cache.grow(fast, 5)
    own = list(slow.pages)
    cache.publish(fast, ids("abcde"), 5)
    cache.publish(slow, ids("abcdx"), 5)
    assert slow.pages == [*fast.pages[:2], own[2]] and all(cache.pages.is_free(page) for page in own[:2])
    assert [node.references for node in slow.nodes] == [2, 2]
    cache.check([slow, fast])


def test_extending_a_match_takes_what_others_published_since():
    cache = cache_of(10)
    slow, fast = HeldPages(), HeldPages()
    assert cache.grow(slow, 7) and cache.grow(fast, 7)
    cache.publish(slow, ids("abcdefg"), 3)
    cache.publish(fast, ids("abcdefg"), 7)
    own = slow.pages[3]
    cache.extend_match(slow, ids("abcdefg"))
    assert slow.pages == [*fast.pages[:3], own] and slow.nodes == fast.nodes
    cache.check([slow, fast])


def test_the_least_recently_used_leaf_is_evicted_first():
    cache = cache_of(6)
    a, b = leave(cache, "aaaa"), leave(cache, "bbbb")
    found(cache, "aaaa")  # used again
    held = HeldPages()
    assert cache.grow(held, 4) and cache.cached_pages == 4  # two pages are free
    assert cache.grow(held, 6) and cache.cached_pages == 3
    assert found(cache, "bbbb") == b[:1] and held.pages[-1] == b[1], "the end of a prefix goes before its start"
    found(cache, "aaaa")
    assert cache.grow(held, 10)
    assert found(cache, "bbbb") == [] and found(cache, "aaaa") == a[:1]
    cache.check([held])
    cache.release(held)
    cache.check([])


def test_evicts_no_more_than_needed_and_nothing_in_vain():
    cache = cache_of(6)
    leave(cache, "abcd")
    held = hold(cache, "abxy")  # shares the first page; cd is the only one to evict
    assert cache.available == 4
    assert not cache.grow(held, 14) and held.pages == held.pages[:2] and len(found(cache, "abcd")) == 2
    assert cache.grow(held, 10) and cache.cached_pages == 1
    assert cache.grow(held, 12) and cache.cached_pages == 0
    assert cache.grow(held, 3) and len(held.pages) == 6, "growing never takes pages away"
    assert len(found(cache, "abcd")) == 1 and cache.available == 0
    cache.check([held])


def test_flush_forgets_held_pages_too():
    cache = cache_of(10)
    leave(cache, "zzzz")
    one, other = hold(cache, "abcdef", slots=10), hold(cache, "abcd")
    cache.flush()
    cache.check([one, other])
    assert found(cache, "zzzz") == found(cache, "abcdef") == [] and cache.cached_pages == 0
    cache.publish(one, ids("abcdefghij"), 10)  # computed before: not for others
    assert found(cache, "abcdefghij") == [] and len(one.nodes) == 3
    fresh = hold(cache, "abcd")
    assert not set(fresh.pages) & set(one.pages + other.pages)
    cache.extend_match(other, ids("abcd"))
    cache.check([one, other, fresh])
    shared = one.pages[:2]
    cache.release(one)
    assert not any(cache.pages.is_free(page) for page in shared)
    cache.release(other)
    assert all(cache.pages.is_free(page) for page in shared), "they are freed with their last holder"
    cache.check([fresh])
    assert found(cache, "abcd") == fresh.pages
    cache.release(fresh)
    unmatched = HeldPages()  # as for a request that may not use known pages: its own are for others nevertheless
    assert cache.grow(unmatched, 4)
    cache.publish(unmatched, ids("wxyz"), 4)
    assert found(cache, "wxyz") == unmatched.pages
    cache.release(unmatched)
    cache.check([])


def test_disabled_knows_and_keeps_nothing():
    cache = cache_of(10, enabled=False)
    held = hold(cache, "abcd")
    assert held.nodes == [] and found(cache, "abcd") == []
    cache.release(held)
    assert cache.pages.free == 10
    cache.check([])


def test_the_check_finds_lost_pages_wrong_references_and_pages_in_two_places():
    cache = cache_of(10)
    held = hold(cache, "abcde")
    with pytest.raises(RuntimeError, match=r"free \(7\) \+ cached \(0\) \+ held \(0\) should be total \(10\).*this is a bug"):
        cache.check([])
    with pytest.raises(RuntimeError, match=r"references .*: \['page \d: 1 != 2', 'page \d: 1 != 2'\]"):
        cache.check([held, HeldPages(held.pages[:2], held.nodes)])
    with pytest.raises(RuntimeError, match=r"held \(4\) .*, 1 are in two places"):
        cache.check([held, HeldPages(held.pages[2:])])
    with pytest.raises(RuntimeError, match="are not those of nodes"):
        cache.check([HeldPages(held.pages[::-1], held.nodes)])
    cache.release(held)
    cache.check([])


def test_publishing_and_evicting_take_time_for_the_new_pages_only():
    cache, tokens = cache_of(40_000, page_size=1), list(range(40_000))
    started = time.perf_counter()
    held = HeldPages()
    assert cache.grow(held, len(tokens))
    for committed in range(1, len(tokens) + 1):
        cache.publish(held, tokens, committed)
    cache.release(held)
    for _ in tokens:  # each evicts one page of a chain of 40,000
        assert cache.grow(held, len(held.pages) + 1)
    assert time.perf_counter() - started < 5, "anything quadratic takes minutes"
    cache.check([held])


def test_pages_refuse_to_be_released_twice():
    pages = PageAllocator(4, 16)
    taken = pages.allocate(3)
    assert pages.allocate(2) is None and pages.pages_for(17) == 2 and pages.pages_for(16) == 1
    assert [pages.is_free(page) for page in range(4)] == [page not in taken for page in range(4)]
    pages.release(taken)
    with pytest.raises(RuntimeError, match="is released twice"):
        pages.release(taken)


def test_configuration_requests_and_scheduler_load_no_jax():
    engine = ", ".join(
        f"jaxspec.engine.{name}" for name in ("pages", "request", "scheduler", "stats", "output", "trees", "driver", "generation")
    )
    code = f"import sys, jaxspec, jaxspec.model_config, {engine}; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
