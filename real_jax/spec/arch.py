"""Model shapes: every weight of a decoder-only transformer is declared here once, with its shape and logical axes.

Memory, reallocation, loading and the flax modules all derive from `weights`; nothing else states a shape.
"""

import dataclasses
import math
from typing import Literal

Head = Literal["lm", "scalar"]

# The logical axes that a weight or an activation may carry.
LAYERS, VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP = (
    "layers",
    "vocab",
    "embed",
    "heads",
    "kv_heads",
    "head_dim",
    "mlp",
)
BATCH, LENGTH, HIDDEN = "batch", "length", "hidden"  # of activations alone


@dataclasses.dataclass(frozen=True)
class Arch:
    """Shape of a Llama-family decoder.

    Attributes:
      layers: number of blocks L.
      d_model: width of the residual stream D.
      heads: query heads per block.
      kv_heads: key and value heads per block; `heads` is a multiple of it (grouped-query attention).
      head_dim: width of one head.
      d_ff: hidden width of the gated feed-forward network.
      vocab: vocabulary size V.
      context: largest sequence length that the model accepts.
      rope_theta: base of the rotary position embedding.
      norm_eps: epsilon of the root-mean-square norms.
      tied_embeddings: whether the output projection is the embedding table.
      qkv_bias: whether queries, keys and values have a bias, as in Qwen2.
    """

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    context: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    qkv_bias: bool = False


NORM, BIAS = 0, -1


@dataclasses.dataclass(frozen=True)
class Weight:
    """One parameter array: its shape, the logical axis of each dimension and the scale of its initial values.

    `fan_in` is the number of inputs summed into one output; NORM marks a norm scale, which starts at one, and BIAS a
    bias, which starts at zero.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def weights(arch: Arch, head: Head = "lm") -> dict[str, Weight]:
    """All weights of a model, keyed by their path in the parameter tree ("blocks/query").

    `head` is "lm" for next-token logits or "scalar" for one value per position (critic and reward model).
    """
    a, layer = arch, arch.layers

    def stacked(shape, axes, fan_in):
        return Weight((layer, *shape), (LAYERS, *axes), fan_in)

    table = {
        "embed": Weight((a.vocab, a.d_model), (VOCAB, EMBED), a.d_model),
        "blocks/attention_norm": stacked((a.d_model,), (EMBED,), NORM),
        "blocks/query": stacked((a.d_model, a.heads, a.head_dim), (EMBED, HEADS, HEAD_DIM), a.d_model),
        "blocks/key": stacked((a.d_model, a.kv_heads, a.head_dim), (EMBED, KV_HEADS, HEAD_DIM), a.d_model),
        "blocks/value": stacked((a.d_model, a.kv_heads, a.head_dim), (EMBED, KV_HEADS, HEAD_DIM), a.d_model),
        "blocks/out": stacked((a.heads, a.head_dim, a.d_model), (HEADS, HEAD_DIM, EMBED), a.heads * a.head_dim),
        "blocks/mlp_norm": stacked((a.d_model,), (EMBED,), NORM),
        "blocks/gate": stacked((a.d_model, a.d_ff), (EMBED, MLP), a.d_model),
        "blocks/up": stacked((a.d_model, a.d_ff), (EMBED, MLP), a.d_model),
        "blocks/down": stacked((a.d_ff, a.d_model), (MLP, EMBED), a.d_ff),
        "norm": Weight((a.d_model,), (EMBED,), NORM),
    }
    if a.qkv_bias:
        for name, count, axis in (
            ("query", a.heads, HEADS),
            ("key", a.kv_heads, KV_HEADS),
            ("value", a.kv_heads, KV_HEADS),
        ):
            table[f"blocks/{name}_bias"] = stacked((count, a.head_dim), (axis, HEAD_DIM), BIAS)
    if head == "scalar":
        table["scalar"] = Weight((a.d_model,), (EMBED,), a.d_model)
    elif not a.tied_embeddings:
        table["unembed"] = Weight((a.d_model, a.vocab), (EMBED, VOCAB), a.d_model)
    return table


def parameter_count(arch: Arch, head: Head = "lm") -> int:
    """Number of parameters."""
    return sum(w.size for w in weights(arch, head).values())


def forward_flops(arch: Arch, batch: int, length: int, head: Head = "lm") -> int:
    """Matrix floating-point operations of one forward pass over `batch` sequences of `length` tokens.

    A multiply-add counts as two. Attention scores are counted in full (not halved for the causal mask), as the
    compiler counts them.
    """
    tokens = batch * length
    block = arch.d_model * arch.head_dim * (2 * arch.heads + 2 * arch.kv_heads) + 3 * arch.d_model * arch.d_ff
    attention = 2 * length * arch.heads * arch.head_dim
    out = arch.d_model * (arch.vocab if head == "lm" else 1)
    return 2 * tokens * (arch.layers * (block + attention) + out)


# Published shapes, by the name that configurations use. Sources: the models' own config.json files.
ARCHS: dict[str, Arch] = {
    "tiny": Arch(layers=2, d_model=128, heads=8, kv_heads=4, head_dim=16, d_ff=256, vocab=128, context=128),
    "smollm2-135m": Arch(
        layers=30, d_model=576, heads=9, kv_heads=3, head_dim=64, d_ff=1536, vocab=49152, context=8192,
        rope_theta=100000.0, tied_embeddings=True,
    ),
    "llama-7b": Arch(layers=32, d_model=4096, heads=32, kv_heads=32, head_dim=128, d_ff=11008, vocab=32000, context=4096),
    "llama-13b": Arch(layers=40, d_model=5120, heads=40, kv_heads=40, head_dim=128, d_ff=13824, vocab=32000, context=4096),
    "llama-34b": Arch(
        layers=48, d_model=8192, heads=64, kv_heads=8, head_dim=128, d_ff=22016, vocab=32000, context=16384,
        rope_theta=1e6,
    ),
    "llama-70b": Arch(layers=80, d_model=8192, heads=64, kv_heads=8, head_dim=128, d_ff=28672, vocab=32000, context=4096),
    "qwen2.5-7b": Arch(
        layers=28, d_model=3584, heads=28, kv_heads=4, head_dim=128, d_ff=18944, vocab=152064, context=32768,
        rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
    ),
    "qwen2.5-32b": Arch(
        layers=64, d_model=5120, heads=40, kv_heads=8, head_dim=128, d_ff=27648, vocab=152064, context=32768,
        rope_theta=1e6, norm_eps=1e-6, qkv_bias=True,
    ),
}  # fmt: skip
