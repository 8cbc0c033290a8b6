"""The decoder against a plain numpy Llama block in float64, decoding against the full pass, and the heads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.models import heads
from real_jax.models.cache import cache_bytes, empty_cache, read_layer, write_positions, write_prefix
from real_jax.models.heads import next_token_log_probs, token_log_probs
from real_jax.models.transformer import Transformer, abstract_params, cast, initialize, rms_norm, rotate
from real_jax.spec.arch import Arch, parameter_count, weights

ARCH = Arch(
    layers=2, d_model=12, heads=4, kv_heads=2, head_dim=6, d_ff=10, vocab=11, context=64, rope_theta=100.0, norm_eps=1e-3
)  # fmt: skip
TIED = dataclasses.replace(ARCH, tied_embeddings=True)
BIASED = dataclasses.replace(ARCH, qkv_bias=True)
TOKENS = np.random.default_rng(0).integers(0, ARCH.vocab, (3, 9)).astype(np.int32)


def make_params(arch=ARCH, head="lm", seed=0):
    """Random numbers everywhere, norm scales too."""
    random = np.random.default_rng(seed)
    table = weights(arch, head)
    return {
        k: (random.normal(size=w.shape) * (w.fan_in if w.fan_in > 0 else 4) ** -0.5).astype(np.float32)
        for k, w in table.items()
    }


PARAMS = make_params()


def jitted(function, arch=ARCH, head="lm", **options):
    """`function` of (model, *arrays) as a compiled function of (params, *arrays)."""
    return jax.jit(lambda params, *args: function(Transformer(arch, head, params, **options), *args))


# An independent Llama in float64: one sequence, one head and one position at a time.


def plain_norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2) + eps) * scale


def plain_rotation(head, position, theta):
    """Pair (i, i + half) turned by position x theta^(-i / half)."""
    half = len(head) // 2
    out = np.empty_like(head)
    for i in range(half):
        angle = position * theta ** (-i / half)
        a, b = head[i], head[i + half]
        out[i] = a * np.cos(angle) - b * np.sin(angle)
        out[i + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def plain_hidden(arch, params, tokens):
    p = {k: v.astype(np.float64) for k, v in params.items()}
    x = np.stack([p["embed"][t] for t in tokens])
    for layer in range(arch.layers):
        w = {k.split("/")[1]: v[layer] for k, v in p.items() if k.startswith("blocks/")}
        normed = [plain_norm(row, w["attention_norm"], arch.norm_eps) for row in x]
        b = {name: w.get(f"{name}_bias", np.zeros((arch.heads, arch.head_dim))) for name in ("query", "key", "value")}
        attended = []
        for t in range(len(tokens)):
            out = np.zeros(arch.d_model)
            for h in range(arch.heads):
                group = h // (arch.heads // arch.kv_heads)
                q = plain_rotation(normed[t] @ w["query"][:, h] + b["query"][h], t, arch.rope_theta)
                keys = [normed[s] @ w["key"][:, group] + b["key"][group] for s in range(t + 1)]
                keys = [plain_rotation(k, s, arch.rope_theta) for s, k in enumerate(keys)]
                values = [normed[s] @ w["value"][:, group] + b["value"][group] for s in range(t + 1)]
                scores = np.asarray([q @ k for k in keys]) / np.sqrt(arch.head_dim)
                share = np.exp(scores - scores.max())
                share /= share.sum()
                out += sum(a * v for a, v in zip(share, values, strict=True)) @ w["out"][h]
            attended.append(out)
        x = x + np.stack(attended)
        normed = np.stack([plain_norm(row, w["mlp_norm"], arch.norm_eps) for row in x])
        gate = normed @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"])) @ w["down"]
    return np.stack([plain_norm(row, p["norm"], arch.norm_eps) for row in x])


@pytest.mark.parametrize("arch", [ARCH, TIED, dataclasses.replace(ARCH, kv_heads=4), dataclasses.replace(ARCH, kv_heads=1), BIASED],
                         ids=["untied", "tied", "one key head each", "one key head for all", "biases"])  # fmt: skip
def test_logits_equal_those_of_a_plain_llama(arch):
    params = make_params(arch, seed=3)
    logits = jitted(lambda model, tokens: model.logits(model(tokens)), arch)(params, TOKENS)
    head = params["embed"].T if arch.tied_embeddings else params["unembed"]
    for row, tokens in zip(logits, TOKENS, strict=True):
        wanted = plain_hidden(arch, params, tokens) @ head.astype(np.float64)
        np.testing.assert_allclose(np.asarray(row), wanted, rtol=1e-4, atol=1e-5)
    assert logits.dtype == jnp.float32


def test_scalar_head():
    params = make_params(head="scalar")
    values = jitted(lambda model, tokens: model.values(model(tokens)), head="scalar")(params, TOKENS)
    wanted = plain_hidden(ARCH, params, TOKENS[1]) @ params["scalar"].astype(np.float64)
    np.testing.assert_allclose(np.asarray(values)[1], wanted, rtol=1e-4, atol=1e-5)


def test_the_future_changes_nothing():
    """Tokens after column 4 are replaced: hidden states up to column 4 are bit for bit the same, padding or not."""
    run = jitted(lambda model, tokens: model(tokens))
    other = TOKENS.copy()
    other[:, 5:] = (other[:, 5:] + 1) % ARCH.vocab
    one, two = run(PARAMS, TOKENS), run(PARAMS, other)
    np.testing.assert_array_equal(np.asarray(one)[:, :5], np.asarray(two)[:, :5])
    assert np.abs(np.asarray(one) - np.asarray(two))[:, 5:].min(axis=-1).max() > 0


def test_decoding_equals_the_full_pass():
    """Prompts of 4, 2 and 1 tokens in 4 columns, then 5 tokens each at its row's own columns; garbage behind prompts."""
    lengths = np.asarray([4, 2, 1], np.int32)
    full = np.asarray(jitted(lambda model, tokens: model(tokens))(PARAMS, TOKENS))
    prompts = np.where(np.arange(4)[None] < lengths[:, None], TOKENS[:, :4], 7).astype(np.int32)
    prefill = jitted(lambda model, tokens: model.prefill(tokens, empty_cache(ARCH, 3, 9, jnp.float32)))
    decode = jitted(lambda model, tokens, positions, cache: model.decode(tokens, positions, cache))
    hidden, cache = prefill(PARAMS, prompts)
    rows = np.arange(3)
    np.testing.assert_allclose(np.asarray(hidden)[rows, lengths - 1], full[rows, lengths - 1], rtol=0, atol=1e-5)
    for step in range(5):
        at = lengths + np.int32(step)
        hidden, cache = decode(PARAMS, TOKENS[rows, at], at, cache)
        np.testing.assert_allclose(np.asarray(hidden), full[rows, at], rtol=0, atol=1e-5)


def test_decoding_never_reads_what_lies_behind_its_column():
    decode = jitted(lambda model, tokens, positions, cache: model.decode(tokens, positions, cache)[0])
    random = np.random.default_rng(1)
    clean = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), empty_cache(ARCH, 3, 9, jnp.float32))
    at = np.asarray([3, 0, 8], np.int32)
    behind = (np.arange(9)[None] >= at[:, None])[None, :, :, None, None]
    dirty = jax.tree.map(lambda x: np.where(behind, np.float32(1e6), x), clean)
    one, two = (decode(PARAMS, TOKENS[:, 0], at, cache) for cache in (clean, dirty))
    np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def mean_log_prob(model, tokens):
    return jnp.mean(next_token_log_probs(model, tokens, 0.8)[0])


def test_remat_gives_the_same_gradients():
    plain, remat = (
        jax.jit(jax.grad(lambda p, r=r: mean_log_prob(Transformer(ARCH, "lm", p, remat=r), TOKENS)))(PARAMS)
        for r in (False, True)
    )
    for name in PARAMS:
        np.testing.assert_allclose(np.asarray(remat[name]), np.asarray(plain[name]), rtol=1e-5, atol=1e-7)
        assert np.abs(np.asarray(plain[name])).max() > 0, name


def test_gradients_equal_finite_differences():
    """Along one random direction over all weights, in the plain float64 model."""
    random = np.random.default_rng(2)
    direction = {k: random.normal(size=v.shape) for k, v in PARAMS.items()}
    tokens = TOKENS[:1]
    grads = jax.jit(jax.grad(lambda p: mean_log_prob(Transformer(ARCH, "lm", p), tokens)))(PARAMS)
    slope = sum(float(np.sum(np.asarray(grads[k], np.float64) * direction[k])) for k in PARAMS)

    def plain(step):
        moved = {k: v.astype(np.float64) + step * direction[k] for k, v in PARAMS.items()}
        logits = plain_hidden(ARCH, moved, tokens[0])[:-1] @ moved["unembed"] / 0.8
        chosen = logits[np.arange(8), tokens[0, 1:]]
        return np.mean(chosen - np.log(np.exp(logits).sum(axis=-1)))

    assert slope == pytest.approx((plain(1e-5) - plain(-1e-5)) / 2e-5, rel=1e-3)


@pytest.mark.parametrize("wrong", [ARCH.vocab, 10**6])
def test_a_token_outside_the_vocabulary_gives_nan_and_is_not_clamped(wrong):
    tokens = TOKENS.copy()
    tokens[1, 4] = wrong
    run = jitted(lambda model, tokens: (model(tokens), next_token_log_probs(model, tokens, 1.0)[0]))
    hidden, log_probs = (np.asarray(x) for x in run(PARAMS, tokens))
    assert np.isnan(hidden[1, 4:]).all() and np.isnan(log_probs[1, 3:]).all()  # from column 3 on, whose target it is
    assert not np.isnan(hidden[[0, 2]]).any() and not np.isnan(log_probs[[0, 2]]).any()
    # As a target alone, behind hidden states that never saw it:
    run = jitted(lambda model, hidden, targets: token_log_probs(model, hidden, targets, 1.0)[0])
    targets = np.where(np.arange(9)[None] == 4, wrong, TOKENS).astype(np.int32)
    log_probs = np.asarray(run(PARAMS, np.ones((3, 9, 12), np.float32), targets))
    assert np.isnan(log_probs).tolist() == [[t == 4 for t in range(9)]] * 3


def test_log_probs_and_entropies_are_those_of_the_tempered_softmax():
    log_probs, entropies = jitted(lambda model, tokens: next_token_log_probs(model, tokens, 0.6))(PARAMS, TOKENS)
    assert log_probs.shape == entropies.shape == (3, 8)
    for b in range(3):
        logits = plain_hidden(ARCH, PARAMS, TOKENS[b])[:-1] @ PARAMS["unembed"].astype(np.float64) / 0.6
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(np.asarray(log_probs)[b], np.log(p[np.arange(8), TOKENS[b, 1:]]), rtol=0, atol=2e-5)
        np.testing.assert_allclose(np.asarray(entropies)[b], -(p * np.log(p)).sum(axis=-1), rtol=0, atol=2e-5)


def test_the_uniform_distribution_has_entropy_log_v():
    flat = PARAMS | {"unembed": np.zeros_like(PARAMS["unembed"])}
    log_probs, entropies = jitted(lambda model, tokens: next_token_log_probs(model, tokens, 1.0))(flat, TOKENS)
    np.testing.assert_allclose(np.asarray(log_probs), np.full((3, 8), -np.log(11)), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(entropies), np.full((3, 8), np.log(11)), rtol=1e-6)


@pytest.mark.parametrize("chunk", [3, 4])  # of 8 positions: with and without a remainder
def test_chunked_log_probs_equal_unchunked_ones(monkeypatch, chunk):
    hidden = np.random.default_rng(4).normal(size=(3, 8, 12)).astype(np.float32)

    def loss(hidden, unembed):
        model = Transformer(ARCH, "lm", PARAMS | {"unembed": unembed})
        log_probs, entropies = token_log_probs(model, hidden, TOKENS[:, 1:], 0.9)
        return jnp.sum(log_probs * jnp.arange(8, dtype=jnp.float32)), (log_probs, entropies)

    results = []
    for size in (64, chunk):
        monkeypatch.setattr(heads, "CHUNK", size)
        # A new function each time: jax would find the one that was traced before CHUNK changed.
        program = jax.jit(jax.value_and_grad(lambda *args: loss(*args), argnums=(0, 1), has_aux=True))
        results.append(program(hidden, PARAMS["unembed"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5), *results)


def test_chunks_keep_the_logits_of_the_whole_batch_from_existing(monkeypatch):
    """No array of the program holds B x T x V numbers, T and V being the largest sizes here."""
    arch = dataclasses.replace(ARCH, layers=1, vocab=401, tied_embeddings=True)
    monkeypatch.setattr(heads, "CHUNK", 8)
    tokens = np.zeros((2, 65), np.int32)

    def loss(params):
        return jnp.mean(next_token_log_probs(Transformer(arch, "lm", params), tokens, 1.0)[0])

    sizes = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(v.aval.size for v in equation.outvars if hasattr(v.aval, "size"))
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(jax.grad(loss))(make_params(arch)).jaxpr)
    assert 2 * 8 * 401 in sizes  # one chunk's logits: the walk does see them
    assert max(sizes) < 2 * 64 * 401


def test_log_probs_refuse_targets_of_another_shape():
    model = Transformer(ARCH, "lm", PARAMS)
    with pytest.raises(ValueError, match="do not match"):
        token_log_probs(model, jnp.zeros((2, 5, 12)), jnp.zeros((2, 1), jnp.int32), 1.0)


def test_bfloat16_weights_still_give_float32_log_probs():
    half = cast({k: jnp.asarray(v) for k, v in PARAMS.items()}, jnp.bfloat16)
    model = Transformer(ARCH, "lm", half)
    hidden = jax.eval_shape(model, TOKENS)
    log_probs, entropies = jax.jit(lambda t: next_token_log_probs(model, t, 1.0))(TOKENS)
    assert hidden.dtype == jnp.bfloat16
    assert log_probs.dtype == entropies.dtype == jnp.float32
    full = jitted(lambda m, t: next_token_log_probs(m, t, 1.0)[0])(PARAMS, TOKENS)
    np.testing.assert_allclose(np.asarray(log_probs), np.asarray(full), atol=0.15)


def test_rotation_by_hand():
    """Head of two numbers: position t turns (1, 0) by t radians. Half 2, theta 100: the second pair by t / 10."""
    x = np.broadcast_to(np.asarray([1, 0], np.float32), (1, 3, 1, 2))
    positions = np.asarray([[0, 1, 2]], np.int32)
    wanted = [[np.cos(t), np.sin(t)] for t in range(3)]
    np.testing.assert_allclose(np.asarray(rotate(jnp.asarray(x), positions, 5.0))[0, :, 0], wanted, atol=1e-6)
    four = jnp.asarray([[[[1, 1, 0, 0]]]], jnp.float32)
    out = np.asarray(rotate(four, np.asarray([[3]]), 100.0)).ravel()
    np.testing.assert_allclose(out, [np.cos(3), np.cos(0.3), np.sin(3), np.sin(0.3)], atol=1e-6)


def test_rms_norm_by_hand():
    """Mean square of (3, 4) is 12.5; eps 3.5 makes the root 4."""
    out = rms_norm(jnp.asarray([[3, 4]], jnp.float32), jnp.asarray([1, 2], jnp.float32), 3.5)
    np.testing.assert_allclose(np.asarray(out), [[0.75, 2]], rtol=1e-6)
    half = rms_norm(jnp.asarray([[3, 4]], jnp.bfloat16), jnp.asarray([1, 2], jnp.bfloat16), 3.5)
    assert half.dtype == jnp.bfloat16


def test_cache_writes_stay_in_their_place():
    cache = empty_cache(ARCH, 2, 5, jnp.float32)
    assert cache.keys.shape == cache.values.shape == (2, 2, 5, 2, 6)
    assert cache_bytes(ARCH, 2, 5, 4) == cache.keys.nbytes + cache.values.nbytes
    ones = jnp.ones((2, 2, 3, 2, 6))
    cache = write_prefix(cache, ones, 2 * ones)
    cache = write_positions(cache, jnp.int32(1), 7 * ones[0, :, 0], 8 * ones[0, :, 0], jnp.asarray([1, 4], jnp.int32))
    assert np.asarray(cache.keys)[:, :, :, 0, 0].tolist() == [
        [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]],
        [[1, 7, 1, 0, 0], [1, 1, 1, 0, 7]],
    ]
    keys, values = read_layer(cache, jnp.int32(1))
    assert np.asarray(values)[:, :, 1, 5].tolist() == [[2, 8, 2, 0, 0], [2, 2, 2, 0, 8]]
    assert keys.shape == (2, 5, 2, 6)


def test_initial_weights():
    """Variance 1 / fan_in, norms one; a weight depends on seed and name alone, and no two are alike."""
    arch = dataclasses.replace(ARCH, d_model=64, d_ff=96, vocab=200)
    made = initialize(weights(arch), jax.random.key(0))
    for name, weight in weights(arch).items():
        x = np.asarray(made[name])
        assert x.shape == weight.shape and x.dtype == np.float32
        if weight.fan_in:
            assert x.std() == pytest.approx(weight.fan_in**-0.5, rel=0.1)
            assert abs(x.mean()) < 0.1 * x.std()
        else:
            assert (x == 1).all()
    scalar = initialize(weights(arch, "scalar"), jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(scalar["blocks/up"]), np.asarray(made["blocks/up"]))
    assert not np.array_equal(np.asarray(made["blocks/up"]), np.asarray(made["blocks/gate"]))
    assert not np.array_equal(np.asarray(made["blocks/key"]), np.asarray(made["blocks/value"]))
    other = initialize(weights(arch), jax.random.key(1))
    assert not np.array_equal(np.asarray(other["blocks/up"]), np.asarray(made["blocks/up"]))
    abstract = abstract_params(weights(arch), jnp.bfloat16)
    assert {k: (s.shape, s.dtype) for k, s in abstract.items()} == {k: (x.shape, jnp.bfloat16) for k, x in made.items()}
    assert sum(x.size for x in made.values()) == parameter_count(arch)


def test_weights_that_do_not_fit_the_shape_are_refused():
    with pytest.raises(ValueError, match="unembed"):
        Transformer(TIED, "lm", PARAMS)
    with pytest.raises(ValueError, match="scalar"):
        Transformer(ARCH, "scalar", PARAMS)
