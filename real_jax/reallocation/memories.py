"""Arrays in one memory or another of the devices that hold them: their own, or their host's."""

from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding, SingleDeviceSharding

DEVICE, HOST = "device", "pinned_host"


def in_memory(arrays: Mapping[str, jax.Array], target: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
    """`arrays` in the memories that `target` names; their layouts stay. Each shard is copied to the other memory of its
    own device, in every process by itself."""
    there = {n: x for n, x in arrays.items() if _memory(x.sharding) != _memory(target[n])}
    pieces = {n: [s.data for s in x.addressable_shards] for n, x in there.items()}
    wanted = {
        n: [SingleDeviceSharding(s.device, memory_kind=_memory(target[n])) for s in x.addressable_shards]
        for n, x in there.items()
    }
    copies = jax.device_put(pieces, wanted)
    return {
        n: jax.make_array_from_single_device_arrays(
            x.shape, x.sharding.with_memory_kind(_memory(target[n])), copies[n], dtype=x.dtype
        )
        if n in there
        else x
        for n, x in arrays.items()
    }


def on_devices(shardings: Mapping[str, NamedSharding]) -> dict[str, NamedSharding]:
    """`shardings` with all arrays in the devices' own memory."""
    return {n: s.with_memory_kind(DEVICE) if _memory(s) == HOST else s for n, s in shardings.items()}


def on_hosts(shardings: Mapping[str, NamedSharding]) -> dict[str, NamedSharding]:
    """`shardings` with all arrays in the hosts' memory."""
    return {n: s.with_memory_kind(HOST) for n, s in shardings.items()}


def _memory(sharding: NamedSharding) -> str:
    return HOST if sharding.memory_kind == HOST else DEVICE
