"""The cursor state machine against a plain Python model: every cursor and plan column, whatever the order of calls."""

import itertools
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replayssm import PLAN, Plan, ReplayState, cursor
from replayssm.layout import Layout
from tests.cases import AWKWARD
from tests.harness import BACKENDS, DEVICE

CASE = next(case for case in AWKWARD if case.name == "smallest")
SLOTS = 4


def ints(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def table(plan: Plan) -> list[dict[str, int]]:
    """The plan's rows by column name."""
    return [dict(zip(PLAN, row, strict=True)) for row in plan.rows.cpu().tolist()]


# ---- the rules themselves -------------------------------------------------------------------------------------------


def short(slot: int, W: int) -> int:
    """Records by which the first window of a slot is shorter: W times the fraction of slot times the golden ratio."""
    return math.floor(W * (slot * Fraction(40503, 2**16) % 1))


@pytest.mark.parametrize("W", [1, 2, 7])
def test_flush_rule_at_every_count(W):
    """A step folds first iff it is forced or its tokens do not fit, or it has some and the short window is full.

    An empty ring is never folded unforced; a whole window (phase 0) is not cut short; afterwards at most W records are live.
    """
    for count, t, phase in itertools.product(range(W + 1), range(W + 1), range(W)):
        for force in (False, True, 0, 1, 5):
            expected = bool(force) or count + t > W or (t > 0 and count >= W - phase)
            assert bool(cursor.flush_rule(force, count, t, W, phase)) == expected
            tensors = (torch.tensor(x) for x in (force, count, t))
            assert bool(cursor.flush_rule(*tensors, W, torch.tensor(phase))) == expected
        flush = bool(cursor.flush_rule(0, count, t, W, phase))
        assert cursor.committed(0, count, int(flush), t, 2 * W)[1] <= W
        assert not (flush and count == 0) and not (flush and t == 0)


@given(st.integers(0, 2**31 - 1), st.integers(0, 5), st.integers(1, 256))
def test_phase_of_a_slot(slot, flushes, W):
    """Before the first fold alone, the same for integers and tensors; 0 where there is one phase, and for slot 0."""
    expected = 0 if flushes else short(slot, W)
    assert cursor.phase(slot, flushes, W) == expected < W
    assert int(cursor.phase(torch.tensor(slot), torch.tensor(flushes, dtype=torch.int32), W)) == expected
    assert cursor.phase(slot, 0, 1) == cursor.phase(0, 0, W) == 0


def folds(slots: Iterable[int], W: int, steps: int, T: int = 1, stagger: bool = True) -> list[int]:
    """How many of these slots, all loaded before step 0, fold on each of the steps; all T tokens of a step stay."""
    slot, count = torch.tensor(list(slots)), 0
    count, flushes, folding = torch.zeros_like(slot), torch.zeros_like(slot), []
    for _ in range(steps):
        flush = cursor.flush_rule(0, count, T, W, cursor.phase(slot, flushes, W if stagger else 1)).long()
        _, count = cursor.committed(0, count, flush, T, W + T)
        flushes += flush
        folding.append(int(flush.sum()))
    return folding


@pytest.mark.parametrize("W, T", [(8, 1), (11, 1), (16, 1), (18, 1), (20, 1), (16, 4), (32, 8)])
def test_requests_admitted_together_fold_apart(W, T):
    """256 requests, slots in a row or strided, from the first window on: no step has many more folds than the mean."""
    cycle = W // T
    for stride in (1, 2, 3, 4, 5, 8, 16, 17, 32, 256):
        each = folds(range(5, 5 + 256 * stride, stride), W, 4 * cycle + 1, T)
        assert each[0] == 0, "empty rings"
        for at in range(1, 4 * cycle, cycle):
            window = each[at : at + cycle]
            assert sum(window) == 256 and max(window) * cycle <= (1.15 if stride == 1 else 1.3) * 256
    assert max(folds(range(256), W, 4 * cycle, T, stagger=False)) == 256


@pytest.mark.parametrize("W", [8, 11, 16, 18, 20])
def test_staggering_costs_few_folds(W):
    """256 requests of some 500 tokens, of each length in a window's width: at most half a fold more per request, below 3 %."""
    lengths = range(500 - W // 2, 500 - W // 2 + W)
    plain, ours = (
        sum(sum(each[:n]) for n in lengths)
        for each in (folds(range(256), W, lengths[-1], stagger=stagger) for stagger in (False, True))
    )
    assert plain == 256 * sum((n - 1) // W for n in lengths)
    assert plain < ours <= plain + 0.5 * 256 * W and ours <= 1.03 * plain


@given(st.integers(1, 40), st.integers(0, 8), st.data())
def test_committed_moves_past_folded_records_alone(W, extra, data):
    """Row of logical record i is (start + i) mod R: kept records keep their rows, appended ones get the next."""
    R = W + 1 + extra
    start, count = data.draw(st.integers(0, R - 1)), data.draw(st.integers(0, W))
    flush, accepted = data.draw(st.booleans()), data.draw(st.integers(0, R - W))
    new_start, new_count = cursor.committed(start, count, int(flush), accepted, R)
    before = [(start + i) % R for i in range(count + accepted)]
    after = [(new_start + i) % R for i in range(new_count)]
    assert after == (before[count:] if flush else before)
    assert 0 <= new_start < R
    assert cursor.append_row(start, count, R) == (start + count) % R


@given(st.integers(-(2**31), 2**31 - 3))
def test_tickets_are_odd_and_new(pending):
    """The next ticket is odd and neither the pending one nor an older one, negative ones after a wrap included."""
    ticket = cursor.next_ticket(pending)
    assert ticket % 2 == 1 and pending < ticket <= pending + 2
    assert int(cursor.next_ticket(torch.tensor(pending, dtype=torch.int32))) == ticket


# ---- a model of the machine -----------------------------------------------------------------------------------------


def in_order(rows: list[dict[str, int]]) -> None:
    """Fills the columns `order`, down it the numbers of the rows that flush, then of the others, and `flushing`."""
    order = [i for i, r in enumerate(rows) if r["flush"]] + [i for i, r in enumerate(rows) if not r["flush"]]
    for row, i in zip(rows, order, strict=True):
        row["order"] = i
        row["flushing"] = sum(r["flush"] for r in rows)


@dataclass
class Slot:
    start: int = 0
    count: int = 0
    pending: int = 0
    flushes: int = 0
    key: int = 0


@dataclass
class Both:
    """A small ReplayState and the plain model of its cursors; every call goes to both, and they are compared."""

    layout: Layout
    backend: str
    slots: list[Slot] = field(init=False)
    plans: list[tuple[Plan, list[dict[str, int]]]] = field(default_factory=list)  # the last is live, others are copies

    def __post_init__(self):
        self.state = ReplayState(self.layout, 1, SLOTS, DEVICE, self.backend, max_rows=8, debug=False)
        self.slots = [Slot() for _ in range(SLOTS)]

    def compare(self):
        for name, x in self.state.cursors._asdict().items():
            assert x.cpu().tolist() == [getattr(s, name) for s in self.slots], name
        for s in self.slots:
            assert 0 <= s.start < self.layout.R and 0 <= s.count <= self.layout.W

    def settled(self, slots: list[int]) -> list[int]:
        return [s for s in slots if s < 0 or self.slots[s].pending % 2 == 0]

    def plan(self, slots: list[int], style: str, t: list[int], force: list[int] | None, wide: bool):
        """style: "one" t for all rows, "each" its own, or "packed" by cu_seqlens."""
        T_max, dtype = self.layout.T_max, torch.int64 if wide else torch.int32
        t = [n % (T_max + 1) for n in t[: len(slots)]] if style != "one" else [t[0] % (T_max + 1)] * len(slots)
        T = t[0] if style == "one" and t else T_max
        first = [sum(t[:i]) if style == "packed" else i * T for i in range(len(slots))]
        kwargs = {
            "one": {"t": T},
            "each": {"t": ints(t, dtype)},
            "packed": {"cu_seqlens": ints([*first, sum(t)] if t else [0], dtype)},
        }[style]
        if force is not None:
            force = force[: len(slots)]
            kwargs["force"] = ints(force).bool() if wide else ints(force)
        expected = []
        for i, slot in enumerate(slots):
            live = slot >= 0
            s = self.slots[slot] if live else Slot()
            n = t[i] if live else 0
            ticket = s.pending + 2 if s.pending % 2 else s.pending + 1
            W, phase = self.layout.W, 0 if s.flushes or not self.layout.stagger else short(slot, self.layout.W)
            flush = live and (bool(force and force[i]) or s.count + n > W or (n > 0 and s.count >= W - phase))
            append = (s.start + s.count) % self.layout.R
            rows = t[i] if style == "packed" else T
            low = (s.key + 2**31) % 2**32 - 2**31  # as int32
            row = (slot, s.start, s.count, n, int(flush), append, first[i], rows, ticket, None, s.flushes, low, s.key >> 32, 0)
            expected.append(dict(zip(PLAN, row, strict=True)))
        in_order(expected)
        for row in expected:
            if row["slot"] >= 0:
                s = self.slots[row["slot"]]
                s.pending = row["ticket"]
                if row["flush"]:  # whether or not a commit follows
                    s.start, s.count, s.flushes = (s.start + s.count) % self.layout.R, 0, s.flushes + 1
        if self.plans:  # the plan buffer is about to be overwritten
            old, rows = self.plans.pop()
            self.plans.append((Plan(old.rows.clone(), old.T, old.tokens), rows))
        plan = self.state.plan(ints(slots, dtype), **kwargs)
        assert table(plan) == expected
        assert plan.T == T and plan.tokens == (None if style == "packed" else len(slots) * T)
        self.plans.append((plan, expected))

    def commit(self, which: int, accepted: list[int] | None):
        """Commit the newest plan (0) or a copy of an older one; what is no longer pending must not move."""
        plan, rows = self.plans[-1 - which % len(self.plans)]
        if accepted is not None:  # padding rows' values mean nothing
            accepted = [n % (row["t"] + 1) if row["slot"] >= 0 else n for n, row in zip(accepted, rows, strict=False)]
        self.state.commit(plan, None if accepted is None else ints(accepted))
        for i, row in enumerate(rows):
            if row["slot"] < 0 or self.slots[row["slot"]].pending != row["ticket"]:
                continue
            s = self.slots[row["slot"]]
            kept = row["t"] if accepted is None else accepted[i]
            s.pending += 1
            s.count += kept

    def fold(self, slots: list[int]):
        slots = self.settled(slots)
        self.state.fold(ints(slots))
        for slot in slots:
            if slot >= 0:
                s = self.slots[slot]
                s.start, s.count, s.flushes = (s.start + s.count) % self.layout.R, 0, s.flushes + 1
                s.pending += 2

    def restart(self, slots: list[int], keys: list[int] | None, load: bool):
        """Reset or load, also of slots whose step was dropped."""
        given = None if keys is None else ints(keys[: len(slots)], torch.int64)
        if load:
            self.state.load(ints(slots), torch.zeros(1, len(slots), 1, 16, 16, device=DEVICE), keys=given)
        else:
            self.state.reset(ints(slots), given)
        for i, slot in enumerate(slots):
            if slot >= 0:
                s = self.slots[slot]
                self.slots[slot] = Slot(pending=s.pending + s.pending % 2, key=s.key if keys is None else keys[i])

    def copy(self, src: list[int], dst: list[int], by_export: bool):
        pairs = [(a, b) for a, b in zip(src, dst, strict=False) if self.settled([a])]
        if by_export:
            pairs = [(a, b) for a, b in pairs if a >= 0]
            self.state.import_(ints([b for _, b in pairs]), self.state.export(ints([a for a, _ in pairs])))
        else:
            self.state.copy(ints([a for a, _ in pairs]), ints([b for _, b in pairs]))
        old = [Slot(s.start, s.count, s.pending, s.flushes, s.key) for s in self.slots]
        for a, b in pairs:
            if a >= 0 and b >= 0:
                pending = old[b].pending + old[b].pending % 2
                self.slots[b] = Slot(old[a].start, old[a].count, pending, old[a].flushes, old[a].key)


def some_layout(W: int, T_max: int, extra: int, stagger: bool = True) -> Layout:
    T_max = 1 + (T_max - 1) % W
    return CASE.layout(W=W, T_max=T_max, R=W + T_max + extra, stagger=stagger)


ROWS = st.lists(st.sampled_from([-1, -9, 0, 1, 2, 3]), max_size=6, unique=True)
SMALL = st.lists(st.integers(0, 11), min_size=6, max_size=6)
FLAGS = st.none() | st.lists(st.integers(0, 1), min_size=6, max_size=6)
KEYS = st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6)


class CursorMachine(RuleBasedStateMachine):
    @initialize(W=st.integers(1, 6), T_max=st.integers(1, 6), extra=st.integers(0, 2), stagger=st.booleans())
    def start(self, W, T_max, extra, stagger):
        self.both = Both(some_layout(W, T_max, extra, stagger), "torch")

    @rule(slots=ROWS, style=st.sampled_from(["one", "each", "packed"]), t=SMALL, force=FLAGS, wide=st.booleans())
    def plan(self, slots, style, t, force, wide):
        self.both.plan(slots, style, t, force, wide)

    @rule(style=st.sampled_from(["one", "each"]), t=SMALL, accepted=st.none() | SMALL)
    def whole_step(self, style, t, accepted):
        """All slots take a step that is committed: without it, random calls seldom fill a window."""
        self.both.plan([2, 0, -1, 3, 1], style, t, None, False)
        self.both.commit(0, accepted)

    @precondition(lambda self: self.both.plans)
    @rule(which=st.integers(0, 4), accepted=st.none() | SMALL)
    def commit(self, which, accepted):
        self.both.commit(which, accepted)

    @rule(slots=ROWS)
    def fold(self, slots):
        self.both.fold(slots)

    @rule(slots=ROWS, keys=KEYS, load=st.booleans())
    def restart(self, slots, keys, load):
        self.both.restart(slots, keys, load)

    @rule(src=ROWS, dst=ROWS, by_export=st.booleans())
    def copy(self, src, dst, by_export):
        self.both.copy(src, dst, by_export)

    @invariant()
    def equal(self):
        if hasattr(self, "both"):
            self.both.compare()


CursorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
TestCursorMachine = CursorMachine.TestCase


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_walk(backend, seed):
    """The same machine, seeded: what the kernels' cursors are walked with."""
    draw = random.Random(seed)
    both = Both(some_layout(4 + seed, 3, seed), backend)

    def some(n=6):
        return [draw.randrange(12) for _ in range(n)]

    for _ in range(60):
        slots, other = (draw.sample([-1, -9, 0, 1, 2, 3], draw.randint(0, 6)) for _ in range(2))
        kind = draw.choice(["plan", "step", "step", "step", "commit", "commit", "fold", "restart", "copy"])
        if kind in ("plan", "step"):
            force = draw.choice([None, [n % 2 for n in some()]]) if kind == "plan" else None
            both.plan(slots, draw.choice(["one", "each", "packed"]), some(), force, draw.random() < 0.5)
        if kind == "step" or (kind == "commit" and both.plans):
            both.commit(0 if kind == "step" else draw.randrange(5), draw.choice([None, some()]))
        if kind == "fold":
            both.fold(slots)
        if kind == "restart":
            both.restart(slots, draw.choice([None, [draw.getrandbits(63) for _ in range(6)]]), draw.random() < 0.5)
        if kind == "copy":
            both.copy(slots, other, draw.random() < 0.5)
        both.compare()


# ---- single facts of the contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_count_force_and_t(backend, wide):
    """Counts 0 ... W by t 0 ... T_max by force by accepted 0 ... t: more rows than one program of the kernel takes.

    Of their slots half have folded before, and so have whole windows.
    """
    W, T_max, R = 7, 3, 11
    steps = [(t, accepted) for t in range(T_max + 1) for accepted in range(t + 1)]
    grid = [(count, t, force, accepted) for count in range(W + 1) for force in (0, 1) for t, accepted in steps]
    assert len(grid) > 128
    order = random.Random(0).sample(range(len(grid)), len(grid))
    state = ReplayState(CASE.layout(W=W, T_max=T_max, R=R), 1, len(grid), DEVICE, backend)
    state.cursors.count.copy_(ints([count for count, *_ in grid]))
    state.cursors.start.copy_(ints([slot % R for slot in range(len(grid))]))
    state.cursors.flushes.copy_(ints([slot % 2 for slot in range(len(grid))]))
    folds_first = [
        bool(forced or count + n > W or (n and slot % 2 == 0 and count >= W - short(slot, W)))
        for slot, (count, n, forced, _) in enumerate(grid)
    ]
    t, force, accepted = (ints([grid[slot][i] for slot in order], wide) for i in (1, 2, 3))
    plan = state.plan(ints(order, wide), t=t, force=force)
    rows = table(plan)
    in_order(rows)
    assert rows == table(plan)
    for row, slot in zip(rows, order, strict=True):
        count, n, _, _ = grid[slot]
        assert row["flush"] == int(folds_first[slot])
        assert (row["slot"], row["start"], row["count"], row["t"]) == (slot, slot % R, count, n)
        assert row["append"] == (slot % R + count) % R
    assert (state.cursors.pending == 1).all()
    state.commit(plan, accepted)
    got = list(zip(*(x.cpu().tolist() for x in state.cursors[:4]), strict=True))
    for slot, (count, _, _, kept) in enumerate(grid):
        if folds_first[slot]:
            assert got[slot] == ((slot + count) % R, kept, 2, slot % 2 + 1)
        else:
            assert got[slot] == (slot % R, count + kept, 2, slot % 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_commit_changes_nothing(backend):
    """Not the same plan with other numbers, nor an old one after a newer plan, a reset, or a copy over the slot."""
    state = ReplayState(CASE.layout(W=4, T_max=2), 1, 3, DEVICE, backend)
    slots = ints([1, 0])

    def unmoved(plan, accepted=None):
        before = [x.clone() for x in state.cursors]
        state.commit(plan, accepted)
        return all(torch.equal(x, y) for x, y in zip(before, state.cursors, strict=True))

    def step(t=2):
        plan = state.plan(slots, t=t)
        copied = Plan(plan.rows.clone(), plan.T, plan.tokens)
        state.commit(plan, ints([1, 2]))
        return copied

    first = step()
    assert unmoved(first) and unmoved(first, ints([0, 0]))
    newer = state.plan(slots, t=1)
    assert unmoved(first)
    state.commit(newer)
    assert state.cursors.count.tolist() == [3, 2, 0]
    for restart in (lambda: state.reset(slots), lambda: state.copy(ints([2, 2]), slots)):
        old = step()
        restart()
        assert unmoved(old)
        state.plan(slots, t=1)
        assert unmoved(old), "a slot's tickets must not begin anew with its next request"
        state.commit(state.plan(slots, t=1))
    dropped = state.plan(slots, t=2)
    state.reset(slots)
    assert unmoved(dropped), "the commit of a dropped step must not reach the slot's next request"


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropping_a_step_is_accepting_nothing(backend):
    """accepted = 0: a plain step leaves the ring as it was, a flush step leaves it empty behind the folded records."""
    state = ReplayState(CASE.layout(W=3, T_max=1), 1, 1, DEVICE, backend)
    slot, none = ints([0]), ints([0])
    for count in (1, 2, 3):
        state.commit(state.plan(slot), none)
        state.commit(state.plan(slot))
        assert [int(x) for x in state.cursors[:4]] == [0, count, 4 * count, 0]
    state.commit(state.plan(slot), none)
    assert [int(x) for x in state.cursors[:4]] == [3, 0, 14, 1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("W, T, counts", [(3, 3, [3, 3, 3]), (5, 3, [3, 3, 3]), (4, 2, [2, 4, 2]), (1, 1, [1, 1, 1])])
def test_windows_are_not_cut_short(W, T, counts, backend):
    """T = W and W < 2 T: a step that fits is taken, up to exactly W records; what remains flushes."""
    state = ReplayState(CASE.layout(W=W, T_max=T), 1, 1, DEVICE, backend)
    got = []
    for _ in counts:
        state.commit(state.plan(ints([0]), t=T))
        got.append(int(state.cursors.count))
    assert got == counts
    state.reset(ints([0]))
    for count in range(1, W - T + 1):  # one kept token a step: no flush while T more still fit
        plan = state.plan(ints([0]), t=T)
        assert not table(plan)[0]["flush"]
        state.commit(plan, ints([1]))
        assert int(state.cursors.count) == count


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows(backend):
    """cu_seqlens: rows of 0 ... T_max tokens; a padding row owns its tokens and takes none of them."""
    state = ReplayState(CASE.layout(W=8, T_max=3), 1, 4, DEVICE, backend)
    plan = state.plan(ints([2, -1, 0, 3]), cu_seqlens=ints([0, 3, 5, 5, 6]), force=ints([0, 1, 1, 0]))
    assert [[r[c] for c in ("slot", "t", "flush", "first", "rows")] for r in table(plan)] == [
        [2, 3, 0, 0, 3], [-1, 0, 0, 3, 2], [0, 0, 1, 5, 0], [3, 1, 0, 5, 1],
    ]  # fmt: skip
    assert plan.tokens is None and plan.T == 3
    state.commit(plan)
    assert state.cursors.count.tolist() == [0, 0, 3, 1]
    assert state.cursors.flushes.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_and_padding_alone(backend):
    state = ReplayState(CASE.layout(W=8, T_max=3), 1, 2, DEVICE, backend)
    state.commit(state.plan(ints([1, 0]), t=2))
    before = [x.clone() for x in state.cursors]
    for slots in ([], [-1], [-5, -1]):
        for t in (1, 0, ints([2] * len(slots))):
            plan = state.plan(ints(slots), t=t, force=ints([1] * len(slots)))
            state.commit(plan)
            state.commit(plan, ints([3] * len(slots)))
            assert plan.rows.shape == (len(slots), len(PLAN))
        for call in (state.fold, state.reset, lambda s: state.copy(s, s), state.materialize):
            call(ints(slots))
    assert all(torch.equal(x, y) for x, y in zip(before, state.cursors, strict=True))
