"""Optimized HLO text -> what one device executes: matrix operations, bytes, kernels and collectives. Pure.

The compiler's own cost analysis counts a loop body once and mixes all operations; here a body counts as often as the
compiler says that it runs. A program may be compiled with a number of rows per device that is prime and divides no
other dimension: whatever has a multiple of that many elements grows with the rows, all else stays. So one compile
tells the cost of any number of rows.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

import numpy as np

from real_jax.cost.summary import NOTHING, Collective, Kernel, Linear, Summary, total

ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip
COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
# Instructions that move no data and start no kernel.
_FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "domain", "add-dependency",
))  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type and shape of an array in HLO text."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.size * ITEM_BYTES.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO text. `arrays` are the result's leaves, `attributes` the text after the operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool
    inside: str  # the text between the parentheses; the number of a parameter


Computation = dict[str, Instruction]

_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")


def arrays_of(text: str) -> tuple[Array, ...]:
    """The arrays named in a type, "(f32[4,2]{1,0}, s32[])" -> f32 [4, 2] and s32 []."""
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n))
        for dtype, dims in _ARRAY.findall(text)
        if dtype in ITEM_BYTES
    )


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    raise ValueError(f"unbalanced parentheses in HLO text: {text[start : start + 80]!r}")


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module, by name, and the name of its entry computation."""
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry = ""
    for line in text.splitlines():
        if current is None:
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif match := _LINE.match(line):
            instruction = _instruction(match, _COMMENT.sub("", line[match.end() :]))
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("this text holds no HLO module with an entry computation")
    return computations, entry


def _instruction(match: re.Match, rest: str) -> Instruction:
    # TYPE opcode(operands), attributes; a TYPE that is a tuple has parentheses of its own, and so may a layout.
    type_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    open_ = rest.index("(", type_end)
    close = _closing(rest, open_)
    inside = rest[open_ + 1 : close]
    return Instruction(
        name=match[2],
        opcode=rest[type_end:open_].strip(),
        arrays=arrays_of(rest[:type_end]),
        operands=tuple(_NAME.findall(inside)),
        attributes=rest[close + 1 :],
        root=bool(match[1]),
        inside=inside,
    )


def first_group(attributes: str, devices: int) -> tuple[int, ...]:
    """The devices, as numbered in the program's mesh, of the first group of a collective; all where none are named."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return tuple(int(n) for n in listed[1].split(","))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
        shape, dims, order = (tuple(int(n) for n in (part or "").split(",") if n) for part in iota.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return tuple(int(n) for n in (ids.transpose(order) if order else ids).reshape(shape)[0].ravel())
    if mesh := re.search(r"replica_groups=@?mesh\[(.*?)\].*?\{([^}]*)\}", attributes):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        taken = re.findall(r"'(\w+)'", mesh[2])
        ids = _mesh_ids(attributes, math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return tuple(int(n) for n in ids[tuple(slice(None) if axis in taken else 0 for axis in sizes)].ravel())
    if pairs := re.findall(
        r"\{(\d+),(\d+)\}", attributes.partition("source_target_pairs=")[2].partition("}}")[0] + "}"
    ):
        return 0, collections.Counter(abs(int(a) - int(b)) for a, b in pairs).most_common(1)[0][0]
    return tuple(range(devices))


def _mesh_ids(attributes: str, count: int) -> np.ndarray:
    """The order of devices of a mesh that a collective names: as the text says, else ascending."""
    if iota := re.search(r"device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)", attributes):
        dims, order = (tuple(int(n) for n in (part or "").split(",") if n) for part in iota.groups())
        ids = np.arange(count).reshape(dims)
        return ids.transpose(order) if order else ids
    if listed := re.search(r"device_ids=\(([\d,]+)\)", attributes):
        return np.array([int(n) for n in listed[1].split(",")])
    return np.arange(count)


def trips(attributes: str, condition: Computation, body: Computation) -> int:
    """How often a `while` runs its body: what the compiler notes, else what its counter from 0 tells; 1 where it has
    none."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', attributes):
        return int(known[1])
    root = _root(condition)
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return 1
    counter, bound = (condition.get(name) for name in root.operands)
    index = re.search(r"index=(\d+)", counter.attributes) if counter else None
    if index is None or (most := _constant(bound)) is None:
        return 1
    new = body.get(_root(body).operands[int(index[1])])
    steps = [s for name in (new.operands if new else ()) if (s := _constant(body.get(name)))]
    return -(-most // steps[0]) if steps else most


def _root(computation: Computation) -> Instruction | None:
    return next((i for i in computation.values() if i.root), None)


def _constant(i: Instruction | None) -> int | None:
    return int(i.inside) if i and i.opcode == "constant" and i.inside.isdigit() else None


def summarize(text: str, rows: int = 0, *, scalars: bool = True) -> Summary:
    """What one device executes in one run of the compiled module `text`.

    Args:
      rows: the prime number of rows that marks what grows with them; 0: nothing does.
      scalars: whether an instruction on single numbers counts as a kernel: it does on an accelerator, which starts it
        like any other; inside a program on a CPU it takes next to no time.
    """
    return _Walk(text, rows, scalars).computation()


class _Walk:
    def __init__(self, text: str, rows: int, scalars: bool):
        self.computations, self.entry = parse(text)
        self.rows, self.scalars = rows, scalars
        count = re.search(r"num_partitions=(\d+)", text[: text.find("\n")])
        self.devices = int(count[1]) if count else 1
        self._done: dict[str, Summary] = {}

    def computation(self, name: str = "") -> Summary:
        name = name or self.entry
        if name not in self._done:
            self._done[name] = self._walk(self.computations[name])
        return self._done[name]

    def _walk(self, body: Computation) -> Summary:
        """Sums the instructions in their order; what runs while a collective is under way is its cover."""
        found: list[Summary] = []
        open_: dict[str, int] = {}  # collectives under way, the oldest first -> their place in `found`
        for i in body.values():
            if i.opcode.endswith("-done"):
                open_.pop(i.operands[0], None)
                continue
            part = self._one(i, body)
            if open_ and part.kernels:
                place = next(iter(open_.values()))
                found[place] = _covered(found[place], part)
            if i.opcode.endswith("-start") and len(part.collectives) == 1 and '"is_sync":true' not in i.attributes:
                open_[i.name] = len(found)
            found.append(part)
        return total(found)

    def _linear(self, size: int, amount: float) -> Linear:
        """`amount`, of something with `size` elements."""
        if self.rows and size % self.rows == 0:
            return Linear(0.0, amount / self.rows)
        return Linear(amount, 0.0)

    def _bytes(self, arrays: Iterable[Array], times: float = 1) -> Linear:
        return sum((self._linear(a.size, a.bytes * times) for a in arrays), NOTHING)

    def _called(self, i: Instruction, attribute: str) -> str:
        return re.search(rf"\b{attribute}=%?([\w.\-]+)", i.attributes)[1]

    def _one(self, i: Instruction, body: Computation) -> Summary:
        opcode = i.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Summary()
        if opcode == "while":
            names = self._called(i, "condition"), self._called(i, "body")
            step = total(self.computation(name) for name in names)
            return self._loop(step, trips(i.attributes, *(self.computations[name] for name in names)))
        if opcode == "call":
            return self.computation(self._called(i, "to_apply"))
        if opcode == "async-start":
            return self.computation(self._called(i, "calls"))
        if opcode == "conditional":
            names = re.search(r"branch_computations=\{(.*?)\}", i.attributes)
            branches = _NAME.findall(names[1] if names else i.attributes.split("metadata")[0])
            found = [self.computation(b) for b in branches if b in self.computations]
            return max(found, key=lambda s: s.steps, default=Summary())
        operands = [body[name] for name in i.operands if name in body]
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return self._collective(i, kind, operands)
        if opcode == "fusion":
            inner = self.computations[self._called(i, "calls")]
            return self._kernel(i, self._products(inner), self._fusion_bytes(i, inner, operands))
        return self._kernel(i, self._product(i, operands), self._plain_bytes(i, operands))

    def _kernel(self, i: Instruction, flops: Linear, volume: Linear) -> Summary:
        starts = bool(flops) or self.scalars or any(a.size > 1 for a in i.arrays)
        return Summary(kernels=(Kernel(flops, volume),), steps=float(starts))

    def _loop(self, step: Summary, times: int) -> Summary:
        if not self.rows or times % self.rows or step.flops or step.collectives:
            return step * times
        # A loop over rows is one operation (a scatter) that the compiler at hand spells out; it runs as one kernel.
        volume = Linear(0.0, (step.bytes.fixed + step.bytes.per_row) * times / self.rows)
        return Summary(kernels=(Kernel(NOTHING, volume),), steps=1.0)

    def _collective(self, i: Instruction, kind: str, operands: list[Instruction]) -> Summary:
        group = first_group(i.attributes, self.devices)
        if len(group) == 1:
            return Summary()
        arrays = [a for o in operands for a in o.arrays]
        # The result of a gather is `group` operands; the type of its "-start" holds both.
        volume = self._bytes(arrays, len(group) if kind == "all-gather" else 1)
        stride = max(1, (max(group) - min(group)) // (len(group) - 1))
        return Summary(collectives=(Collective(kind, len(group), stride, volume),), steps=0.0)

    def _plain_bytes(self, i: Instruction, operands: list[Instruction]) -> Linear:
        if i.opcode in _SLICES:
            return self._bytes(i.arrays, 2)
        if i.opcode == "dynamic-update-slice":
            return self._bytes(operands[1].arrays, 2)
        if i.opcode == "scatter":
            return self._bytes(operands[-1].arrays, 2)
        return self._bytes((*i.arrays, *(a for o in operands for a in o.arrays)))

    def _fusion_bytes(self, i: Instruction, inner: Computation, operands: list[Instruction]) -> Linear:
        """Results and operands, of which only the part that is touched counts: a slice that is read, and the slice
        or the rows that are written into an array in place."""
        amount = NOTHING
        root = _root(inner)
        updated = set()
        for result in [inner[n] for n in root.operands] if root.opcode == "tuple" else [root]:
            result = _source(result, inner)
            if result.opcode == "dynamic-update-slice":
                updated.add(_source(inner[result.operands[0]], inner).name)
                amount += self._bytes(inner[result.operands[1]].arrays)
            elif (
                result.opcode == "scatter" and (into := _source(inner[result.operands[0]], inner)).opcode == "parameter"
            ):
                updated.add(into.name)
                amount += self._bytes(inner[result.operands[-1]].arrays)
            else:
                amount += self._bytes(result.arrays)
        for parameter in (x for x in inner.values() if x.opcode == "parameter"):
            number = int(parameter.inside)
            if parameter.name in updated or number >= len(operands):
                continue
            readers = _readers(parameter.name, inner)
            if readers and all(r.opcode in _SLICES for r in readers):
                amount += self._bytes(a for r in readers for a in r.arrays)
            else:
                amount += self._bytes(operands[number].arrays)
        return amount

    def _products(self, computation: Computation) -> Linear:
        """Matrix operations in a fused computation and those nested in it."""
        amount = NOTHING
        for i in computation.values():
            if i.opcode in ("fusion", "call"):
                nested = self._called(i, "calls" if i.opcode == "fusion" else "to_apply")
                amount += self._products(self.computations[nested])
            else:
                amount += self._product(i, [computation[n] for n in i.operands if n in computation])
        return amount

    def _product(self, i: Instruction, operands: list[Instruction]) -> Linear:
        """Matrix operations of one instruction: 2 x result x contracted elements."""
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        if i.opcode == "custom-call" and target and "fmha" in target[1]:
            return self._attention(target[1], operands)
        matmul = i.opcode == "custom-call" and target and ("gemm" in target[1] or "matmul" in target[1])
        if i.opcode == "convolution":
            inner = _convolved(i, operands[1].arrays[0])
            return self._linear(i.arrays[0].size * inner, 2.0 * i.arrays[0].size * inner)
        if i.opcode != "dot" and not matmul:
            return NOTHING
        dims = re.search(r'"?lhs_contracting_dim(?:ension)?s"?[=:][{\["]*([\d,"]*)', i.attributes)
        left, result = operands[0].arrays[0], i.arrays[0]
        contracted = [int(n) for n in re.findall(r"\d+", dims[1])] if dims else [len(left.shape) - 1]
        inner = math.prod(left.shape[d] for d in contracted)
        return self._linear(result.size * inner, 2.0 * result.size * inner)

    def _attention(self, target: str, operands: list[Instruction]) -> Linear:
        """cuDNN attention over [B, T, heads, head_dim] or [B, heads, T, head_dim]: two products forward, five back."""
        query, key = operands[0].arrays[0], operands[1].arrays[0]
        products = 5 if "Backward" in target else 2
        # heads_q x T_q x T_k x head_dim, whichever order the two middle axes have
        keys = key.size // math.prod((key.shape[0], min(key.shape[1], key.shape[2]), key.shape[3]))
        return self._linear(query.size, 2.0 * products * query.size * keys)


def _convolved(i: Instruction, kernel: Array) -> int:
    """Numbers that are multiplied and summed into one result of a convolution, which is how the TPU compiler writes a
    product: the input features, and each window that slides over nothing. A padded or dilated window stands for a
    dimension that is not summed over."""
    inner = kernel.shape[re.search(r"dim_labels=\w+_(\w+)->", i.attributes)[1].index("i")]
    window = re.search(r"window=\{([^}]*)\}", i.attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    sizes = [int(n) for n in fields.get("size", "1").split("x")]
    pads = fields.get("pad", "x".join(["0_0"] * len(sizes))).split("x")
    dilated = fields.get("lhs_dilate", "x".join(["1"] * len(sizes))).split("x")
    for size, pad, dilation in zip(sizes, pads, dilated, strict=True):
        if pad == "0_0" and dilation == "1":
            inner *= size
    return inner


def _covered(collective: Summary, by: Summary) -> Summary:
    """`collective` with the kernels of `by` added to what runs beside it."""
    (c,) = collective.collectives
    volume = sum((k.bytes * k.count for k in by.kernels), c.cover_bytes)
    c = dataclasses.replace(c, cover_flops=c.cover_flops + by.flops, cover_bytes=volume)
    return dataclasses.replace(collective, collectives=(c,))


def _source(i: Instruction, computation: Computation) -> Instruction:
    """What `i` is a plain view of."""
    while i.opcode in ("bitcast", "copy", "convert") and i.operands:
        i = computation[i.operands[0]]
    return i


def _readers(name: str, computation: Computation) -> list[Instruction]:
    found = []
    for i in computation.values():
        if name in i.operands:
            found += _readers(i.name, computation) if i.opcode == "bitcast" else [i]
    return found
