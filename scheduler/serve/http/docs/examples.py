"""One call to each path and its answer, as the default model gave it."""

from dataclasses import dataclass
from typing import Any

_MODEL = "smollm2-135m"
_FINGERPRINT = "fp_bd1ddc6082783130"
_LLAMA_SAMPLING = {
    "seed": -1,
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "max_tokens": -1,
    "n_predict": -1,
    "n_probs": 0,
    "ignore_eos": False,
}


@dataclass(frozen=True, slots=True)
class Example:
    """The JSON of a request's body, None where there is none, and that of the answer; `place` fills the path."""

    answered: Any
    asked: Any = None
    place: str | None = None


EXAMPLES = {
    "POST /v1/chat/completions": Example(
        asked={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0},
        answered={
            "id": "chatcmpl-7f490c9378174836ac6e6e6a37353a9e",
            "object": "chat.completion",
            "created": 1796008590,
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
                "cache_n": 0,
                "prompt_n": 31,
                "prompt_ms": 82.905,
                "prompt_per_token_ms": 2.674,
                "prompt_per_second": 373.92,
                "predicted_n": 4,
                "predicted_ms": 64.085,
                "predicted_per_token_ms": 16.021,
                "predicted_per_second": 62.417,
            },
            "metrics": {
                "queue_time_ms": 0.0,
                "time_to_first_token_ms": 82.905,
                "generation_time_ms": 64.085,
                "e2e_time_ms": 146.99,
                "mean_itl_ms": 21.362,
                "tokens_per_second": 62.417,
            },
            "chat_template_now": "2026-11-30T03:16:30Z",
            "choices": [
                {
                    "finish_reason": "length",
                    "stop_reason": None,
                    "seed": 1093115916024263,
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello! How can", "refusal": None},
                    "logprobs": None,
                }
            ],
        },
    ),
    "POST /v1/completions": Example(
        asked={"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
        answered={
            "id": "cmpl-bfbbc36af78f4aa6902d453bde1e8ab8",
            "object": "text_completion",
            "created": 1796008591,
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
                "cache_n": 0,
                "prompt_n": 5,
                "prompt_ms": 24.401,
                "prompt_per_token_ms": 4.88,
                "prompt_per_second": 204.913,
                "predicted_n": 8,
                "predicted_ms": 108.238,
                "predicted_per_token_ms": 13.53,
                "predicted_per_second": 73.911,
            },
            "metrics": {
                "queue_time_ms": 0.0,
                "time_to_first_token_ms": 24.401,
                "generation_time_ms": 108.238,
                "e2e_time_ms": 132.639,
                "mean_itl_ms": 15.463,
                "tokens_per_second": 73.911,
            },
            "choices": [
                {
                    "finish_reason": "length",
                    "stop_reason": None,
                    "seed": 6089145157151065,
                    "index": 0,
                    "text": " Paris.\n\nThe United States has",
                    "logprobs": None,
                }
            ],
        },
    ),
    "GET /v1/models": Example(
        answered={
            "object": "list",
            "data": [
                {"id": _MODEL, "object": "model", "created": 1796008590, "owned_by": "lockstep", "max_model_len": 4096}
            ],
        }
    ),
    "GET /v1/models/{name}": Example(
        place=_MODEL,
        answered={
            "id": _MODEL,
            "object": "model",
            "created": 1796008590,
            "owned_by": "lockstep",
            "max_model_len": 4096,
        },
    ),
    "POST /v1/chat/completions/render": Example(
        asked={"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}], "max_tokens": 4},
        answered={
            "request_id": "chatcmpl-2165a5c657c845ebbe0e15c9be088050",
            "model": _MODEL,
            "token_ids": [1, 9690, 198, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198],
            "max_tokens": 4,
            "priority": 0,
            "chat_template_now": "2026-11-30T03:16:30Z",
        },
    ),
    "POST /completion": Example(
        asked={"prompt": "The capital of France is", "n_predict": 8, "temperature": 0},
        answered={
            "index": 0,
            "content": " Paris.\n\nThe United States has",
            "tokens": [],
            "stop": True,
            "tokens_predicted": 8,
            "tokens_evaluated": 5,
            "timings": {
                "queue_ms": 0.0,
                "cache_n": 0,
                "prompt_n": 5,
                "prompt_ms": 12.646,
                "prompt_per_token_ms": 2.529,
                "prompt_per_second": 395.391,
                "predicted_n": 8,
                "predicted_ms": 179.78,
                "predicted_per_token_ms": 22.473,
                "predicted_per_second": 44.499,
            },
            "id": "cmpl-8264dd51350f4df9a957ab6518310448",
            "model": _MODEL,
            "system_fingerprint": _FINGERPRINT,
            "generation_settings": {
                **_LLAMA_SAMPLING,
                "seed": 8360771769179199,
                "temperature": 0.0,
                "max_tokens": 8,
                "n_predict": 8,
                "n_ctx": 4096,
                "stop": [],
                "stream": False,
            },
            "prompt": "The capital of France is",
            "has_new_line": True,
            "truncated": False,
            "stop_type": "limit",
            "stopping_word": "",
            "tokens_cached": 0,
            "metrics": {
                "queue_time_ms": 0.0,
                "time_to_first_token_ms": 12.646,
                "generation_time_ms": 179.78,
                "e2e_time_ms": 192.426,
                "mean_itl_ms": 25.683,
                "tokens_per_second": 44.499,
            },
        },
    ),
    "GET /v1/requests/{id}": Example(
        place="story",
        answered={
            "id": "story",
            "object": "request",
            "state": "decoding",
            "position": None,
            "waits_for": None,
            "prompt_tokens": 34,
            "computed_prompt_tokens": 34,
            "completion_tokens": 19,
            "choices": 1,
            "finished_choices": 0,
        },
    ),
    "DELETE /v1/requests/{id}": Example(
        place="story", answered={"id": "story", "object": "request.deleted", "aborted": True}
    ),
    "POST /tokenize": Example(
        asked={"prompt": "The capital of France is", "return_token_strs": True},
        answered={
            "tokens": [504, 3575, 282, 4649, 314],
            "count": 5,
            "max_model_len": 4096,
            "token_strs": ["The", " capital", " of", " France", " is"],
        },
    ),
    "POST /detokenize": Example(asked={"tokens": [56, 89]}, answered={"prompt": "Hi", "content": "Hi"}),
    "POST /apply-template": Example(
        asked={"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]},
        answered={"prompt": "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"},
    ),
    "GET /health": Example(answered={"status": "ok"}),
    "GET /ping": Example(answered={"status": "ok"}),
    "POST /ping": Example(answered={"status": "ok"}),
    "GET /load": Example(answered={"server_load": 0}),
    "GET /get_load": Example(answered={"load": 0}),
    "GET /slots": Example(
        answered=[
            {
                "id": 0,
                "is_processing": True,
                "state": "decoding",
                "request_id": "chatcmpl-story",
                "choice": 0,
                "num_prompt_tokens": 34,
                "num_computed_tokens": 40,
                "num_output_tokens": 7,
                "id_task": 1,
                "n_ctx": 4096,
                "speculative": False,
                "n_prompt_tokens": 34,
                "n_prompt_tokens_processed": 34,
                "n_prompt_tokens_cache": 0,
                "params": {
                    "seed": 1093115916024263,
                    "temperature": 0.0,
                    "top_k": 0,
                    "top_p": 1.0,
                    "min_p": 0.0,
                    "typical_p": 1.0,
                    "repeat_last_n": -1,
                    "repeat_penalty": 1.0,
                    "presence_penalty": 0.0,
                    "frequency_penalty": 0.0,
                    "max_tokens": -1,
                    "n_predict": -1,
                    "n_probs": 0,
                    "ignore_eos": False,
                },
                "next_token": [{"has_next_token": True, "n_remain": 4055, "n_decoded": 7}],
            }
        ]
    ),
    "GET /props": Example(
        answered={
            "default_generation_settings": {
                "params": _LLAMA_SAMPLING,
                "n_ctx": 4096,
            },
            "total_slots": 16,
            "model_alias": _MODEL,
            "model_path": "SmolLM2-135M-Instruct.Q4_1.gguf",
            "modalities": {"vision": False, "video": False, "audio": False},
            "chat_template": "{% for message in messages %}…{% endfor %}",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "build_info": "lockstep 0.1.0",
            "system_fingerprint": _FINGERPRINT,
        }
    ),
    "GET /version": Example(answered={"version": "0.1.0"}),
}
