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
            "id": "chatcmpl-b7bee352e1934b39aa74c8ee7dce6761",
            "object": "chat.completion",
            "created": 1796009029,
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
                "prompt_ms": 35.229,
                "prompt_per_second": 879.957,
                "predicted_n": 4,
                "predicted_ms": 26.479,
                "predicted_per_second": 151.061,
            },
            "metrics": {
                "queue_time_ms": 0.0,
                "time_to_first_token_ms": 35.229,
                "generation_time_ms": 26.479,
                "e2e_time_ms": 61.708,
                "mean_itl_ms": 8.826,
                "tokens_per_second": 151.061,
            },
            "chat_template_now": "2026-11-30T03:23:49Z",
            "choices": [
                {
                    "finish_reason": "length",
                    "stop_reason": None,
                    "seed": 8483488094698081,
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
            "id": "cmpl-b19d99f723404393852b76301d1fed8a",
            "object": "text_completion",
            "created": 1796009029,
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
                "prompt_ms": 12.736,
                "prompt_per_second": 392.582,
                "predicted_n": 8,
                "predicted_ms": 80.977,
                "predicted_per_second": 98.794,
            },
            "metrics": {
                "queue_time_ms": 0.0,
                "time_to_first_token_ms": 12.736,
                "generation_time_ms": 80.977,
                "e2e_time_ms": 93.713,
                "mean_itl_ms": 11.568,
                "tokens_per_second": 98.794,
            },
            "choices": [
                {
                    "finish_reason": "length",
                    "stop_reason": None,
                    "seed": 26764269212036,
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
    "/detokenize": Example(asked={"tokens": [56, 89]}, answered={"prompt": "Hi", "content": "Hi"}),
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
    "/v1/chat/completions/render": Example(
        asked={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
        answered={
            "request_id": "chatcmpl-60415899def34badb70411cdb5d5637c",
            "model": _MODEL,
            "token_ids": [
                1,
                9690,
                198,
                2683,
                359,
                253,
                5356,
                5646,
                11173,
                3365,
                3511,
                308,
                34519,
                28,
                7018,
                411,
                407,
                19712,
                8182,
                2,
                198,
                1,
                4093,
                198,
                26843,
                2,
                198,
                1,
                520,
                9531,
                198,
            ],
            "max_tokens": 4,
            "priority": 0,
            "chat_template_now": "2026-11-30T03:23:49+00:00",
        },
    ),
    "/completion": Example(
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
                "prompt_n": 5,
                "prompt_ms": 12.276,
                "prompt_per_second": 407.309,
                "predicted_n": 8,
                "predicted_ms": 77.469,
                "predicted_per_second": 103.268,
            },
            "id": "cmpl-eca48be1ef2c4c189286f63b0ed74d2c",
            "model": _MODEL,
            "system_fingerprint": _FINGERPRINT,
            "generation_settings": {
                "seed": 3172204769477501,
                "temperature": 0.0,
                "top_k": 40,
                "top_p": 0.95,
                "min_p": 0.05,
                "typical_p": 1.0,
                "repeat_last_n": 64,
                "repeat_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "n_predict": 8,
                "n_ctx": 4096,
                "n_probs": 0,
                "ignore_eos": False,
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
                "time_to_first_token_ms": 12.276,
                "generation_time_ms": 77.469,
                "e2e_time_ms": 89.745,
                "mean_itl_ms": 11.067,
                "tokens_per_second": 103.268,
            },
        },
    ),
    "/v1/requests/{id}": Example(
        answered={
            "id": "cmpl-story",
            "object": "request",
            "state": "decoding",
            "position": None,
            "waits_for": None,
            "prompt_tokens": 4,
            "computed_prompt_tokens": 4,
            "completion_tokens": 19,
            "choices": 1,
            "finished_choices": 0,
        }
    ),
    "/apply-template": Example(
        asked={"messages": [{"role": "user", "content": "Hi"}]},
        answered={
            "prompt": (
                "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Huggi"
                "ng Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            ),
        },
    ),
    "/load": Example(answered={"server_load": 0}),
    "/props": Example(
        answered={
            "default_generation_settings": {
                "params": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_last_n": 64},
                "n_ctx": 4096,
            },
            "total_slots": 16,
            "model_alias": _MODEL,
            "model_path": "SmolLM2-135M-Instruct.Q4_1.gguf",
            "modalities": {"vision": False, "audio": False},
            "chat_template": (
                "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system"
                "' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained "
                "by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
                "' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_pr"
                "ompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
            ),
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "build_info": "lockstep 0.1.0",
            "system_fingerprint": _FINGERPRINT,
        }
    ),
    "/version": Example(answered={"version": "0.1.0"}),
}
