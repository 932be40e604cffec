"""POST /v1/completions: a body to a call, events to completions' form of an answer."""

from collections.abc import Sequence

import msgspec

from engine.batch import TokenLogprobs
from scheduler.collected import CollectedChoice
from scheduler.events import ChoiceFinished, Delta, Finished
from scheduler.serve.call import Call
from scheduler.serve.http.form import AnswerForm, ids_of, logprobs_of
from scheduler.serve.service import Service, TokenIds
from scheduler.serve.wire.completions import Completion, CompletionChoice, CompletionRequest
from scheduler.serve.wire.decode import decode
from scheduler.serve.wire.generation import Answer
from scheduler.serve.wire.logprobs import CompletionLog, CompletionLogprobs, PromptLogprobs, joined, prompt_logprobs
from scheduler.serve.wire.prompt import Prompt, check_num_choices, prompts_of
from scheduler.serve.wire.sampling import check_num_scored

_DECODER = msgspec.json.Decoder(CompletionRequest)


def completion_form(service: Service, body: bytes) -> AnswerForm:
    """The form in which the call in `body` is to be answered. In the pool.

    Raises `ApiError` or `ParamError` for whatever cannot be answered.
    """
    fields = decode(body, _DECODER)
    fields.check()
    model = service.model_name(fields.model)
    scored, scored_field = fields.prompt_logprobs, "prompt_logprobs"
    if scored is None and fields.echo:
        scored, scored_field = fields.logprobs, "logprobs"
    params = fields.sampling_params(
        logprobs=fields.logprobs,
        prompt_logprobs=scored,
        vocab_size=service.tokenizer.vocab_size,
        encode=service.encode_plain,
    )
    given = prompts_of(fields.prompt)
    check_num_choices(len(given), fields.num_choices)
    limited = fields.truncate_prompt_tokens is None
    encoded = [_ids(service, prompt, limited=limited) for prompt in given]
    prompts = [service.check_prompt(fields, ids, param="prompt") for ids in encoded]
    check_num_scored(sum(map(len, prompts)), params, told=fields.num_choices, field=scored_field)
    call = Call.of(fields, operation="text_completion", prefix="cmpl", model=model, prompts=prompts, params=params)
    echoes = None
    if fields.echo:
        echoes = [
            prompt if isinstance(prompt, str) and kept == ids else service.tokenizer.decode(kept, skip_special=False)
            for prompt, ids, kept in zip(given, encoded, prompts, strict=True)
        ]
    return CompletionForm(call, service, echoes, wants_prompt_logprobs=fields.prompt_logprobs is not None)


def _ids(service: Service, prompt: Prompt, *, limited: bool) -> TokenIds:
    return service.ids_of_text(prompt, limited=limited) if isinstance(prompt, str) else tuple(prompt)


class CompletionForm(AnswerForm):
    """OpenAI's completion; with `echoes`, each choice begins with its prompt's text, and its log-probabilities."""

    def __init__(
        self, call: Call, service: Service, echoes: Sequence[str] | None, *, wants_prompt_logprobs: bool
    ) -> None:
        super().__init__(call, service)
        self._echoes = echoes
        self._wants_prompt_logprobs = wants_prompt_logprobs
        self._logs: dict[int, CompletionLog] = {}
        self._prompt_logs: dict[int, CompletionLogprobs] = {}
        """By prompt: its choices share one."""
        self._prompt_forms: dict[int, PromptLogprobs] = {}

    def _open(self, position: int, index: int) -> list[Answer]:
        if self._echoes is None and not self.call.return_token_ids and not self._wants_prompt_logprobs:
            return []
        choice = CompletionChoice(index=index, text=self._echo(position))
        scored = self._scored.get(position)
        if self._echoes is not None and self._wants_logprobs(position) and scored is not None:
            choice.logprobs = self._prompt_log(position, scored)
        self._tell_of_prompt(choice, position, scored)
        return [Completion(**self.common, choices=[choice])]

    def _tell_of_prompt(
        self, choice: CompletionChoice, position: int, scored: Sequence[TokenLogprobs | None] | None
    ) -> None:
        """Add what is told once of each choice."""
        if self.call.return_token_ids:
            choice.prompt_token_ids = self._request(position).prompt_ids
        if self._wants_prompt_logprobs and scored is not None:
            if position not in self._prompt_forms:
                self._prompt_forms[position] = prompt_logprobs(scored, self.service.tokenizer.token_bytes)
            choice.prompt_logprobs = self._prompt_forms[position]

    def _progress(self, position: int) -> Answer:
        return Completion(**self.common, choices=[CompletionChoice(index=self.call.index(position, 0), text="")])

    def _delta(self, position: int, delta: Delta) -> Answer:
        index = self.call.index(position, delta.index)
        choice = CompletionChoice(index=index, text=delta.text)
        if self._wants_logprobs(position):
            choice.logprobs = self._log(position, index).of(ids_of(delta.tokens), logprobs_of(delta.tokens))
        if self.call.return_token_ids:
            choice.token_ids = ids_of(delta.tokens)
        return Completion(**self.common, choices=[choice])

    def _end(self, position: int, end: ChoiceFinished) -> Answer:
        index = self.call.index(position, end.index)
        choice = CompletionChoice(index=index, text="", **self._end_fields(position, end))
        return Completion(**self.common, choices=[choice])

    def _empty_chunk(self) -> Answer:
        return Completion(**self.common, choices=[])

    def _whole(self, choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> Answer:
        answer = Completion(**self.common, choices=[])
        for index, so_far in enumerate(choices):
            position = index // self._request(0).n
            answer.choices.append(self._choice(position, index, so_far, finished[position]))
        return answer

    def _choice(self, position: int, index: int, so_far: CollectedChoice, finished: Finished) -> CompletionChoice:
        assert so_far.end is not None
        end = self._end_fields(position, so_far.end)
        choice = CompletionChoice(index=index, text=self._echo(position) + so_far.text, **end)
        if self._wants_logprobs(position):
            ids, logprobs = ids_of(so_far.tokens), logprobs_of(so_far.tokens)
            choice.logprobs = self._log(position, index).of(ids, logprobs)
            if self._echoes is not None and finished.prompt_logprobs is not None:
                choice.logprobs = joined(self._prompt_log(position, finished.prompt_logprobs), choice.logprobs)
        if self.call.return_token_ids:
            choice.token_ids = ids_of(so_far.tokens)
        self._tell_of_prompt(choice, position, finished.prompt_logprobs)
        return choice

    def _prompt_log(self, position: int, scored: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The entries of the prompt's tokens, as far as they have been scored."""
        if position not in self._prompt_logs:
            log = CompletionLog(self.service.tokenizer.token_bytes)
            self._prompt_logs[position] = log.of(self._request(position).prompt_ids[: len(scored)], scored)
        return self._prompt_logs[position]

    def _echo(self, position: int) -> str:
        return "" if self._echoes is None else self._echoes[position]

    def _log(self, position: int, index: int) -> CompletionLog:
        """The log of one choice, which goes on where the last chunk's ended."""
        if index not in self._logs:
            tokenizer = self.service.tokenizer
            hidden = tokenizer.special_ids if self._request(position).params.skip_special_tokens else frozenset()
            self._logs[index] = CompletionLog(tokenizer.token_bytes, hidden, offset=len(self._echo(position)))
        return self._logs[index]
