"""A Llama-family decoder in flax.nnx. It knows logical axis names and no mesh.

Every sequence starts in column 0 and is padded on the right, so a token's column is its position, causal attention never
reaches padding, and no pad mask is needed anywhere in the model.
"""

import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from real_jax.models.cache import Cache, read_layer, write_positions, write_prefix
from real_jax.spec.arch import (
    BATCH,
    BIAS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LENGTH,
    MLP,
    NORM,
    Arch,
    Head,
    Weight,
    weights,
)

Array = jax.Array
Params = dict[str, Array]  # keyed like spec.arch.weights
Constrain = Callable[[Array, tuple[str, ...]], Array]  # pins an activation's logical axes to a mesh

RESIDUAL = (BATCH, LENGTH, HIDDEN)


def no_constraint(x: Array, axes: tuple[str, ...]) -> Array:
    return x


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32 (arXiv 1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.float32(eps))
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding (arXiv 2104.09864), the two halves of a head as real and imaginary part.

    x [B, T, heads, head_dim]; positions [B, T].
    """
    half = x.shape[-1] // 2
    frequencies = jnp.float32(theta) ** (-jnp.arange(half, dtype=jnp.float32) / jnp.float32(half))
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(*args, **options) -> Array:
    """`jax.nn.dot_product_attention`, which mixes bfloat16 and float32 on purpose."""
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(*args, **options)


class Blocks(nnx.Module):
    """The weights of all blocks, stacked along a leading layer axis; a scan hands one layer at a time to `layer`."""

    def __init__(self, arrays: Mapping[str, Array]):
        for name, array in arrays.items():
            setattr(self, name, nnx.Param(array))


class Transformer(nnx.Module):
    """Decoder with a next-token head ("lm") or a head of one number per position ("scalar").

    Args:
      arch: the model's shape.
      head: which head it carries.
      arrays: the weights, keyed like `spec.arch.weights(arch, head)`.
      constrain: pins activations to a mesh by their logical axes.
      attention: implementation for `jax.nn.dot_product_attention` over whole sequences ("xla" or "cudnn").
      remat: recompute each block's activations in the backward pass.
    """

    def __init__(
        self,
        arch: Arch,
        head: Head,
        arrays: Mapping[str, Array],
        *,
        constrain: Constrain = no_constraint,
        attention: str = "xla",
        remat: bool = False,
    ):
        if set(arrays) != set(weights(arch, head)):
            raise ValueError(f"weights {sorted(set(arrays) ^ set(weights(arch, head)))} are missing or too many")
        self.arch, self.head, self.constrain, self.attention, self.remat = arch, head, constrain, attention, remat
        self.blocks = Blocks({k.split("/")[1]: v for k, v in arrays.items() if k.startswith("blocks/")})
        for name in arrays:
            if "/" not in name:
                setattr(self, name, nnx.Param(arrays[name]))

    def __call__(self, tokens: Array) -> Array:
        """Final hidden states [B, T, D] of token ids [B, T]."""
        hidden, _ = self._run(tokens, None)
        return hidden

    def prefill(self, tokens: Array, cache: Cache) -> tuple[Array, Cache]:
        """Hidden states [B, P, D] of prompts [B, P], and the cache with their keys and values in columns 0 to P - 1.

        Columns past a row's prompt hold padding until `decode` overwrites them; `decode` never reads them before.
        """
        return self._run(tokens, cache)

    def decode(self, tokens: Array, positions: Array, cache: Cache) -> tuple[Array, Cache]:
        """One step: hidden states [B, D] of tokens [B] at positions [B], each row attending to its columns up to its own."""
        x = self._embed(tokens[:, None])
        graph, stacked = nnx.split(self.blocks)

        def body(carry, layer):
            x, cache = carry
            index, state = layer
            block = nnx.merge(graph, state)
            q, k, v = self._qkv(block, x, positions[:, None])
            cache = write_positions(cache, index, k[:, 0], v[:, 0], positions)
            keys, values = read_layer(cache, index)
            out = attend(q, keys, values, key_value_seq_lengths=positions + 1)
            return (self._feed_forward(block, self._attended(block, x, out)), cache), None

        layers = jnp.arange(self.arch.layers, dtype=jnp.int32)
        (x, cache), _ = jax.lax.scan(body, (x, cache), (layers, stacked))
        return self._final(x)[:, 0], cache

    def logits(self, hidden: Array) -> Array:
        """Float32 next-token logits [..., V] of hidden states [..., D]."""
        if self.arch.tied_embeddings:
            return jnp.einsum("...d,vd->...v", hidden, self.embed[...], preferred_element_type=jnp.float32)
        return jnp.einsum("...d,dv->...v", hidden, self.unembed[...], preferred_element_type=jnp.float32)

    def values(self, hidden: Array) -> Array:
        """Float32 numbers [...] of hidden states [..., D]; for the scalar head."""
        return jnp.einsum("...d,d->...", hidden, self.scalar[...], preferred_element_type=jnp.float32)

    def _run(self, tokens: Array, cache: Cache | None) -> tuple[Array, Cache | None]:
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        x = self._embed(tokens)
        graph, stacked = nnx.split(self.blocks)

        def body(x, state):
            block = nnx.merge(graph, state)
            q, k, v = self._qkv(block, x, positions)
            out = attend(q, k, v, is_causal=True, implementation=self.attention)
            x = self._feed_forward(block, self._attended(block, x, out))
            return x, None if cache is None else (k, v)

        x, kv = jax.lax.scan(jax.checkpoint(body) if self.remat else body, x, stacked)
        return self._final(x), None if cache is None else write_prefix(cache, *kv)

    def _embed(self, tokens: Array) -> Array:
        # `take` turns an id outside the vocabulary into NaN instead of clamping it silently.
        return self.constrain(jnp.take(self.embed[...], tokens, axis=0), RESIDUAL)

    def _final(self, x: Array) -> Array:
        return rms_norm(x, self.norm[...], self.arch.norm_eps)

    def _qkv(self, block: Blocks, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        y = rms_norm(x, block.attention_norm[...], self.arch.norm_eps)
        q, k, v = (jnp.einsum("btd,dhk->bthk", y, w[...]) for w in (block.query, block.key, block.value))
        if self.arch.qkv_bias:
            q, k, v = q + block.query_bias[...], k + block.key_bias[...], v + block.value_bias[...]
        q = self.constrain(rotate(q, positions, self.arch.rope_theta), (BATCH, LENGTH, HEADS, HEAD_DIM))
        k = self.constrain(rotate(k, positions, self.arch.rope_theta), (BATCH, LENGTH, KV_HEADS, HEAD_DIM))
        return q, k, self.constrain(v, (BATCH, LENGTH, KV_HEADS, HEAD_DIM))

    def _attended(self, block: Blocks, x: Array, out: Array) -> Array:
        return self.constrain(x + jnp.einsum("bthk,hkd->btd", out, block.out[...]), RESIDUAL)

    def _feed_forward(self, block: Blocks, x: Array) -> Array:
        y = rms_norm(x, block.mlp_norm[...], self.arch.norm_eps)
        gate = jnp.einsum("btd,df->btf", y, block.gate[...])
        up = jnp.einsum("btd,df->btf", y, block.up[...])
        y = self.constrain(jax.nn.silu(gate) * up, (BATCH, LENGTH, MLP))
        return self.constrain(x + jnp.einsum("btf,fd->btd", y, block.down[...]), RESIDUAL)


def initialize(table: Mapping[str, Weight], key: Array, dtype=jnp.float32) -> Params:
    """Random weights: normal with variance 1 / fan_in, norm scales one, biases zero. A weight's values depend on `key` and its name.

    Drawn on the host: a program that draws dozens of arrays takes longer to compile than a small model to train.
    """
    entropy = np.asarray(jax.random.key_data(key)).tolist()

    def one(name: str, weight: Weight) -> Array:
        if weight.fan_in in (NORM, BIAS):
            return jnp.full(weight.shape, weight.fan_in == NORM, dtype)
        random = np.random.default_rng([*entropy, zlib.crc32(name.encode())])
        values = random.standard_normal(weight.shape, np.float32) * np.float32(weight.fan_in**-0.5)
        return jnp.asarray(values, dtype)

    return {name: one(name, weight) for name, weight in table.items()}


def abstract_params(table: Mapping[str, Weight], dtype=jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and types of the weights, without values."""
    return {name: jax.ShapeDtypeStruct(weight.shape, dtype) for name, weight in table.items()}


def cast(params: Params, dtype) -> Params:
    """The weights in the compute type."""
    return jax.tree.map(lambda x: x.astype(dtype), params)
