"""All sequences of a scheduler that are not finished, and how they pass from one state to another.

    UNFORKED ──ready_siblings──► WAITING ──(admission)──► RUNNING
                                   ▲ ◄──preempt, isolate──┘
    any of them ──drop──► FINISHED

Every passage keeps blocks, queue, groups and counts in step with each other. Nothing else changes a status, but
for admission, which is the scheduler's.
"""

from __future__ import annotations

from headrace.core.admission import WaitingQueue
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.sequence import RequestGroup, Sequence, Status


class Roster:
    """Who there is. The collections are changed in place and never replaced.

    Attributes:
        kv: holds the blocks of those that run.
        waiting: those that wait for admission.
        running: those that run, by order.
        isolated: unfinished ones with ``is_isolated``, by time of their fault.
        groups: requests with an unfinished sequence, by id, oldest first.
        num_sequences: unfinished ones.
        num_replays: of these, those that another worker had begun and that have no token since.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.isolated: list[Sequence] = []
        self.groups: dict[str, RequestGroup] = {}
        self.num_sequences = self.num_replays = 0

    def add(self, seq: Sequence) -> None:
        """A new sequence of its group; the first one computes the prompt, the others wait to be forked from it."""
        group = seq.group
        group.sequences[seq.index] = seq
        self.groups[group.request.id] = group
        self.num_sequences += 1
        self.num_replays += seq.is_replay
        self.waiting.open_account(seq)
        if group.leader is None:
            group.leader = seq
            self.waiting.add_fresh(seq)
        else:
            seq.status = Status.UNFORKED
            seq.prompt_logprobs = None
            group.unforked.append(seq)

    def preempt(self, seq: Sequence) -> None:
        """It starts over behind the same tokens, usually from its own cached blocks."""
        self.running.remove(seq)
        self.kv.release(seq)
        seq.epoch += 1
        seq.status = Status.WAITING
        self.waiting.add_resumed(seq)

    def isolate(self, seq: Sequence) -> None:
        """Start a sequence over, alone: nothing that it computed, or that was computed behind it, is believed."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.kv.discard(seq)
            seq.status = Status.WAITING
            self.waiting.add_resumed(seq)
        seq.epoch += 1
        seq.void_epoch = seq.epoch
        seq.num_faults += 1
        seq.is_isolated, seq.is_steady = True, False
        self.isolated.append(seq)
        if seq.prompt_logprobs is not None:
            seq.prompt_logprobs = [None]

    def note_progress(self, seq: Sequence) -> None:
        """It has a token again: neither alone any longer nor a replay."""
        if seq.is_isolated:
            seq.is_isolated = False
            self.isolated.remove(seq)
        self.num_replays -= seq.is_replay
        seq.is_replay = False

    def ready_siblings(self, seq: Sequence) -> None:
        """Once the leader has computed the prompt but for the last token, the others may fork from it."""
        if seq is not seq.group.leader or seq.num_confirmed < seq.num_prompt_tokens - 1:
            return
        for sibling in seq.group.unforked:
            if sibling.status is Status.UNFORKED:
                sibling.status = Status.WAITING
                self.waiting.add_resumed(sibling)

    def drop(self, seq: Sequence) -> None:
        """The end of a sequence, in whatever state it is."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.kv.release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        self.note_progress(seq)
        self.waiting.close_account(seq)
        self.num_sequences -= 1
        group = seq.group
        del group.sequences[seq.index]
        if seq in group.unforked:
            group.unforked.remove(seq)
        if not group.sequences:
            del self.groups[group.request.id]
        if seq is group.leader:
            self._promote(group)  # without siblings, it breaks the circle of group and leader

    def _promote(self, group: RequestGroup) -> None:
        """The leader is gone: if siblings still wait for the prompt, the first of them computes it."""
        unready = [seq for seq in group.unforked if seq.status is Status.UNFORKED]
        group.leader = unready[0] if unready else None
        if group.leader is None:
            return
        group.unforked.remove(group.leader)
        group.leader.status = Status.WAITING
        if group.request.params.prompt_logprobs is not None and not group.leader.is_announced:
            group.leader.prompt_logprobs = [None]
        if group.cached_tokens is None:
            self.waiting.add_fresh(group.leader)
        else:
            self.waiting.add_resumed(group.leader)
