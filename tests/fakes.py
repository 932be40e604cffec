"""An engine without a model: a byte tokenizer, and a backend whose next token depends on the whole cache row.

Any mix-up of slots, positions or copies changes the text, so equality with `solo` proves that there was none.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.batch import Result, Sampled, Scored, TokenLogprob, TokenLogprobs
from scheduler.batch import Batch, Work
from scheduler.core import Scheduler
from scheduler.events import Finished
from scheduler.loop import EngineLoop
from scheduler.request import FinishReason, Request

NextToken = Callable[[tuple[int, ...], Request, int], int]
"""(the token ids at positions 0..p, whose they are, which choice) -> the token at p + 1."""


class ByteTokenizer:
    """Token i is the byte i; a few control tokens follow. Has the whole face of `engine.tokenizer.Tokenizer`."""

    specials = ("<|im_start|>", "<|im_end|>")
    vocab_size = 256 + len(specials)
    bos_id = 256
    eos_id = 257
    add_bos = False
    eos_ids = frozenset({257})
    special_ids = frozenset({256, 257})

    def encode(self, text: str, *, parse_special: bool = True, add_bos: bool | None = None) -> list[int]:
        ids = [self.bos_id] if add_bos else []
        while text:
            special = next((s for s in self.specials if parse_special and text.startswith(s)), None)
            if special is not None:
                ids.append(256 + self.specials.index(special))
                text = text.removeprefix(special)
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self.specials[token_id - 256].encode()

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


def fingerprint(row: tuple[int, ...], request: Request, index: int) -> int:
    """A number that changes with every token of the row; unless greedy also with the seed and the choice."""
    who = (0, 0) if request.params.is_greedy else (request.params.seed or 0, index)
    return int.from_bytes(hashlib.blake2b(repr((row, who)).encode(), digest_size=8).digest(), "little")


def letters(row: tuple[int, ...], request: Request, index: int) -> int:
    """Small letters and spaces without end."""
    return b"abcdefghijklmnopqrstuvwxyz     "[fingerprint(row, request, index) % 31]


_MIXED = [*"aé€😀 b".encode(), 0xC3, 0xFF, ord("a"), ord("b"), 256, 257]


def mixed(row: tuple[int, ...], request: Request, index: int) -> int:
    """Letters, whole, cut and wrong characters, control tokens, and now and then EOS (not before `min_tokens`)."""
    token_id = _MIXED[fingerprint(row, request, index) % len(_MIXED)]
    is_early = len(row) - len(request.prompt_ids) < request.params.min_tokens
    return ord("z") if token_id in ByteTokenizer.eos_ids and is_early else token_id


def solo(
    request: Request,
    index: int = 0,
    *,
    max_len: int,
    next_token: NextToken = letters,
    tokenizer: ByteTokenizer | None = None,
) -> tuple[list[int], str, FinishReason]:
    """Ids, text and reason of one choice run alone, the obvious way: everything decoded anew at every token."""
    tokenizer = tokenizer or ByteTokenizer()
    params = request.params
    limit = max_len - len(request.prompt_ids)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    ids: list[int] = []

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special=params.skip_special_tokens)

    while len(ids) < limit:
        ids.append(next_token((*request.prompt_ids, *ids), request, index))
        if ids[-1] in tokenizer.eos_ids and not params.ignore_eos:
            return ids, _cut(text_of(ids[:-1]), request)[0], FinishReason.STOP
        if ids[-1] in params.stop_token_ids:
            shown = ids if params.include_stop_str_in_output else ids[:-1]
            return ids, _cut(text_of(shown), request)[0], FinishReason.STOP
        text, was_cut = _cut(text_of(ids).rstrip("\ufffd"), request)
        if was_cut:
            return ids, text, FinishReason.STOP
    text, was_cut = _cut(text_of(ids), request)
    return ids, text, FinishReason.STOP if was_cut else FinishReason.LENGTH


def _cut(text: str, request: Request) -> tuple[str, bool]:
    """`text` up to the first stop string that completes, and whether there was one."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in request.params.stop if text[:end].endswith(stop)]
        if matches:
            keep = end if request.params.include_stop_str_in_output else end - max(map(len, matches))
            return text[:keep], True
    return text, False


@dataclass
class FakeBackend:
    """Keeps token ids where a model keeps K/V, and refuses whatever a real cache would refuse.

    `fault`, called with each row's work before its token is chosen, may raise to fail the whole batch or return a
    `RowError` to fail that row. `delay_s` makes each tick last.
    """

    next_token: NextToken = letters
    fault: Callable[[Work], Result] = lambda _work: None
    delay_s: float = 0.0
    rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    num_ticks: int = 0

    def run(self, batch: Batch) -> list[Result]:
        self.num_ticks += 1
        if self.delay_s:
            time.sleep(self.delay_s)
        slots = [work.chunk.slot for work in batch.work]
        assert len(set(slots)) == len(slots), f"two chunks share a slot: {slots}"
        for copy in batch.copies:
            source = self.rows[copy.source]
            assert len(source) >= copy.length, f"copy of {copy.length} positions where {len(source)} are"
            self.rows[copy.target] = source[: copy.length]
        return [self._result(work) for work in batch.work]

    def _result(self, work: Work) -> Result:
        chunk, request = work.chunk, work.sequence.request
        row = self.rows.get(chunk.slot, ())
        assert chunk.start <= len(row), f"a gap in slot {chunk.slot}: {chunk.start} after {len(row)}"
        row = self.rows[chunk.slot] = row[: chunk.start] + chunk.token_ids
        if (failure := self.fault(work)) is not None:
            return failure
        if work.samples:
            assert chunk.n_logits == 1
            token_id = self.next_token(row, request, work.sequence.index)
            if request.params.logprobs is None:
                return Sampled(token_id)
            return Sampled(token_id, fake_logprobs(token_id, request.params.logprobs))
        if chunk.n_logits:
            assert request.params.prompt_logprobs is not None
            followers = request.prompt_ids[chunk.start + 1 :][: chunk.n_logits]
            assert len(followers) == chunk.n_logits
            return Scored(tuple(fake_logprobs(follower, request.params.prompt_logprobs) for follower in followers))
        return None


def fake_logprobs(token_id: int, top_n: int) -> TokenLogprobs:
    """The token is the likeliest; the next ids follow it."""
    top = tuple(TokenLogprob((token_id + i) % 256, -0.5 - i) for i in range(top_n))
    return TokenLogprobs(token_id, -0.5, 1, top)


def fake_loop(
    backend: FakeBackend | None = None,
    *,
    n_slots: int = 4,
    max_len: int = 64,
    prefill_chunk: int = 8,
    max_queue: int = 16,
    on_finished: Callable[[Finished], None] = lambda _finished: None,
) -> EngineLoop:
    """An `EngineLoop` over the fakes; whoever asks for it runs and stops it."""
    tokenizer = ByteTokenizer()
    scheduler = Scheduler(
        n_slots=n_slots, max_len=max_len, prefill_chunk=prefill_chunk, max_queue=max_queue, eos_ids=tokenizer.eos_ids
    )
    return EngineLoop(scheduler, backend or FakeBackend(), tokenizer, on_finished=on_finished)
