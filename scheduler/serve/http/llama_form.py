"""llama-server's form of an answer: one choice, no `[DONE]`."""

from collections.abc import Sequence
from typing import Any, Literal

from engine.batch import TokenLogprob, TokenLogprobs
from scheduler.collected import CollectedChoice
from scheduler.events import ChoiceFinished, Delta, Finished, PromptProgress, PromptScored, Started, Token, Usage
from scheduler.request import FinishReason
from scheduler.serve.call import Call, summed
from scheduler.serve.http.form import News, ids_of, logprobs_of
from scheduler.serve.http.stream_timings import TimingsSoFar
from scheduler.serve.service import Service
from scheduler.serve.wire.llama import LlamaAnswer, LlamaProb, LlamaSettings, LlamaTokenProbs
from scheduler.serve.wire.logprobs import finite, token_text
from scheduler.serve.wire.usage import WireMetrics, WireProgress, WireTimings


class LlamaForm:
    """How /completion answers one call of one request. It remembers what has been sent."""

    has_done = False

    def __init__(self, call: Call, service: Service, *, prompt: str) -> None:
        self.call = call
        self._service = service
        self._prompt = prompt
        (self._request,) = call.requests
        self._so_far = TimingsSoFar()
        self._sent = CollectedChoice()

    def news(self, position: int, event: News) -> list[LlamaAnswer]:  # noqa: ARG002 - there is one prompt
        """The chunks that say `event`."""
        match event:
            case Started():
                self._so_far.on_started(event.queue_s)
            case PromptProgress():
                chunk = self._chunk(Delta(event.request_id, 0, "", ()))
                chunk.prompt_progress = WireProgress.of(event)
                return [chunk]
            case Delta():
                self._so_far.on_tokens()
                self._sent.add(event)
                return [self._chunk(event)]
            case PromptScored():
                pass
        return []

    def ends(self, position: int, end: ChoiceFinished, finished: Sequence[Finished] = ()) -> list[LlamaAnswer]:  # noqa: ARG002 - as above
        """The last chunk, which says all but the text and the tokens."""
        self._sent.end = end
        answer = self._answer(self._sent, finished)
        answer.content = ""
        return [answer]

    def whole(self, choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> LlamaAnswer:
        """The answer in one piece."""
        (choice,) = choices
        answer = self._answer(choice, finished)
        if self.call.return_token_ids:
            answer.tokens = ids_of(choice.tokens)
        if self._request.params.logprobs is not None:
            answer.completion_probabilities = self._probs(choice.tokens)
        return answer

    def _chunk(self, delta: Delta) -> LlamaAnswer:
        chunk = LlamaAnswer(
            content=delta.text,
            tokens=ids_of(delta.tokens),
            stop=False,
            tokens_predicted=len(self._sent.tokens),
            tokens_evaluated=len(self._request.prompt_ids),
        )
        if self.call.timings_per_token:
            chunk.timings = self._so_far.wire(Usage(len(self._request.prompt_ids), len(self._sent.tokens)))
        if delta.tokens and self._request.params.logprobs is not None:
            chunk.completion_probabilities = self._probs(delta.tokens)
        return chunk

    def _answer(self, choice: CollectedChoice, finished: Sequence[Finished]) -> LlamaAnswer:
        assert choice.end is not None
        usage, timings = summed(finished)
        stop_type, stopping_word = self._stop(choice.end)
        max_tokens = self._request.params.max_tokens
        is_full = len(self._request.prompt_ids) + choice.end.num_tokens >= self._service.model.max_len
        return LlamaAnswer(
            id=self.call.id,
            model=self.call.model,
            system_fingerprint=self._service.model.fingerprint,
            content=choice.text,
            tokens=[],
            tokens_cached=0,
            stop=True,
            tokens_predicted=usage.completion_tokens,
            tokens_evaluated=usage.prompt_tokens,
            generation_settings=self._settings(),
            prompt=self._prompt,
            has_new_line="\n" in choice.text,
            truncated=stop_type == "limit" and is_full and choice.end.num_tokens != max_tokens,
            stop_type=stop_type,
            stopping_word=stopping_word,
            timings=WireTimings.of(timings, usage),
            metrics=WireMetrics.of(timings, usage, 1),
        )

    def _stop(self, end: ChoiceFinished) -> tuple[Literal["none", "eos", "limit", "word"], str]:
        """llama-server's word for why the choice ended, and the text that ended it."""
        match end.reason, end.stop_reason:
            case FinishReason.STOP, None:
                return "eos", ""
            case FinishReason.STOP, str(word):
                return "word", word
            case FinishReason.STOP, int(token_id):
                return "word", token_text(self._service.tokenizer.token_bytes(token_id))
            case FinishReason.LENGTH, _:
                return "limit", ""
        return "none", ""

    def _settings(self) -> LlamaSettings:
        n_ctx = self._service.model.max_len
        return LlamaSettings.of(self._request.params, n_ctx=n_ctx, stream=self.call.stream)

    def _probs(self, tokens: Sequence[Token]) -> list[LlamaTokenProbs]:
        return [
            LlamaTokenProbs(**self._prob(chosen), top_logprobs=[LlamaProb(**self._prob(rival)) for rival in chosen.top])
            for chosen in logprobs_of(tokens)
        ]

    def _prob(self, token: TokenLogprob | TokenLogprobs) -> dict[str, Any]:
        data = self._service.tokenizer.token_bytes(token.token_id)
        return {
            "id": token.token_id,
            "token": token_text(data),
            "bytes": list(data),
            "logprob": finite(token.logprob),
        }
