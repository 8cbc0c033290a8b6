"""Eight virtual devices, strict type promotion: a silent fault becomes an error in every test."""

import os
import tempfile

from real_jax.commandline import quiet_backends

os.environ.setdefault("JAX_PLATFORMS", "cpu")
quiet_backends()
os.environ.setdefault("REAL_JAX_CACHE", tempfile.mkdtemp(prefix="real-jax-cache-"))

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Programs that several tests compile are compiled once in a session.
jax.config.update("jax_compilation_cache_dir", os.path.join(os.environ["REAL_JAX_CACHE"], "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
