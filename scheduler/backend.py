"""The backend that serves: a model, its cache, and the sampler."""

from engine.batch import Result, RowError, Sampled, Scored
from engine.errors import LockstepError
from engine.kernels.protocol import Cache, FloatArray
from engine.model import Model
from engine.sampler import is_the_largest, largest, request_rng, sample, token_logprobs
from scheduler.batch import Batch, Work


class ModelBackend:
    """One forward over all chunks, then a token for each: of greedy rows in one pass, of others one by one."""

    def __init__(self, model: Model, cache: Cache) -> None:
        self._model = model
        self._cache = cache
        self._eos_ids = model.tokenizer.eos_ids

    def run(self, batch: Batch) -> list[Result]:
        """One result for each of `batch.work`, in order; raises what the model raises."""
        for copy in batch.copies:
            self._cache.copy(copy.source, copy.target, copy.length)
        logits = self._model.forward(batch.chunks, self._cache)
        greedy = [_is_greedy(work) for work in batch.work]
        token_ids = largest(logits).tolist() if any(greedy) else []
        results: list[Result] = []
        row = 0
        for work, is_greedy in zip(batch.work, greedy, strict=True):
            end = row + work.chunk.n_logits
            if is_greedy and token_ids[end - 1] >= 0:
                results.append(Sampled(token_ids[end - 1]))
            else:
                results.append(self._guarded(work, logits[row:end]))
            row = end
        return results

    def _guarded(self, work: Work, logits: FloatArray) -> Result:
        try:
            return self._result(work, logits)
        except LockstepError as refusal:
            return RowError(str(refusal), refusal)
        except Exception as fault:  # noqa: BLE001 - one request's failure must not reach the others of the batch
            return RowError("the server failed to choose a token", fault)

    def _result(self, work: Work, logits: FloatArray) -> Result:
        sequence, request = work.sequence, work.sequence.request
        params = request.params
        if work.samples:
            rng = request_rng(params.seed or 0, sequence.index)
            return sample(logits[-1], params, sequence.output_ids, rng, request.prompt_ids, eos_ids=self._eos_ids)
        if len(logits) and params.prompt_logprobs is not None:
            first = work.chunk.start + 1
            followers = request.prompt_ids[first : first + len(logits)]
            return Scored(
                tuple(
                    token_logprobs(row, token_id, params.prompt_logprobs)
                    for row, token_id in zip(logits, followers, strict=True)
                )
            )
        return None


def _is_greedy(work: Work) -> bool:
    return work.samples and is_the_largest(work.sequence.request.params, len(work.sequence.output_ids))
