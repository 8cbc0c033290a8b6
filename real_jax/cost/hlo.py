"""Optimized HLO text -> what one device executes: matrix operations, bytes, kernels and collectives. Pure.

The compiler's own cost analysis counts a loop body once and mixes all operations; here a body counts as often as the
compiler says that it runs. A program may be compiled with a number of rows per device that is prime and divides no
other dimension: whatever has a multiple of that many elements grows with the rows, all else stays. So one compile
tells the cost of any number of rows.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

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
class Linear:
    """A quantity that is `fixed + per_row x rows` of a device."""

    fixed: float = 0.0
    per_row: float = 0.0

    def at(self, rows: float) -> float:
        return self.fixed + self.per_row * rows

    def __add__(self, other: "Linear") -> "Linear":
        return Linear(self.fixed + other.fixed, self.per_row + other.per_row)

    def __mul__(self, factor: float) -> "Linear":
        return Linear(self.fixed * factor, self.per_row * factor)


@dataclasses.dataclass(frozen=True)
class Product:
    """Kernels that hold the same matrix product.

    Attributes:
      flops: floating-point operations of one; a multiply-add counts as two.
      bytes: read and written by one.
      count: how many.
    """

    flops: Linear
    bytes: Linear
    count: float


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind among groups of `group` devices.

    Attributes:
      bytes: of the full array on one device, over all of them: the operand of a reduction, the result of a gather.
      count: how many.
    """

    kind: str
    group: int
    bytes: Linear
    count: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """What one device executes.

    Attributes:
      products: kernels with a matrix product; at most one entry per flops and bytes.
      bytes: read and written by all other kernels.
      kernels: instructions executed (fusions, products, copies, loop steps).
      collectives: at most one entry per kind and group size.
    """

    products: tuple[Product, ...] = ()
    bytes: Linear = Linear()
    kernels: float = 0.0
    collectives: tuple[Collective, ...] = ()

    @property
    def flops(self) -> Linear:
        """Floating-point operations of all matrix products."""
        return sum((p.flops * p.count for p in self.products), Linear())

    def __add__(self, other: "Summary") -> "Summary":
        products: dict[tuple[Linear, Linear], float] = {}
        for p in (*self.products, *other.products):
            products[p.flops, p.bytes] = products.get((p.flops, p.bytes), 0.0) + p.count
        collectives: dict[tuple[str, int], tuple[Linear, float]] = {}
        for c in (*self.collectives, *other.collectives):
            volume, count = collectives.get((c.kind, c.group), (Linear(), 0.0))
            collectives[c.kind, c.group] = (volume + c.bytes, count + c.count)
        return Summary(
            tuple(Product(*key, count) for key, count in products.items() if count),
            self.bytes + other.bytes,
            self.kernels + other.kernels,
            tuple(Collective(*key, *value) for key, value in sorted(collectives.items()) if value[1]),
        )

    def __mul__(self, times: float) -> "Summary":
        return Summary(
            tuple(dataclasses.replace(p, count=p.count * times) for p in self.products),
            self.bytes * times,
            self.kernels * times,
            tuple(dataclasses.replace(c, bytes=c.bytes * times, count=c.count * times) for c in self.collectives),
        )


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


def group_size(attributes: str, devices: int) -> int:
    """Devices that take part in one collective; `devices` where the text names no groups."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if mesh := re.search(r"replica_groups=@?mesh\[(.*?)\].*?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    return 2 if "source_target_pairs=" in attributes else devices


def trips(attributes: str) -> int:
    """How often a `while` runs its body, as far as the compiler knows; else 1."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', attributes)
    return int(known[1]) if known else 1


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
            total, body = Summary(), self.computations[name]
            for instruction in body.values():
                total += self._one(instruction, body)
            self._done[name] = total
        return self._done[name]

    def _linear(self, size: int, amount: float) -> Linear:
        """`amount`, of something with `size` elements."""
        if self.rows and size % self.rows == 0:
            return Linear(0.0, amount / self.rows)
        return Linear(amount, 0.0)

    def _bytes(self, arrays: Iterable[Array], times: float = 1) -> Linear:
        return sum((self._linear(a.size, a.bytes * times) for a in arrays), Linear())

    def _called(self, i: Instruction, attribute: str) -> str:
        return re.search(rf"\b{attribute}=%?([\w.\-]+)", i.attributes)[1]

    def _one(self, i: Instruction, body: Computation) -> Summary:
        opcode = i.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Summary()
        if opcode == "while":
            step = self.computation(self._called(i, "body")) + self.computation(self._called(i, "condition"))
            return self._loop(step, trips(i.attributes))
        if opcode == "call":
            return self.computation(self._called(i, "to_apply"))
        if opcode == "async-start":
            return self.computation(self._called(i, "calls"))
        if opcode == "conditional":
            names = re.search(r"branch_computations=\{(.*?)\}", i.attributes)
            branches = _NAME.findall(names[1] if names else i.attributes.split("metadata")[0])
            found = [self.computation(b) for b in branches if b in self.computations]
            return max(found, key=lambda s: s.kernels, default=Summary())
        operands = [body[name] for name in i.operands if name in body]
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return self._collective(i, kind, operands)
        if opcode == "fusion":
            inner = self.computations[self._called(i, "calls")]
            return self._kernel(i, self._products(inner), self._fusion_bytes(i, inner, operands))
        return self._kernel(i, self._product(i, operands), self._plain_bytes(i, operands))

    def _kernel(self, i: Instruction, flops: Linear, volume: Linear) -> Summary:
        if flops != Linear():
            return Summary(products=(Product(flops, volume, 1.0),), kernels=1.0)
        return Summary(bytes=volume, kernels=float(self.scalars or any(a.size > 1 for a in i.arrays)))

    def _loop(self, step: Summary, times: int) -> Summary:
        if not self.rows or times % self.rows or step.products or step.collectives:
            return step * times
        # A loop over rows is one operation (a scatter) that the compiler at hand spells out; it runs as one kernel.
        volume = Linear(0.0, (step.bytes.fixed + step.bytes.per_row) * times / self.rows)
        return Summary(bytes=volume, kernels=1.0)

    def _collective(self, i: Instruction, kind: str, operands: list[Instruction]) -> Summary:
        group = group_size(i.attributes, self.devices)
        if group == 1:
            return Summary()
        arrays = [a for o in operands for a in o.arrays]
        if kind == "all-gather":  # its result is `group` operands; of a "-start" the type holds both
            volume = self._bytes(arrays, group)
        else:
            volume = self._bytes(arrays)
        return Summary(collectives=(Collective(kind, group, volume, 1.0),))

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
        that is written into an array in place."""
        total = Linear()
        root = next(x for x in inner.values() if x.root)
        updated = set()
        for result in [inner[n] for n in root.operands] if root.opcode == "tuple" else [root]:
            result = _source(result, inner)
            if result.opcode == "dynamic-update-slice":
                updated.add(_source(inner[result.operands[0]], inner).name)
                total += self._bytes(inner[result.operands[1]].arrays)
            else:
                total += self._bytes(result.arrays)
        for parameter in (x for x in inner.values() if x.opcode == "parameter"):
            number = int(parameter.inside)
            if parameter.name in updated or number >= len(operands):
                continue
            readers = _readers(parameter.name, inner)
            if readers and all(r.opcode in _SLICES for r in readers):
                total += self._bytes(a for r in readers for a in r.arrays)
            else:
                total += self._bytes(operands[number].arrays)
        return total

    def _products(self, computation: Computation) -> Linear:
        """Matrix operations in a fused computation and those nested in it."""
        total = Linear()
        for i in computation.values():
            if i.opcode in ("fusion", "call"):
                nested = self._called(i, "calls" if i.opcode == "fusion" else "to_apply")
                total += self._products(self.computations[nested])
            else:
                total += self._product(i, [computation[n] for n in i.operands if n in computation])
        return total

    def _product(self, i: Instruction, operands: list[Instruction]) -> Linear:
        """Matrix operations of one instruction: 2 x result x contracted elements."""
        target = re.search(r'custom_call_target="([^"]*)"', i.attributes)
        if i.opcode == "custom-call" and target and "fmha" in target[1]:
            return self._attention(target[1], operands)
        matmul = i.opcode == "custom-call" and target and ("gemm" in target[1] or "matmul" in target[1])
        if i.opcode != "dot" and not matmul:
            return Linear()
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
