"""Pages of the cache: which request holds them, and which are kept for later requests. Plain Python, no JAX.

The prefix cache finds pages by the tokens they hold. It is a radix tree with one node per full page. Target and draft head share
one page table, and slot i of both caches depends on tokens 0 .. i only, so one node stands for a page of both. A page in the tree
is never written again.

Every holder references all nodes from the root to its last one. So an unreferenced node has no referenced node below it, and was
released no earlier than its children. Releasing deepest first therefore keeps the unreferenced nodes in an order that is both
least recently used first and children before their parents: the first one is always a leaf and always the next to evict.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class IntegrityError(RuntimeError):
    """Pages are lost or have two owners: a bug, after which no result can be trusted. The message carries every number."""


class PageAllocator:
    """Allocates pages 0 .. num_pages - 1."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self._is_free = [True] * num_pages

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self.free_pages)

    def is_free(self, page: int) -> bool:
        return self._is_free[page]

    def pages_for(self, tokens: int) -> int:
        """The number of pages that this many tokens take."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages; None if fewer are free."""
        if count > len(self.free_pages):
            return None
        taken = self.free_pages[len(self.free_pages) - count :]
        del self.free_pages[len(self.free_pages) - count :]
        for page in taken:
            self._is_free[page] = False
        return taken

    def release(self, pages: list[int]) -> None:
        """Frees pages. Raises IntegrityError if one is free already."""
        for page in pages:
            if self._is_free[page]:
                raise IntegrityError(f"page {page} is released twice; this is a bug")
            self._is_free[page] = True
        self.free_pages.extend(pages)


@dataclass(eq=False, slots=True)
class Node:
    """A full page and the tokens in it; the tokens before them are those of its ancestors."""

    page: int
    key: tuple[int, ...]
    parent: "Node | None" = field(repr=False)
    references: int = 0
    """Requests that hold it."""
    salt: str | None = None
    """The salt of the requests that share it."""
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict, repr=False)


@dataclass(eq=False)
class HeldPages:
    """The pages of one admitted request, in order of its slots: slot i is in pages[i // page_size]."""

    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """The first len(nodes) pages belong to the tree and may be shared; the rest are the request's own."""
    generation: int = 0
    """The cache's flush count when it took its first page. After a later flush its pages are not shared with others."""
    salt: str | None = None
    """It shares pages only with requests of the same salt."""
    lag: int = 0
    """Newest slots that are missing in the head's cache, because plain cycles do not extend the head. Kept by TreeChoice."""


class PageObserver:
    """Is told what the tree gains and loses, in order. The thread that uses the cache calls it, so it must not wait."""

    def stored(self, node: Node) -> None:
        """A page is in the tree. Its parent was stored before."""

    def removed(self, node: Node) -> None:
        """A page was evicted. Its children were removed before."""

    def cleared(self) -> None:
        """The tree is empty."""


class PrefixCache:
    """Gives requests their pages: shared pages for a known prefix, own pages for the rest."""

    def __init__(self, pages: PageAllocator, enabled: bool = True):
        """Without `enabled` it knows no prefix and keeps no page."""
        self.pages, self.enabled = pages, enabled
        self.observer = PageObserver()
        """May be replaced while the tree is empty."""
        self._roots, self._generation = dict[str | None, Node](), 0
        """The roots, by salt; each has children."""
        self._unreferenced: OrderedDict[Node, None] = OrderedDict()

    @property
    def capacity(self) -> int:
        """Slots of all pages: the tokens of the longest possible request."""
        return self.pages.num_pages * self.pages.page_size

    @property
    def cached_pages(self) -> int:
        """Pages held only by the tree: evicted when requests need them."""
        return len(self._unreferenced)

    @property
    def available(self) -> int:
        """Pages that requests can still get: free and cached ones."""
        return len(self.pages.free_pages) + len(self._unreferenced)

    @property
    def held_pages(self) -> int:
        """Pages held by requests; shared pages count once."""
        return self.pages.num_pages - len(self.pages.free_pages) - len(self._unreferenced)

    def shared_slots(self, held: HeldPages) -> int:
        """Slots in the pages that belong to the tree."""
        return len(held.nodes) * self.pages.page_size

    def match(self, tokens: Sequence[int], salt: str | None = None) -> HeldPages:
        """Holds the longest prefix of the tokens that is known under this salt, in full pages.

        In:  tokens 1 2 3 4 5, page size 2, the tree knows 1 2, 1 2 3 4 and 3 4
        Out: two pages
        """
        held = HeldPages(generation=self._generation, salt=salt)
        self.extend_match(held, tokens)
        return held

    def extend_match(self, held: HeldPages, tokens: Sequence[int]) -> None:
        """Adds pages of these tokens that other requests have published since `match`. They replace the request's own pages, which
        programs launched from now on must not write."""
        if not self.enabled or held.generation != self._generation:
            return
        for index in range(len(held.nodes), len(tokens) // self.pages.page_size):
            last = self._last(held)
            node = None if last is None else last.children.get(self._key(tokens, index))
            if node is None:
                return
            self._share(held, node)

    def grow(self, held: HeldPages, slots: int) -> bool:
        """Adds own pages to `held` until they cover `slots` slots, evicting cached pages if too few are free. Returns False and
        changes nothing if even that is not enough."""
        needed = self.pages.pages_for(slots) - len(held.pages)
        if needed > self.available:
            return False
        if not held.pages:
            held.generation = self._generation
        if needed > 0:
            self._evict(needed - self.pages.free)
            own = self.pages.allocate(needed)
            assert own is not None
            held.pages += own
        return True

    def publish(self, held: HeldPages, tokens: Sequence[int], committed: int) -> None:
        """Puts the full pages of the first `committed` tokens, whose slots are written, into the tree. If the tree already
        has such a page, `held` shares it and frees its own. That is safe: programs that read the freed page were launched before
        any that will write to it. Takes time for the new pages only."""
        if not self.enabled or held.generation != self._generation:
            return
        for index in range(len(held.nodes), committed // self.pages.page_size):
            parent, key = self._last(held) or self._roots.setdefault(held.salt, Node(-1, (), None)), self._key(tokens, index)
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = Node(held.pages[index], key, parent, 1, held.salt)
                held.nodes.append(node)
                self.observer.stored(node)
            else:
                self._share(held, node)

    def release(self, held: HeldPages) -> None:
        """Empties `held`. Its nodes stay in the tree until they are evicted; its own pages are free."""
        own = held.pages[len(held.nodes) :]
        for node in reversed(held.nodes):  # children before parents: the order of eviction
            node.references -= 1
            if node.references == 0:
                if held.generation == self._generation:
                    self._unreferenced[node] = None
                else:
                    own.append(node.page)
        self.pages.release(own)
        held.pages, held.nodes = [], []

    def flush(self) -> None:
        """Forgets every prefix. Pages that requests hold are never found again and are freed with their last holder."""
        self.pages.release([node.page for node in self._unreferenced])
        self._unreferenced.clear()
        self._roots = {}
        self._generation += 1
        self.observer.cleared()

    def check(self, held: Iterable[HeldPages]) -> None:
        """Raises IntegrityError with every number if a page is lost or in two places, or a reference count is wrong. `held`: what
        all requests hold."""
        holders: Counter[Node] = Counter()
        used = [node.page for node in self._unreferenced]
        for each in held:
            holders.update(each.nodes)
            used += each.pages[len(each.nodes) :]
            if [node.page for node in each.nodes] != each.pages[: len(each.nodes)]:
                raise IntegrityError(f"pages {each.pages} are not those of nodes {each.nodes}; this is a bug")
        used += [node.page for node in holders]
        cached, free, total = self.cached_pages, self.pages.free, self.pages.num_pages
        twice = len(used) - len(set(used)) + sum([self.pages.is_free(page) for page in used])
        wrong = [f"page {node.page}: {node.references} != {count}" for node, count in holders.items() if node.references != count]
        wrong += [f"page {node.page}: {node.references} != 0" for node in self._unreferenced if node.references != 0]
        if free + len(used) != total or twice or wrong:
            raise IntegrityError(
                f"free ({free}) + cached ({cached}) + held ({len(used) - cached}) should be total ({total}) pages, {twice} are in "
                f"two places, references that differ from holders: {wrong or 'none'}; this is a bug"
            )

    def _last(self, held: HeldPages) -> Node | None:
        """The node of the last shared page, or the root; None: nothing is known under its salt."""
        return held.nodes[-1] if held.nodes else self._roots.get(held.salt)

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        size = self.pages.page_size
        return tuple(tokens[index * size : (index + 1) * size])

    def _share(self, held: HeldPages, node: Node) -> None:
        """Appends a node of the tree to those of `held`, in place of its own page there, if it has one."""
        if node.references == 0:
            del self._unreferenced[node]
        node.references += 1
        index = len(held.nodes)
        self.pages.release(held.pages[index : index + 1])
        held.pages[index : index + 1] = [node.page]
        held.nodes.append(node)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            node, _ = self._unreferenced.popitem(last=False)
            assert node.parent is not None and not node.children
            del node.parent.children[node.key]
            if node.parent.parent is None and not node.parent.children:
                del self._roots[node.salt]
            self.pages.release([node.page])
            self.observer.removed(node)
