"""Nodes divided into rings whose neighbours lie in different failure domains. Pure; placement.py is built on it.

A ring is a list of nodes, and its windows are all runs of `size` consecutive nodes, where the last node is followed by
the first. Data that belongs to a node lies on the window that begins with it. A ring of exactly `size` nodes has one
window as a set, so that only the loss of that one set of nodes loses data; larger rings have as many as they have
nodes. Therefore rings have exactly `size` nodes, except where nodes are left over.

The crowding of a window is the largest number of its nodes in one domain. Rings are made level by level: first as many
as possible with the least crowding that the number of domains permits, then of the nodes that are left over those with
one more, and so on. A node that fits into no ring of a level may be attached to one if the caller permits it: the
window of this node is completed by nodes of the ring, and it is in no other node's window.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Ring = list[str]


@dataclass
class Division:
    """The nodes, divided. `rings`: the rings. `attached`: node outside of the rings -> the rest of its window."""

    rings: list[Ring] = field(default_factory=list)
    attached: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def in_order(self) -> Division:
        """The same division, with each ring and the list of rings in the order of names."""
        turned = [[*ring[at:], *ring[:at]] for ring in self.rings for at in [ring.index(min(ring))]]
        return Division(sorted(turned), self.attached)

    def windows(self, size: int) -> list[tuple[str, ...]]:
        """The windows of all nodes. Each begins with its own node."""
        attached = [(name, *others) for name, others in self.attached.items()]
        return [one for ring in self.rings for one in windows(ring, size)] + attached

    def fits(self, names: Collection[str], size: int, extra: int) -> bool:
        """Whether this divides exactly these nodes, as `divided` is to do with `size` and `extra`."""
        inside = [name for ring in self.rings for name in ring]
        placed = [*inside, *self.attached]
        held = Counter(name for others in self.attached.values() for name in others)
        return (
            len(placed) == len(names)
            and set(placed) == set(names)
            and all(len(ring) >= size for ring in self.rings)
            and all(len(set(others)) == len(others) == size - 1 for others in self.attached.values())
            and held.keys() <= set(inside)
            and max(held.values(), default=0) <= extra
        )

    def costs(self, domains: Mapping[str, str], size: int) -> tuple[int, int, int, int]:
        """What is wrong with this division; less is better.

        The largest crowding, the sum of all crowdings, the most windows that contain one node, the number of windows
        that differ as sets.
        """
        every = self.windows(size)
        crowdings = [most_in_a_domain(one, domains) for one in every]
        busiest = max(Counter(name for one in every for name in one).values())
        return max(crowdings), sum(crowdings), busiest, len(set(map(frozenset, every)))


def divided(domains: Mapping[str, str], size: int, extra: int, former: Division | None = None) -> Division:
    """Divide the nodes into rings.

    `domains`: node -> its failure domain; at least `size` nodes. `size`: nodes in a window. `extra`: the number of
    attached nodes whose windows may contain the same node of a ring; 0: no node is attached. `former`: an earlier
    division, of which as much as possible is kept; its nodes may be other ones than those of `domains`.

    The result depends on the names and domains only, not on the order of the nodes. Dividing the same nodes again, with
    the result as `former`, changes nothing.
    """
    former = (former or Division()).in_order()
    best = former if former.fits(domains, size, extra) else None
    while True:
        found = _following(domains, size, extra, former).in_order()
        if best is not None and best.costs(domains, size) <= found.costs(domains, size):
            return best  # guard: no-change-without-gain
        best = former = found


def _following(domains: Mapping[str, str], size: int, extra: int, former: Division) -> Division:
    """Keep what is left of the former rings. If a new division is less crowded, keep half of them, and so on."""
    found = _Dividing(domains, size, extra, former).run()
    least = -(-size // len(set(domains.values())))
    rings = sorted(former.rings, key=lambda ring: (sum(name not in domains for name in ring), ring))
    if rings and found.costs(domains, size)[0] > least:
        new = _Dividing(domains, size, extra, Division()).run()
        while found.costs(domains, size)[0] > new.costs(domains, size)[0]:  # guard: domains-before-stability
            rings = rings[: len(rings) // 2]
            found = _Dividing(domains, size, extra, Division(rings, former.attached)).run() if rings else new
    return found


def most_in_a_domain(names: Iterable[str], domains: Mapping[str, str]) -> int:
    """The largest number of these nodes that are in one domain."""
    return max(Counter(domains[name] for name in names).values())


def windows(ring: Sequence[str], size: int) -> list[tuple[str, ...]]:
    """The windows of a ring: for each node, the node itself and the `size - 1` nodes after it."""
    at = range(len(ring))
    return [
        tuple(ring[(first + step) % len(ring)] for step in range(size)) for first in at
    ]  # guard: copies-on-other-nodes


class _Pool:
    """The nodes that are in no ring yet, by domain."""

    def __init__(self, domains: Mapping[str, str]) -> None:
        self._domains = domains
        self._names: dict[str, list[str]] = {}
        self._order: list[tuple[int, str]] = []
        self.count = 0

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            domain = self._domains[name]
            heapq.heappush(self._names.setdefault(domain, []), name)
            heapq.heappush(self._order, (-len(self._names[domain]), domain))
            self.count += 1

    def discard(self, names: Iterable[str]) -> None:
        for name in names:
            names_left = self._names[self._domains[name]]
            names_left.remove(name)
            heapq.heapify(names_left)
            heapq.heappush(self._order, (-len(names_left), self._domains[name]))
            self.count -= 1

    def names(self) -> list[str]:
        return sorted(name for names in self._names.values() for name in names)

    def take(self, ring: Ring, level: int) -> bool:
        """Move the best node into `ring` if its crowding stays within `level`; returns whether there was one.

        The best domain has the fewest nodes in the ring, then the most in the pool, so that none is left over at last.
        """
        inside = Counter(self._domains[name] for name in ring)
        seen: list[tuple[int, str]] = []
        while self._order:
            entry = heapq.heappop(self._order)
            if -entry[0] != len(self._names[entry[1]]) or entry in seen or not entry[0]:
                continue  # the number of nodes has changed since
            seen.append(entry)
            if not inside[entry[1]]:
                break
        # guard: copies-in-other-domains
        best = min(seen, key=lambda entry: (inside[entry[1]], entry), default=None)
        for entry in seen:
            heapq.heappush(self._order, entry)
        if best is None or inside[best[1]] >= level:
            return False
        name = self._names[best[1]][0]
        self.discard([name])
        ring.append(name)
        return True


class _Dividing:
    def __init__(self, domains: Mapping[str, str], size: int, extra: int, former: Division) -> None:
        self._domains, self._size, self._extra, self._former = domains, size, extra, former
        self._pool = _Pool(domains)
        self._pool.add(domains)
        self._held = Counter[str]()
        self._found = Division()

    def run(self) -> Division:
        least = -(-self._size // len(set(self._domains.values())))
        for level in range(least, self._size + 1):
            self._fill(self._kept(level), level)
            while any((self._form(level), self._extend(level), self._split(level))):
                pass
            self._attach(level)
            if not self._pool.count:
                break
        self._extend(self._size, worse=self._size)
        return self._found

    def _kept(self, level: int) -> list[Ring]:
        """Keep the former rings that are still whole; returns the rest of those that lack nodes."""
        waiting = set(self._pool.names())
        partial = []
        for former in self._former.rings:
            ring = [name for name in former if name in waiting]
            whole = self._size <= len(ring) < 2 * self._size and self._crowding(ring) <= level
            if whole:  # guard: whole-groups-stay
                self._found.rings.append(ring)
                self._pool.discard(ring)
            elif 1 < len(ring) < self._size and self._most(ring) <= level:  # guard: rest-of-group-stays
                partial.append(ring)
                self._pool.discard(ring)
        return sorted(partial, key=lambda ring: (-len(ring), ring))

    def _fill(self, partial: list[Ring], level: int) -> None:
        """Complete rings that lack nodes. Where too few nodes are free, the smallest of these rings are given up."""
        while partial:
            left = []
            for ring in partial:
                before = len(ring)
                while len(ring) < self._size and self._pool.take(ring, level):
                    pass
                if len(ring) == self._size:
                    self._found.rings.append(ring)
                else:
                    self._pool.add(ring[before:])
                    left.append(ring[:before])
            partial, missing = left, sum(self._size - len(ring) for ring in left)
            freed = 0
            while partial and freed < max(missing, 1):
                ring = partial.pop()
                missing -= self._size - len(ring)
                freed += len(ring)
                self._pool.add(ring)

    def _form(self, level: int) -> bool:
        """Make new rings of free nodes; returns whether there was one."""
        before = len(self._found.rings)
        while self._pool.count >= self._size:
            ring: Ring = []
            while len(ring) < self._size and self._pool.take(ring, level):
                pass
            if len(ring) < self._size:
                self._pool.add(ring)
                break
            self._found.rings.append(ring)
        return len(self._found.rings) > before

    def _extend(self, level: int, worse: int = 0) -> bool:
        """Insert free nodes into rings whose crowding grows by at most `worse`; returns whether there was one.

        Of several rings, that is taken which is the most crowded, then the largest, so that few rings are changed.
        """
        changed, hopeless = False, set()
        for name in self._pool.names():
            if self._domains[name] in hopeless:
                continue
            crowdings = [(-self._crowding(ring), -len(ring), at) for at, ring in enumerate(self._found.rings)]
            order = sorted(one for one in crowdings if -one[0] <= level)
            options = (
                (at, wider)
                for more in range(worse + 1)
                for crowding, _, at in order
                if (wider := self._wider(self._found.rings[at], name, more - crowding))
            )
            best = next(options, None)
            if best is None:
                hopeless.add(self._domains[name])
                continue
            self._found.rings[best[0]] = best[1]
            self._pool.discard([name])
            changed = True
        return changed

    def _wider(self, ring: Ring, name: str, most: int) -> Ring | None:
        """The ring with this node at the place with the least crowding, if that is at most `most`."""
        short = len(ring) + 1 < 2 * self._size
        if most == 1 and short and any(self._domains[one] == self._domains[name] for one in ring):
            return None  # some window contains both nodes, wherever this one is inserted
        wider = ([*ring[:at], name, *ring[at:]] for at in range(len(ring), 0, -1))
        best = min(wider, key=self._crowding)
        return best if self._crowding(best) <= most else None  # guard: extension-keeps-domains

    def _split(self, level: int) -> bool:
        """Make a ring of nodes that larger rings can spare, if these are enough; returns whether they were."""
        size, rings = self._size, self._found.rings
        taken: Ring = []
        left: dict[int, Ring] = {}
        for at, ring in enumerate(rings):
            for name in reversed(ring):
                rest = [one for one in left.get(at, ring) if one != name]
                if len(rest) < size or len(taken) == size:
                    break
                fits = self._most([*taken, name]) <= level and self._crowding(rest) <= self._crowding(ring)
                if fits:  # guard: split-keeps-domains
                    taken.append(name)
                    left[at] = rest
        if len(taken) < size:  # guard: few-sets-of-nodes
            return False
        for at, rest in left.items():
            rings[at] = rest
        rings.append(taken)
        return True

    def _attach(self, level: int) -> None:
        """Attach free nodes to rings, those of the former division to the same nodes as before."""
        in_rings = {name for ring in self._found.rings for name in ring}
        for name in self._pool.names():
            others = self._former.attached.get(name, ())
            fits = len(others) == self._size - 1 and in_rings.issuperset(others)
            if fits and self._most([name, *others]) <= level and self._spare(others) == list(others):
                self._bind(name, others)
        order = [(sum(self._held[name] for name in ring), at) for at, ring in enumerate(self._found.rings)]
        heapq.heapify(order)
        hopeless = set()
        for name in self._pool.names():
            passed = []
            while order and self._domains[name] not in hopeless:
                held, at = heapq.heappop(order)
                passed.append((held, at))
                if chosen := self._chosen(name, self._found.rings[at], level):
                    self._bind(name, chosen)
                    passed[-1] = (held + len(chosen), at)
                    break
            else:
                hopeless.add(self._domains[name])
            for entry in passed:
                heapq.heappush(order, entry)

    def _spare(self, names: Iterable[str]) -> Ring:
        return [name for name in names if self._held[name] < self._extra]  # guard: copies-within-limit

    def _chosen(self, name: str, ring: Ring, level: int) -> tuple[str, ...]:
        """The nodes of the ring that complete the window of `name`; empty if they cannot."""
        chosen: Ring = []
        inside = Counter([self._domains[name]])
        left = self._spare(ring)
        while left and len(chosen) < self._size - 1:
            best = min(left, key=lambda one: (inside[self._domains[one]], self._held[one], ring.index(one)))
            left.remove(best)
            chosen.append(best)
            inside[self._domains[best]] += 1
        # guard: attached-in-other-domains
        whole = len(chosen) == self._size - 1 and max(inside.values()) <= level
        return tuple(sorted(chosen, key=ring.index)) if whole else ()

    def _bind(self, name: str, others: tuple[str, ...]) -> None:
        self._found.attached[name] = others
        self._held.update(others)
        self._pool.discard([name])

    def _most(self, names: Iterable[str]) -> int:
        return most_in_a_domain(names, self._domains)

    def _crowding(self, ring: Ring) -> int:
        if len(ring) == self._size:
            return self._most(ring)
        return max(map(self._most, windows(ring, self._size)))
