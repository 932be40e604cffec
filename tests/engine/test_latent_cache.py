import numpy as np
import pytest

from engine.errors import CacheError
from engine.latent_cache import LatentCache

L, D_MODEL, H, D_NOPE, D_ROPE, D_V, R = 2, 24, 3, 6, 4, 5, 8


class TinyMLA:
    """Multi-head latent attention, two layers (DeepSeek-V2, arXiv 2405.04434, section 2.1): enough to use the cache."""

    def __init__(self):
        rng = np.random.default_rng(0)

        def matrix(*shape):
            return (rng.standard_normal((L, *shape)) / np.sqrt(shape[-2])).astype(np.float32)

        self.down, self.rope_key = matrix(D_MODEL, R), matrix(D_MODEL, D_ROPE)
        self.query = matrix(D_MODEL, H * (D_NOPE + D_ROPE))
        self.up_key, self.up_value = matrix(R, H * D_NOPE), matrix(R, H * D_V)
        self.out = matrix(H * D_V, D_MODEL)

    def forward(self, x, cache):
        """`x` [B, T, D_MODEL], the new positions; returns their outputs."""
        B, T, _ = x.shape
        positions, mask = cache.positions(T), cache.mask(T)
        for layer in range(L):
            latent, k_rope = cache.update(layer, x @ self.down[layer], rotate(x @ self.rope_key[layer], positions))
            latent, k_rope = latent.astype(np.float32), k_rope.astype(np.float32)
            q = (x @ self.query[layer]).reshape(B, T, H, D_NOPE + D_ROPE).transpose(0, 2, 1, 3)
            q_nope, q_rope = q[..., :D_NOPE], rotate(q[..., D_NOPE:], positions)
            k = (latent @ self.up_key[layer]).reshape(B, -1, H, D_NOPE).transpose(0, 2, 1, 3)
            v = (latent @ self.up_value[layer]).reshape(B, -1, H, D_V).transpose(0, 2, 1, 3)
            scores = (q_nope @ k.transpose(0, 1, 3, 2) + q_rope @ k_rope[:, None].transpose(0, 1, 3, 2)) / np.sqrt(
                np.float32(D_NOPE + D_ROPE)
            )
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            x = x + (weights @ v).transpose(0, 2, 1, 3).reshape(B, T, H * D_V) @ self.out[layer]
        return x


def rotate(x, positions):
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, D_ROPE, 2) / D_ROPE)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = np.stack([even * np.cos(angles) - odd * np.sin(angles), even * np.sin(angles) + odd * np.cos(angles)], -1)
    return turned.reshape(x.shape).astype(np.float32)


def new_cache(**kwargs):
    return LatentCache(L, R, D_ROPE, 16, batch=2, **kwargs)


def inputs(t):
    return np.random.default_rng(1).standard_normal((2, t, D_MODEL)).astype(np.float32)


def test_cached_equals_recomputed_through_latent_attention():
    model, x = TinyMLA(), inputs(10)
    whole = model.forward(x, new_cache())
    cache = new_cache()
    pieces = [model.forward(x[:, a:b], cache) for a, b in [(0, 4), (4, 5), (5, 6), (6, 10)]]
    # The same float32 sums in another order.
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), whole, atol=1e-5)


def test_rolling_back_equals_never_having_gone_there():
    model, x = TinyMLA(), inputs(10)
    straight, detour = new_cache(), new_cache()
    model.forward(x[:, :4], straight)
    model.forward(x[:, :4], detour)
    model.forward(-x[:, 4:9], detour)
    detour.truncate(4)
    np.testing.assert_array_equal(model.forward(x[:, 4:7], detour), model.forward(x[:, 4:7], straight))


def test_float16_latents_keep_the_outputs_close():
    model, x = TinyMLA(), inputs(10)
    exact, rounded = model.forward(x, new_cache()), model.forward(x, new_cache(dtype="float16"))
    assert np.abs(exact - rounded).max() < 2e-2
    assert not np.array_equal(exact, rounded)


def test_size_is_that_of_one_latent_and_one_rotary_key_a_position():
    assert new_cache().nbytes() == L * 2 * 16 * (R + D_ROPE) * 4
    assert new_cache(dtype="float16").nbytes() == L * 2 * 16 * (R + D_ROPE) * 2


@pytest.mark.parametrize(
    ("latent", "k_rope"),
    [
        ((2, 17, R), (2, 17, D_ROPE)),
        ((2, 1, R), (2, 2, D_ROPE)),
        ((1, 1, R), (1, 1, D_ROPE)),
        ((2, 1, R + 1), (2, 1, D_ROPE)),
        ((2, 1, R), (2, 1, 1, D_ROPE)),
        ((2, 0, R), (2, 0, D_ROPE)),
    ],
)
def test_a_wrong_shape_or_an_overflow_is_refused_and_changes_nothing(latent, k_rope):
    cache = new_cache()
    stored, _ = cache.update(0, np.ones((2, 3, R)), np.ones((2, 3, D_ROPE)))
    with pytest.raises(CacheError):
        cache.update(0, np.zeros(latent), np.zeros(k_rope))
    assert cache.seq_len(0) == 3
    assert (stored == 1).all()


def test_inputs_are_copied():
    cache = new_cache()
    latent = np.ones((2, 3, R))
    stored, _ = cache.update(0, latent, np.ones((2, 3, D_ROPE)))
    latent[:] = 7
    assert (stored == 1).all()
