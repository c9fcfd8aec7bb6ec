"""Rules R1 and R2: every ordered reduction sits between an acquire spin and a release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import ptx, ptx_paths
from .report import Finding
from .sass import at


class Turn(NamedTuple):
    """A semaphore that a thread holds, from the acquire to the release."""

    added: int = -1  # index of the thread's last reduction under it
    open: bool = False  # some reduction is not in a bulk group yet
    fenced: bool = False  # a gpu-scope fence stands after the last reduction landed
    synced: int = 0  # a barrier stands after that: 1 of the warp, 2 of the CTA


class Thread(NamedTuple):
    """Turns and bulk groups that one thread holds and waits for, oldest first."""

    turns: tuple[Turn, ...] = ()
    groups: tuple[int, ...] = ()  # per pending bulk group, the bits of the turns it adds under
    peer: int = 0  # another thread (1 of the warp, 2 of the CTA) has spun: a barrier makes it ours

    def pending(self, turn: int) -> bool:
        return self.turns[turn].open or any(group >> turn & 1 for group in self.groups)

    def acquired(self) -> Thread:
        turns = self.turns if self.turns and self.turns[-1].added < 0 else (*self.turns, Turn())
        return self._replace(turns=turns, peer=0)

    def added(self, index: int, asynchronous: bool) -> Thread:
        *held, last = self.turns
        return self._replace(turns=(*held, Turn(index, asynchronous or last.open)))

    def committed(self) -> Thread:
        group = sum(1 << n for n, turn in enumerate(self.turns) if turn.open)
        turns = tuple(turn._replace(open=False) for turn in self.turns)
        return self._replace(turns=turns, groups=_trimmed((*self.groups, group)))

    def waited(self, keep: int) -> Thread:
        return self._replace(groups=_trimmed(self.groups[-keep:] if keep else ()))

    def after_fence(self) -> Thread:
        turns = [
            t._replace(fenced=t.added >= 0 and not self.pending(n))
            for n, t in enumerate(self.turns)
        ]
        return self._replace(turns=tuple(turns))

    def after_barrier(self, scope: int) -> Thread:
        thread = self.acquired() if 0 < self.peer <= scope else self
        turns = [
            t if thread.pending(n) else t._replace(synced=max(t.synced, scope))
            for n, t in enumerate(thread.turns)
        ]
        return thread._replace(turns=tuple(turns))

    def released(self) -> Thread:
        groups = _trimmed(tuple(group >> 1 for group in self.groups))
        return Thread(self.turns[1:], groups)


def _trimmed(groups: tuple[int, ...]) -> tuple[int, ...]:
    """Drop empty oldest groups; of more than 8 join the oldest two: a longer wait."""
    while groups and groups[0] == 0:
        groups = groups[1:]
    return groups if len(groups) <= 8 else (groups[0] | groups[1], *groups[2:])


MAX_TURNS = 4  # semaphores that a thread may hold at once


def _gpu(i: ptx.Instruction) -> bool:
    return bool({"gpu", "sys", "gl"} & i.parts)


def _semaphore(i: ptx.Instruction) -> str | None:
    """``"release"`` or ``"relaxed"`` for a write of global memory that other CTAs can wait for."""
    if i.base not in ("st", "red", "atom") or {"shared", "param", "local"} & i.parts:
        return None
    scoped = _gpu(i) or (i.base != "st" and not {"cta", "cluster"} & i.parts)
    if scoped and {"release", "acq_rel"} & i.parts:
        return "release"
    strong = {"relaxed", "volatile"} & i.parts or i.base in ("red", "atom")
    return "relaxed" if strong and (scoped or "volatile" in i.parts) else None


def event_of(i: ptx.Instruction) -> str | None:
    """Event of the turnstile that an instruction causes."""
    if i.is_float_atomic:
        return "add_async" if i.base == "cp" else "add"
    if i.opcode.startswith("cp.async.bulk.commit_group"):
        return "commit"
    if i.opcode.startswith("cp.async.bulk.wait_group"):
        return None if "read" in i.parts else "wait"
    if i.base in ("fence", "membar") and _gpu(i) and "proxy" not in i.parts:
        return "fence"
    if i.base in ("bar", "barrier") and ({"sync", "red"} & i.parts or "wait" in i.parts):
        return "barrier"
    if i.base in ("call", "trap"):
        return i.base
    return _semaphore(i)


def _acquires(i: ptx.Instruction) -> bool:
    return i.base == "ld" and "acquire" in i.parts and _gpu(i) and "shared" not in i.parts


class Turnstile:
    """R1 and R2 for one function: each way a thread can take through it is followed.

    A thread holds a turn from the exit of a spin loop whose every exit depends on a value that the
    loop loads with acquire at gpu scope; rank 0, which a semaphore starts with, may skip its spin.
    Every reduction needs a held turn, and every release the reductions of the oldest turn landed:
    in a committed bulk group that a wait without ``.read`` covers.  Under a branch that tells
    threads apart and nothing else (``lane == 0``) one thread may spin or release for those that
    skip it, if a barrier of that warp or CTA stands between its spin and their reduction, or
    between their wait and its release.  A release is red, st or atom with ``.release.gpu``, or a
    gpu-scope fence followed by a relaxed one.

    Limits: turns are released in the order in which they were taken; a release that is deferred to
    the next tile needs its first and last tile outside the loop; a barrier is taken to hold the
    threads that it must; mbarriers do not count as barriers; the lane that elect.sync picks is not
    known to be lane 0.
    """

    def __init__(self, function: ptx.Function, callees: Mapping[str, ptx.Function]):
        self.function, self.callees = function, callees
        self.values = ptx_paths.Values(function)
        self.spins, self.spinning = self._spins()
        self.releasing = {
            block.index
            for block in function.blocks
            if (events := {event_of(i) for i in block.instructions})
            and ("release" in events or {"fence", "relaxed"} <= events)
        }
        self._found: dict[tuple[str, int], Finding] = {}

    def findings(self) -> list[Finding]:
        events = {event_of(i) for i in self.function.instructions}
        if not events & {"add", "add_async"} and not self._calls_with_events():
            return []
        try:
            ptx_paths.walk(
                self.function,
                self.values,
                Thread(),
                lambda i: event_of(i) is not None or _acquires(i),
                self._execute,
                self._skip,
                self._cross,
            )
        except ptx_paths.TooManyPaths as error:
            self._found["R1", -1] = Finding("R1", self.function.name, f"not proved: {error}")
        return list(self._found.values())

    def _calls_with_events(self) -> bool:
        calls = [i for i in self.function.instructions if i.base == "call"]
        return any(self._callee_has_events(i) for i in calls)

    def _callee_has_events(self, call: ptx.Instruction) -> bool:
        named = [self.callees[o] for o in call.operands if o in self.callees]
        return any(event_of(i) for function in named for i in function.instructions)

    def _note(self, rule: str, index: int, why: str) -> None:
        i = self.function.instructions[index]
        self._found.setdefault((rule, index), at(rule, self.function, i, why))

    def _execute(self, thread: Thread, i: ptx.Instruction) -> Thread:
        event = event_of(i)
        if event in ("add", "add_async"):
            if thread.turns:
                return thread.added(i.index, event == "add_async")
            self._note("R1", i.index, "on some path no acquire spin precedes it in its turn")
        elif event == "commit":
            return thread.committed()
        elif event == "wait":
            return thread.waited(int(i.operands[0], 0))
        elif event == "fence":
            return thread.after_fence()
        elif event == "barrier":
            return self._bounded(thread.after_barrier(1 if "warp" in i.parts else 2))
        elif event == "release":
            return self._release(thread, i)
        elif event == "relaxed" and thread.turns and thread.turns[0].fenced:
            return thread.released()
        elif event == "call" and self._callee_has_events(i):
            self._note("R1", i.index, "calls a function with parts of a turnstile: not followed")
        return thread

    def _skip(self, thread: Thread, i: ptx.Instruction) -> Thread:
        if event_of(i) == "release" and (scope := self.values.selects(i.guard[0])):
            return self._leave(thread, scope)
        return thread

    def _release(self, thread: Thread, i: ptx.Instruction) -> Thread:
        if thread.turns and thread.turns[0].added >= 0 and thread.pending(0):
            why = f"not known to have landed at the release on line {i.line}: no full bulk wait"
            self._note("R2", thread.turns[0].added, why)
        return thread.released()

    def _leave(self, thread: Thread, scope: int) -> Thread:
        """Another thread releases what this one holds."""
        if thread.turns and thread.turns[0].added >= 0:
            if thread.pending(0):
                why = "another thread may release it before it has landed"
                self._note("R2", thread.turns[0].added, why)
            elif thread.turns[0].synced < scope:
                why = "another thread may release it, with no barrier after this thread's wait"
                self._note("R2", thread.turns[0].added, why)
        return thread.released()

    def _cross(self, thread: Thread, block: ptx.Block, edge: ptx.Edge) -> Thread:
        if (block.index, edge.target) in self.spins:
            thread = self._bounded(thread.acquired())
        if edge.condition and (scope := self.values.selects(edge.condition[0])):
            releases, spins = self._skipped(block, edge)
            thread = self._leave(thread, scope) if releases else thread
            thread = thread._replace(peer=scope) if spins else thread
        if edge.target == ptx.EXIT and block.instructions[-1].base != "trap":
            for turn in thread.turns:
                if turn.added >= 0:
                    why = "a path to the end has no gpu-scope release after it"
                    self._note("R2", turn.added, why)
        return thread

    def _bounded(self, thread: Thread) -> Thread:
        if len(thread.turns) > MAX_TURNS:
            why = f"{MAX_TURNS} turns are taken after it with no gpu-scope release"
            self._note("R2", thread.turns[0].added, why)
            thread = thread.released()
        return thread

    def _skipped(self, block: ptx.Block, edge: ptx.Edge) -> tuple[bool, bool]:
        """Whether the arms of a branch that this edge does not take release, and then spin."""
        reach, join = self.function.reach, self.function.join[block.index]
        other = [e.target for e in block.edges if e is not edge]
        there = reach(other, {join})
        spins, releases = there & self.spinning, there & self.releasing
        early = reach(other, {join} | releases) & spins
        late = reach(spins - releases, {join}) & releases
        here = reach([edge.target], {join}) & (self.spinning | self.releasing)
        whole_turn = releases and (early or late)
        return (False, False) if here or whole_turn else (bool(releases), bool(spins))

    def _spins(self) -> tuple[set[tuple[int, int]], set[int]]:
        """The edges on which a spin is over; the blocks of spins."""
        over: set[tuple[int, int]] = set()
        spinning: set[int] = set()
        inner: set[int] = set()
        awaited: set[str] = set()
        for loop in self.function.loops:
            exits = self._exits(loop, loop - inner)
            inner |= loop
            if exits:
                spinning |= loop
                over |= {(b, edge.target) for b, edge in exits}
                awaited |= {text for _, edge in exits for text in self._compared(edge)}
        for block in self.function.blocks:  # a first load before the loop, or none for rank 0
            ahead = [e for e in block.edges if self._leads_to(e.target, spinning)]
            past = [e for e in block.edges if e not in ahead and e.condition]
            if block.index not in spinning and len(ahead) == len(past) == 1:
                loaded = past[0].condition[0] in self._loaded({block.index})
                if loaded or self._skips_rank_0(past[0], awaited - {"0"}):
                    over.add((block.index, past[0].target))
        return over, spinning | {b for b, _ in over}

    def _exits(self, loop: frozenset[int], own: set[int]) -> list[tuple[int, ptx.Edge]]:
        """The ways out of a loop that does nothing but wait for what its own blocks acquire."""
        blocks = [self.function.blocks[b] for b in loop]
        if {event_of(i) for b in blocks for i in b.instructions} - {None, "fence", "relaxed"}:
            return []
        out = [(b.index, e) for b in blocks for e in b.edges if e.target not in loop]
        out = [(b, e) for b, e in out if not self._traps(e.target)]
        loaded = self._loaded(own)
        return out if all(e.condition and e.condition[0] in loaded for _, e in out) else []

    def _compared(self, edge: ptx.Edge) -> tuple[str, ...]:
        """The operands that the branch on this edge has compared."""
        made = self.function.definitions.get(edge.condition[0], ())
        return made[0].operands[1:3] if len(made) == 1 and made[0].base == "setp" else ()

    def _skips_rank_0(self, edge: ptx.Edge, awaited: set[str]) -> bool:
        """Whether the edge leaves out the spin of rank 0, the value a semaphore starts with."""
        compared = self._compared(edge)
        if "0" not in compared or not awaited.intersection(compared):
            return False
        words = self.function.definitions[edge.condition[0]][0].parts
        return bool(words & {"eq", "ne"}) and edge.condition[1] == ("eq" in words)

    def _loaded(self, blocks: set[int]) -> set[str]:
        """Registers that hold what these blocks acquire, or depend on it."""
        code = [i for b in sorted(blocks) for i in self.function.blocks[b].instructions]
        found = {r for i in code if _acquires(i) for r in i.results}
        size = -1
        while size != len(found):
            size = len(found)
            found |= {r for i in code if found.intersection(i.sources) for r in i.results}
        return found

    def _leads_to(self, target: int, spinning: set[int]) -> bool:
        seen: set[int] = set()
        while target != ptx.EXIT and target not in spinning and target not in seen:
            seen.add(target)
            edges = self.function.blocks[target].edges
            target = edges[0].target if len(edges) == 1 else ptx.EXIT
        return target in spinning

    def _traps(self, target: int) -> bool:
        return target != ptx.EXIT and any(
            i.base == "trap" for i in self.function.blocks[target].instructions
        )
