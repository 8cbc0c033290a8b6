"""The key/value cache of incremental decoding: one fixed-size array each for keys and values, indexed by column."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from real_jax.spec.arch import BATCH, HEAD_DIM, KV_HEADS, LAYERS, LENGTH, Arch

Array = jax.Array

AXES = (LAYERS, BATCH, LENGTH, KV_HEADS, HEAD_DIM)


class Cache(NamedTuple):
    """Keys and values [L, B, T, kv_heads, head_dim]."""

    keys: Array
    values: Array


def empty_cache(arch: Arch, batch: int, length: int, dtype) -> Cache:
    shape = (arch.layers, batch, length, arch.kv_heads, arch.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def cache_bytes(arch: Arch, batch: int, length: int, itemsize: int) -> int:
    """Bytes of the cache of `batch` sequences."""
    return 2 * arch.layers * batch * length * arch.kv_heads * arch.head_dim * itemsize


def write_prefix(cache: Cache, keys: Array, values: Array) -> Cache:
    """Writes [L, B, P, kv_heads, head_dim] into columns 0 to P - 1."""
    start = (0,) * cache.keys.ndim
    return Cache(
        jax.lax.dynamic_update_slice(cache.keys, keys.astype(cache.keys.dtype), start),
        jax.lax.dynamic_update_slice(cache.values, values.astype(cache.values.dtype), start),
    )


def read_layer(cache: Cache, layer: Array) -> tuple[Array, Array]:
    """Keys and values [B, T, kv_heads, head_dim] of one layer."""
    return tuple(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in cache)


def write_positions(cache: Cache, layer: Array, keys: Array, values: Array, positions: Array) -> Cache:
    """Writes keys and values [B, kv_heads, head_dim] of one layer, each row at its own column positions[b]."""

    rows = jnp.arange(len(positions), dtype=positions.dtype)

    # Into the stack itself: what takes a layer out and puts it back copies all its columns at every token.
    def write(stack: Array, new: Array) -> Array:
        return stack.at[layer, rows, positions].set(
            new.astype(stack.dtype), mode="promise_in_bounds", unique_indices=True
        )

    return Cache(write(cache.keys, keys), write(cache.values, values))
