"""POST /v1/chat/completions: a body to a call, events to chat's form of an answer."""

from collections.abc import Sequence

import msgspec

from engine.batch import TokenLogprobs
from scheduler.collected import CollectedChoice
from scheduler.events import ChoiceFinished, Delta, Finished, Token
from scheduler.serve.call import Call
from scheduler.serve.http.form import AnswerForm, ids_of, logprobs_of
from scheduler.serve.service import Service, time_for
from scheduler.serve.wire.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatRequest,
)
from scheduler.serve.wire.decode import decode
from scheduler.serve.wire.generation import Answer
from scheduler.serve.wire.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from scheduler.serve.wire.sampling import check_num_scored

_DECODER = msgspec.json.Decoder(ChatRequest)


def chat_form(service: Service, body: bytes) -> AnswerForm:
    """The form in which the call in `body` is to be answered. In the pool.

    Raises `ApiError`, `ParamError` or `TemplateError` for whatever cannot be answered.
    """
    fields = decode(body, _DECODER)
    fields.check()
    model = service.model_name(fields.model)
    params = fields.sampling_params(
        logprobs=fields.num_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        vocab_size=service.tokenizer.vocab_size,
        encode=service.encode_plain,
    )
    now = time_for(fields.chat)
    ids = service.ids_of_chat(fields.chat, now=now, limited=fields.truncate_prompt_tokens is None)
    prompt = service.check_prompt(fields, ids, param="messages")
    check_num_scored(len(prompt), params)
    call = Call.of(
        fields,
        operation="chat",
        prefix="chatcmpl",
        model=model,
        prompts=[prompt],
        params=params,
        chat_template_now=now,
    )
    return ChatForm(call, service)


class ChatForm(AnswerForm):
    """OpenAI's chat completion: one role delta and one finish reason per choice."""

    def _open(self, position: int, index: int) -> list[Answer]:
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        chunk = ChatChunk(**self.common, choices=[choice])
        if len(self._begun) == 1:
            self._tell_of_prompt(chunk, self._scored.get(position))
        return [chunk]

    def _tell_of_prompt(self, answer: Answer, scored: Sequence[TokenLogprobs | None] | None) -> None:
        """Add what is told once, whatever `n`."""
        assert self.call.chat_template_now is not None
        answer.chat_template_now = self.call.chat_template_now
        if self.call.return_token_ids:
            answer.prompt_token_ids = self._request(0).prompt_ids
        if scored is not None:
            answer.prompt_logprobs = prompt_logprobs(scored, self.service.tokenizer.token_bytes)

    def _progress(self, position: int) -> Answer:
        return ChatChunk(
            **self.common, choices=[ChatChunkChoice(index=self.call.index(position, 0), delta=ChatDelta())]
        )

    def _delta(self, position: int, delta: Delta) -> Answer:
        choice = ChatChunkChoice(
            index=self.call.index(position, delta.index),
            delta=ChatDelta(content=delta.text),
            logprobs=self._logprobs(position, delta.tokens),
        )
        if self.call.return_token_ids:
            choice.token_ids = ids_of(delta.tokens)
        return ChatChunk(**self.common, choices=[choice])

    def _end(self, position: int, end: ChoiceFinished) -> Answer:
        index = self.call.index(position, end.index)
        choice = ChatChunkChoice(index=index, delta=ChatDelta(), **self._end_fields(position, end))
        return ChatChunk(**self.common, choices=[choice])

    def _empty_chunk(self) -> Answer:
        return ChatChunk(**self.common, choices=[])

    def _whole(self, choices: Sequence[CollectedChoice], finished: Sequence[Finished]) -> Answer:
        answer = ChatCompletion(**self.common, choices=[])
        for index, so_far in enumerate(choices):
            assert so_far.end is not None
            choice = ChatChoice(
                index=index,
                message=ChatMessage(content=so_far.text),
                logprobs=self._logprobs(0, so_far.tokens),
                **self._end_fields(0, so_far.end),
            )
            if self.call.return_token_ids:
                choice.token_ids = ids_of(so_far.tokens)
            answer.choices.append(choice)
        self._tell_of_prompt(answer, finished[0].prompt_logprobs)
        return answer

    def _logprobs(self, position: int, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self._wants_logprobs(position):
            return None
        return chat_logprobs(logprobs_of(tokens), self.service.tokenizer.token_bytes)
