from __future__ import annotations

import random

from fake_runner import request
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.admission import DrainRate, WaitingQueue
from headrace.core.sequence import RequestGroup, Sequence


def sequence(seq_id: int, tokens: int = 10, priority: int = 0, key: str = "") -> Sequence:
    group = RequestGroup(request(f"r{seq_id}", [1] * tokens, priority=priority, key=key))
    return Sequence(seq_id, group, 0, 1000, 1)


def added(queue: WaitingQueue, seq: Sequence) -> Sequence:
    queue.open_account(seq)
    queue.add_fresh(seq)
    return seq


def admitted(queue: WaitingQueue) -> Sequence | None:
    seq = queue.next()
    if seq is not None:
        queue.admit(seq)
    return seq


def test_resumed_sequences_go_before_new_ones_of_their_priority() -> None:
    queue = WaitingQueue()
    added(queue, sequence(5))
    added(queue, sequence(6, priority=-1))
    for seq_id in (4, 2):
        seq = sequence(seq_id)
        queue.open_account(seq)
        queue.add_resumed(seq)
    order = [seq.seq_id for _ in range(4) if (seq := admitted(queue)) is not None]
    assert order == [6, 2, 4, 5]
    assert queue.next() is None


def test_output_tokens_are_charged_too() -> None:
    queue = WaitingQueue()
    for seq_id in range(10):
        added(queue, sequence(seq_id, key="talks"))
        added(queue, sequence(100 + seq_id, key="listens"))
    order = []
    while (seq := admitted(queue)) is not None:
        order.append(seq.group.request.key)
        if seq.account is not None and seq.group.request.key == "talks":
            seq.account.balance -= 5000
    assert order.index("listens") <= 1
    assert order[2:11].count("talks") <= 1


def test_idle_keys_save_nothing_up() -> None:
    queue = WaitingQueue()
    first = added(queue, sequence(0, key="a"))
    queue.admit(first)
    assert first.account is not None and first.account.balance <= 0
    queue.close_account(first)
    again = added(queue, sequence(1, key="a"))
    assert again.account is not None and again.account is not first.account and again.account.balance == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_everybody_comes_out_once_and_in_order_within_a_key(seed: int) -> None:
    rng, queue = random.Random(seed), WaitingQueue()
    inside: list[Sequence] = []
    left: list[Sequence] = []
    for seq_id in range(60):
        seq = sequence(seq_id, rng.randint(1, 3000), rng.choice([0, 0, 1]), rng.choice("abc"))
        inside.append(added(queue, seq))
        if rng.random() < 0.3:
            gone = inside.pop(rng.randrange(len(inside)))
            queue.remove(gone)
            queue.close_account(gone)
        if inside and rng.random() < 0.4:
            chosen = queue.next()
            assert chosen is not None and chosen is queue.next()
            queue.admit(chosen)
            inside.remove(chosen)
            left.append(chosen)
        assert sorted(seq.seq_id for seq in queue) == sorted(seq.seq_id for seq in inside)
        assert len(queue) == len(inside)
    while (last := admitted(queue)) is not None:
        inside.remove(last)
        left.append(last)
    assert not inside
    for key in "abc":
        for priority in (0, 1):
            ids = [seq.seq_id for seq in left if seq.group.request.key == key and seq.order[0] == priority]
            assert ids == sorted(ids)


def test_retry_after_follows_the_drain() -> None:
    drain = DrainRate()
    assert drain.retry_after_s(10, 0.0) == 5.0
    for second in range(20):
        drain.note_admission(float(second))
    assert 9 <= drain.retry_after_s(10, 19.0) <= 11
    assert drain.retry_after_s(10, 219.0) > 60  # nobody was admitted for a long time
    assert drain.retry_after_s(0, 19.0) == 1.0
