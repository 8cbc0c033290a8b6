"""Generation against a scripted model, where every token is known, and against a small transformer."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.models.heads import next_token_log_probs
from real_jax.models.transformer import Transformer, initialize
from real_jax.rollout.generate import generate
from real_jax.spec.arch import Arch, weights
from real_jax.spec.experiment import GenerationConfig

END, PAD = 2, 0
ARCH = Arch(layers=2, d_model=16, heads=4, kv_heads=2, head_dim=4, d_ff=24, vocab=9, context=64)
PROMPTS = np.asarray(
    [[5, 6, 7, 8], [3, END, 4, 0], [8, 0, 0, 0], [END, 0, 0, 0], [4, 4, END, END], [7, 3, 0, 0]], np.int32
)
LENGTHS = np.asarray([4, 3, 1, 1, 4, 2], np.int32)  # rows 1, 3 and 4 hold the end token inside their prompt


class Script:
    """A model whose row b says script[b, c] after the token in column c, and second-best (5) elsewhere.

    Its hidden state is (row, column); `steps` counts the decode steps that run.
    """

    arch = types.SimpleNamespace(layers=1, kv_heads=1, head_dim=1, vocab=9)
    embed = jnp.zeros((9, 1), jnp.float32)

    def __init__(self, script):
        self.script, self.steps = jnp.asarray(script, jnp.int32), []

    def constrain(self, x, axes):
        return x

    def prefill(self, tokens, cache):
        batch, width = tokens.shape
        rows, columns = jnp.meshgrid(jnp.arange(batch), jnp.arange(width), indexing="ij")
        return jnp.stack([rows, columns], axis=-1), cache

    def decode(self, tokens, positions, cache):
        jax.debug.callback(self.steps.append, positions)
        return jnp.stack([jnp.arange(positions.shape[0], dtype=jnp.int32), positions], axis=-1), cache

    def logits(self, hidden):
        wanted = self.script[hidden[:, 0], hidden[:, 1]]
        ids = jnp.arange(9, dtype=jnp.int32)
        return jnp.where(ids == wanted[:, None], 90.0, jnp.where(ids == 5, 45.0, 0.0)).astype(jnp.float32)


def scripted(script, prompts, lengths, **options):
    model, config = Script(script), GenerationConfig(**options)
    keys = jax.random.split(jax.random.key(0), len(prompts))
    run = jax.jit(lambda prompts, lengths: generate(model, prompts, lengths, keys, config, END, PAD))
    out = jax.device_get(run(np.asarray(prompts, np.int32), np.asarray(lengths, np.int32)))
    jax.effects_barrier()
    return out, model.steps


def test_rows_end_each_at_its_own_end_token_and_decoding_stops_after_the_last():
    """R = 6. Row 0, prompt of 2: 4, END. Row 1, prompt of 1: 3, 4, 5, END. Four steps, not six."""
    script = [[0, 4, END, 0, 0, 0, 0, 0], [3, 4, 5, END, 0, 0, 0, 0]]
    out, steps = scripted(script, [[7, 8], [6, 1]], [2, 1], response_length=6)
    assert out.tokens.tolist() == [[7, 8, 4, END, PAD, PAD, PAD, PAD], [6, 3, 4, 5, END, PAD, PAD, PAD]]
    assert out.lengths.tolist() == [4, 5]
    assert out.ended.tolist() == [True, True]
    assert len(steps) == 4
    # exp(-45) of the mass is elsewhere: the log-probability of each scripted token is 0 in float32.
    np.testing.assert_allclose(out.log_probs, np.zeros((2, 7)), atol=1e-6)


def test_a_full_response_is_cut_and_one_that_ends_in_its_last_column_is_not():
    """Row 2 has the shorter prompt: its third and last token stands in column 3."""
    script = [[0, 3, 4, 3], [0, 3, 4, END], [4, 3, 4, END]]
    out, steps = scripted(script, [[7, 8]] * 3, [2, 2, 1], response_length=3)
    assert out.tokens.tolist() == [[7, 8, 3, 4, 3], [7, 8, 3, 4, END], [7, 4, 3, 4, PAD]]
    assert out.lengths.tolist() == [5, 5, 4]
    assert out.ended.tolist() == [False, True, False]
    assert len(steps) == 3


def test_no_step_runs_once_every_row_has_ended():
    out, steps = scripted([[END] * 6] * 2, [[7], [8]], [1, 1], response_length=5)
    assert out.tokens.tolist() == [[7, END, PAD, PAD, PAD, PAD], [8, END, PAD, PAD, PAD, PAD]]
    assert len(steps) == 1


@pytest.mark.parametrize("minimum", [1, 3])
def test_min_length_puts_the_end_token_off(minimum):
    """The model says END at once; the next best token 5 stands in for it `minimum` times."""
    out, steps = scripted([[END] * 6], [[7]], [1], response_length=5, min_length=minimum)
    assert out.tokens[0].tolist() == [7, *[5] * minimum, END, *[PAD] * (4 - minimum)]
    assert len(steps) == minimum + 1
    # The log-probability is the policy's own, in which END was the likely token: -45 for each 5.
    np.testing.assert_allclose(out.log_probs[0], [-45] * minimum + [0] * (5 - minimum), atol=1e-4)


def test_min_length_of_the_whole_response_never_ends():
    out, _ = scripted([[END] * 4], [[7]], [1], response_length=3, min_length=3, greedy=True)
    assert (out.tokens[0].tolist(), out.ended[0].item()) == ([7, 5, 5, 5], False)


def test_garbage_behind_a_prompt_is_not_read():
    script = [[3, 4, END, 0, 0]]
    clean, _ = scripted(script, [[6, 0, 0]], [1], response_length=3)
    dirty, _ = scripted(script, [[6, 10**6, END]], [1], response_length=3)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert clean.tokens[0].tolist() == [6, 3, 4, END, PAD, PAD]


CONFIG = GenerationConfig(response_length=7, temperature=0.7, top_k=6, top_p=0.95, min_length=1)


@functools.cache
def params(seed=1, scale=1.0):
    made = initialize(weights(ARCH), jax.random.key(seed))
    return {k: v * np.float32(scale) if k == "unembed" else v for k, v in made.items()}


def row_keys(rows):
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(16), jnp.asarray(rows))


@functools.cache
def compiled(config):
    def run(arrays, prompts, lengths, keys, pad):
        return generate(Transformer(ARCH, "lm", arrays), prompts, lengths, keys, config, END, pad)

    return jax.jit(run)


def roll(arrays, prompts=PROMPTS, lengths=LENGTHS, rows=range(6), config=CONFIG, pad=PAD, run=None):
    run = run or compiled(config)
    return jax.device_get(run(arrays, jnp.asarray(prompts), jnp.asarray(lengths), row_keys(list(rows)), jnp.int32(pad)))


def mask_of(out, lengths):
    column = np.arange(out.log_probs.shape[1])[None]
    return (column >= lengths[:, None] - 1) & (column < out.lengths[:, None] - 1)


def responses(out, lengths):
    return [row[a:b].tolist() for row, a, b in zip(out.tokens, lengths, out.lengths, strict=True)]


@pytest.fixture(scope="module")
def rollout():
    return roll(params())


def test_rollouts_are_well_formed(rollout):
    out = rollout
    ends = 0
    for b, prompt in enumerate(LENGTHS):
        assert out.tokens[b, :prompt].tolist() == PROMPTS[b, :prompt].tolist()
        assert (out.tokens[b, out.lengths[b] :] == PAD).all()
        response = out.tokens[b, prompt : out.lengths[b]].tolist()
        assert CONFIG.min_length < len(response) <= CONFIG.response_length
        assert response.count(END) == int(out.ended[b])
        assert (response[-1] == END) == bool(out.ended[b])
        assert out.ended[b] or len(response) == CONFIG.response_length
        ends += int(out.ended[b])
    assert 0 < ends < len(LENGTHS)  # the seed gives both kinds


def full_forward(arrays, tokens, temperature):
    run = jax.jit(lambda a, t: next_token_log_probs(Transformer(ARCH, "lm", a), t, temperature)[0])
    return np.asarray(run(arrays, jnp.asarray(tokens)))


def test_log_probs_are_those_of_the_full_forward_pass(rollout):
    """At T = 0.7 with top-k and top-p (huggingface/trl#4159): the ratio of every token is 1."""
    mask = mask_of(rollout, LENGTHS)
    full = full_forward(params(), rollout.tokens, CONFIG.temperature)
    np.testing.assert_allclose(rollout.log_probs[mask], full[mask], rtol=0, atol=1e-5)
    assert not rollout.log_probs[~mask].any()
    other = full_forward(params(), rollout.tokens, 1.0)
    assert np.abs(rollout.log_probs - other)[mask].max() > 0.1  # the temperature does matter


def test_rows_do_not_depend_on_their_neighbours_or_on_the_batch_size(rollout):
    order = [4, 1, 3]
    few = roll(params(), PROMPTS[order], LENGTHS[order], order)
    np.testing.assert_array_equal(few.tokens, rollout.tokens[order])
    np.testing.assert_array_equal(few.lengths, rollout.lengths[order])
    np.testing.assert_allclose(few.log_probs, rollout.log_probs[order], rtol=0, atol=1e-5)
    changed = PROMPTS.copy()
    changed[0] = [3, 3, 3, 3]
    np.testing.assert_array_equal(roll(params(), changed).tokens[1:], rollout.tokens[1:])


def test_pad_may_be_the_end_token(rollout):
    """Lengths, not tokens, say where a row ends: with pad = END and END in prompts the responses are the same."""
    out = roll(params(), np.where(np.arange(4)[None] < LENGTHS[:, None], PROMPTS, END), pad=END)
    np.testing.assert_array_equal(out.lengths, rollout.lengths)
    np.testing.assert_array_equal(out.ended, rollout.ended)
    assert responses(out, LENGTHS) == responses(rollout, LENGTHS)
    np.testing.assert_array_equal(out.log_probs, rollout.log_probs)
    behind = np.arange(out.tokens.shape[1])[None] >= out.lengths[:, None]
    assert (out.tokens[behind] == END).all() and behind[~out.ended].any()


def test_more_padding_changes_nothing(rollout):
    """17 more columns, full of tokens that are no tokens."""
    wide = np.concatenate([PROMPTS, np.full((6, 17), 10**6, np.int32)], axis=1)
    out = roll(params(), wide)
    assert out.tokens.shape == (6, 28)
    np.testing.assert_array_equal(out.tokens[:, :11], rollout.tokens)
    assert (out.tokens[:, 11:] == PAD).all()
    np.testing.assert_array_equal(out.lengths, rollout.lengths)
    np.testing.assert_array_equal(out.ended, rollout.ended)
    np.testing.assert_allclose(out.log_probs[:, :10], rollout.log_probs, rtol=0, atol=1e-5)


def test_new_weights_leave_nothing_of_the_old_cache(rollout):
    """The same prompts under weights x 2, in the program that has run the old ones: equal to a program that has not."""
    updated = {k: 2 * v for k, v in params().items()}
    again = roll(updated)
    fresh = roll(updated, run=jax.jit(compiled(CONFIG).__wrapped__))
    jax.tree.map(np.testing.assert_array_equal, again, fresh)
    mask = mask_of(again, LENGTHS)
    full = full_forward(updated, again.tokens, CONFIG.temperature)
    np.testing.assert_allclose(again.log_probs[mask], full[mask], rtol=1e-5, atol=1e-5)
    assert (again.tokens != rollout.tokens).any()


def test_greedy_takes_the_likeliest_token_of_the_full_forward_pass():
    config = GenerationConfig(response_length=4, greedy=True)
    out = roll(params(seed=2), config=config)

    def likeliest(arrays, tokens):
        model = Transformer(ARCH, "lm", arrays)
        return jnp.argmax(model.logits(model(tokens)), axis=-1)

    best = np.asarray(jax.jit(likeliest)(params(seed=2), jnp.asarray(out.tokens)))[:, :-1]
    mask = mask_of(out, LENGTHS)
    np.testing.assert_array_equal(out.tokens[:, 1:][mask], best[mask])
