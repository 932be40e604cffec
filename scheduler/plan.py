"""From the running sequences to the next tick's batch: who is ready for what, and how the policy decides."""

from collections.abc import Sequence as Ordered
from typing import NamedTuple

from scheduler.batch import Batch, decode_work, prefill_work, prompt_copy
from scheduler.metrics import TickKind
from scheduler.policy import Decode, Prefill, Prompt, View, next_tick, shares
from scheduler.sequence import Sequence


class Plan(NamedTuple):
    """A batch, and what kind of tick it makes."""

    kind: TickKind
    batch: Batch


class _Ready(NamedTuple):
    """What every running sequence needs next.

    Each of `decoding` comes with the choice of its request whose prompt it copies first, if it has not its own.
    `prefilling` has one choice of a request at most: the others will copy from it.
    """

    decoding: list[tuple[Sequence, Sequence | None]]
    prefilling: list[Sequence]


def next_plan(running: Ordered[Sequence], *, prefill_chunk: int, after_prefill: bool) -> Plan | None:
    """What the next tick runs of the sequences that hold slots, oldest first; None if there is nothing to do."""
    decoding, prefilling = _ready(running)
    view = View(
        num_decoding=len(decoding),
        prompts=tuple(map(_prompt, prefilling)),
        prefill_chunk=prefill_chunk,
        after_prefill=after_prefill,
    )
    match next_tick(view):
        case Prefill(num_tokens):
            # The first prompts have a share each.
            work = tuple(prefill_work(sequence, n) for sequence, n in zip(prefilling, num_tokens, strict=False))
            return Plan("prefill", Batch(work))
        case Decode():
            work = tuple(decode_work(sequence, source) for sequence, source in decoding)
            copies = tuple(prompt_copy(source, sequence) for sequence, source in decoding if source is not None)
            return Plan("decode", Batch(work, copies))
        case None:
            return None


def next_to_prefill(running: Ordered[Sequence], prefill_chunk: int) -> list[Sequence]:
    """The sequences whose prompts the next prefill tick goes on with."""
    prefilling = _ready(running).prefilling
    return prefilling[: len(shares(map(_prompt, prefilling), prefill_chunk))]


def _ready(running: Ordered[Sequence]) -> _Ready:
    prefilled: dict[str, Sequence] = {}
    for sequence in running:
        if sequence.num_computed >= sequence.prefill_end:
            prefilled.setdefault(sequence.request.id, sequence)
    decoding: list[tuple[Sequence, Sequence | None]] = []
    prefilling: dict[str, Sequence] = {}
    for sequence in running:
        if sequence.num_computed >= sequence.prefill_end:
            decoding.append((sequence, None))
        elif (source := prefilled.get(sequence.request.id)) is not None:
            decoding.append((sequence, source))
        else:
            prefilling.setdefault(sequence.request.id, sequence)
    return _Ready(decoding, list(prefilling.values()))


def _prompt(sequence: Sequence) -> Prompt:
    return Prompt(sequence.prefill_end - sequence.num_computed, sequence.is_scored)
