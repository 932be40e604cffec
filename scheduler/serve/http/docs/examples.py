"""One call to each path and its answer, as the default model gave it."""

from dataclasses import dataclass
from typing import Any

_MODEL = "smollm2-135m"
_FINGERPRINT = "fp_bd1ddc6082783130"


@dataclass(frozen=True, slots=True)
class Example:
    """The JSON of a request's body, None where there is none, and that of the answer."""

    answered: Any
    asked: Any = None


EXAMPLES = {
    "/v1/chat/completions": Example(
        asked={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
        answered={
            "id": "chatcmpl-f34cd111a4d24ac3888437f3c5fae835",
            "object": "chat.completion",
            "created": 1796007732,
            "model": _MODEL,
            "system_fingerprint": _FINGERPRINT,
            "usage": {
                "prompt_tokens": 31,
                "completion_tokens": 4,
                "total_tokens": 35,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "timings": {
                "queue_ms": 0.0,
                "prompt_n": 31,
                "prompt_ms": 61.67,
                "prompt_per_second": 502.676,
                "predicted_n": 4,
                "predicted_ms": 47.886,
                "predicted_per_second": 83.532,
            },
            "choices": [
                {
                    "finish_reason": "length",
                    "stop_reason": None,
                    "seed": 5096222673363076,
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello! How can", "refusal": None},
                    "logprobs": None,
                }
            ],
        },
    ),
    "/v1/completions": Example(
        asked={"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        answered={
            "id": "cmpl-9bf6d4cf74974b7391dd5155b8e1f153",
            "object": "text_completion",
            "created": 1796007732,
            "model": _MODEL,
            "system_fingerprint": _FINGERPRINT,
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 8,
                "total_tokens": 13,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
            "timings": {
                "queue_ms": 0.0,
                "prompt_n": 5,
                "prompt_ms": 14.058,
                "prompt_per_second": 355.659,
                "predicted_n": 8,
                "predicted_ms": 129.496,
                "predicted_per_second": 61.778,
            },
            "choices": [
                {
                    "finish_reason": "length",
                    "stop_reason": None,
                    "seed": 6304568578116619,
                    "index": 0,
                    "text": " Paris.\n\nThe United States has",
                    "logprobs": None,
                }
            ],
        },
    ),
    "/v1/models": Example(
        answered={
            "object": "list",
            "data": [
                {
                    "id": _MODEL,
                    "object": "model",
                    "created": 1796007723,
                    "owned_by": "lockstep",
                    "max_model_len": 4096,
                }
            ],
        }
    ),
    "/v1/models/{name}": Example(
        answered={
            "id": _MODEL,
            "object": "model",
            "created": 1796007723,
            "owned_by": "lockstep",
            "max_model_len": 4096,
        }
    ),
    "/tokenize": Example(
        asked={"prompt": "The capital of France is", "return_token_strs": True},
        answered={
            "tokens": [504, 3575, 282, 4649, 314],
            "count": 5,
            "max_model_len": 4096,
            "token_strs": ["The", " capital", " of", " France", " is"],
        },
    ),
    "/detokenize": Example(asked={"tokens": [56, 89]}, answered={"prompt": "Hi"}),
    "/health": Example(answered={"status": "ok"}),
    "/ping": Example(answered={"status": "ok"}),
    "/slots": Example(
        answered=[
            {
                "id": 0,
                "is_processing": False,
                "state": "idle",
                "request_id": None,
                "choice": None,
                "num_prompt_tokens": 0,
                "num_computed_tokens": 0,
                "num_output_tokens": 0,
            }
        ]
    ),
    "/version": Example(answered={"version": "0.1.0"}),
}
