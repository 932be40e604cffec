import pytest

from scheduler.serve.http.nearest import nearest

PATHS = ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/models", "/health", "/docs"]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/api/chat/completions", "/v1/chat/completions"),
        ("/proxy/of/mine/v1/models", "/v1/models"),
        ("/V1/Models", "/v1/models"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/healthz", "/health"),
        ("/", None),
        ("//", None),
        ("/favicon.ico", None),
        ("/v1/audio/speech", None),
        ("/v1/models" * 20, None),
    ],
)
def test_the_nearest_path_is_the_one_that_was_meant(asked, meant):
    assert nearest(asked, PATHS) == meant
