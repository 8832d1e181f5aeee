"""The waiting queue: who is admitted next, and how fast the queue drains.

Smaller priorities go first. Within a priority, sequences that were admitted before (preempted ones) or whose
request was (forks) go first, by arrival. New ones are first come, first served per key, and keys take turns by
deficit round robin: a key whose turn comes gets a quantum of tokens and may admit while it has a positive balance.
A prompt is charged when it is admitted, output tokens when they are made, so balances go negative and a heavy key
waits until the others had as much. The order is strict: the next one is never skipped because a later one would
fit, or large requests would starve.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Ordered

from headrace.core.account import Account
from headrace.core.sequence import Sequence, Status

QUANTUM_TOKENS = 512


class _Level:
    """All that waits with one priority."""

    def __init__(self) -> None:
        self.resumed: list[Sequence] = []  # sorted by arrival
        self.fresh: dict[Account, deque[Sequence]] = {}  # new sequences, by arrival; no empty entries
        self.turns: deque[Account] = deque()  # accounts that have some; the first has its turn

    def next(self) -> Sequence | None:
        if self.resumed:
            return self.resumed[0]
        if not self.turns:
            return None
        if self.turns[0].balance <= 0:
            self._pass_turns()
        return self.fresh[self.turns[0]][0]

    def _pass_turns(self) -> None:
        """Go round, each account getting a quantum when its turn comes, until one has a positive balance."""
        rounds = max(0, min(-account.balance for account in self.turns) // QUANTUM_TOKENS)
        for account in self.turns:
            account.balance += rounds * QUANTUM_TOKENS
        while self.turns[0].balance <= 0:
            self.turns.rotate(-1)
            self.turns[0].balance += QUANTUM_TOKENS


class WaitingQueue:
    """Sequences that hold nothing yet (or no more), in the order in which they will be admitted."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._accounts: dict[tuple[int, str], Account] = {}
        self.num_fresh = 0  # new requests: what the bound on the queue counts
        self.num_resumed = 0

    def __len__(self) -> int:
        return self.num_fresh + self.num_resumed

    def __iter__(self) -> Iterator[Sequence]:
        for _, level in sorted(self._levels.items()):
            yield from level.resumed
            for account in level.turns:
                yield from level.fresh[account]

    def has_fair_share(self, key: str, places: int) -> bool:
        """Whether a key has as many new requests here as its share of ``places`` among the keys that wait."""
        waiting: Counter[str] = Counter({key: 0})
        for level in self._levels.values():
            for account, fresh in level.fresh.items():
                waiting[account.key] += len(fresh)
        return waiting[key] >= places // len(waiting)

    def open_account(self, seq: Sequence) -> None:
        """Once per sequence, before it waits for the first time."""
        key = seq.order[0], seq.group.request.key
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(*key)
        account.num_live += 1
        seq.account = account

    def close_account(self, seq: Sequence) -> None:
        """Once per sequence, when it is gone."""
        account = seq.account
        if account is not None:
            seq.account = None
            account.num_live -= 1
            if not account.num_live:
                del self._accounts[account.priority, account.key]

    def add_fresh(self, seq: Sequence) -> None:
        account, level = self._account(seq), self._level(seq)
        if account not in level.fresh:
            level.fresh[account] = deque()
            level.turns.append(account)
        level.fresh[account].append(seq)
        self.num_fresh += 1

    def add_resumed(self, seq: Sequence) -> None:
        bisect.insort(self._level(seq).resumed, seq, key=lambda waiting: waiting.order)
        self.num_resumed += 1

    def next(self) -> Sequence | None:
        """The sequence to admit next; stays first until it is removed or one with a better claim arrives."""
        for _, level in sorted(self._levels.items()):
            seq = level.next()
            if seq is not None:
                return seq
        return None

    def admit(self, seq: Sequence) -> None:
        """Remove ``next()``'s answer and charge its prompt to its key."""
        if seq not in self._level(seq).resumed:
            self._account(seq).balance -= len(seq.token_ids)
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        """Take a waiting sequence out, wherever it is."""
        level = self._level(seq)
        if seq in level.resumed:
            level.resumed.remove(seq)
            self.num_resumed -= 1
        else:
            account = self._account(seq)
            level.fresh[account].remove(seq)
            self.num_fresh -= 1
            if not level.fresh[account]:
                del level.fresh[account]
                level.turns.remove(account)
                account.balance = min(account.balance, 0)  # who has nothing to ask for saves nothing up
        if not level.resumed and not level.turns:
            del self._levels[seq.order[0]]

    def _level(self, seq: Sequence) -> _Level:
        return self._levels.setdefault(seq.order[0], _Level())

    def _account(self, seq: Sequence) -> Account:
        if seq.account is None:
            raise RuntimeError(f"sequence {seq.seq_id} waits without an account")
        return seq.account


class DrainRate:
    """How fast requests leave the queue, from the times of the last admissions."""

    def __init__(self, window: int = 64) -> None:
        self._times: deque[float] = deque(maxlen=window)

    def note_admission(self, now: float) -> None:
        self._times.append(now)

    def retry_after_s(self, waiting: int, now: float) -> float:
        """Time until as many requests as wait now have been admitted; a guess of 5 s before two were."""
        if len(self._times) < 2:
            return 5.0
        per_request_s = (now - self._times[0]) / len(self._times)
        return min(600.0, max(1.0, waiting * per_request_s))


def too_long(prompt: int, max_total: int, max_model_len: int) -> str:
    """Why a prompt of so many tokens can never run, and what can."""
    if max_total == max_model_len:
        return f"The prompt has {prompt} tokens; prompt and output may have {max_total} together."
    return (
        f"The prompt has {prompt} tokens; the KV memory holds {max_total}, prompt and output together "
        f"(model length {max_model_len}; --kv-memory-mb or --max-cache-blocks change it)."
    )


def check_sequences(
    sequences: Ordered[Sequence], counted: int, running: Ordered[Sequence], waiting: WaitingQueue
) -> None:
    """Raise RuntimeError unless the lists are what the sequences' own states say."""
    if len(sequences) != counted:
        raise RuntimeError(f"{len(sequences)} sequences exist, {counted} are counted")
    found = [seq for seq in sequences if seq.status is Status.RUNNING]
    if sorted(found, key=lambda seq: seq.order) != running:
        raise RuntimeError("the running list is not the running sequences in order")
    ids = {seq.seq_id for seq in sequences if seq.status is Status.WAITING}
    if ids != {seq.seq_id for seq in waiting} or len(ids) != len(waiting):
        raise RuntimeError("the waiting queue is not the waiting sequences")
