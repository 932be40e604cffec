"""A small language for writing kernels: Python that builds LLVM IR, one function at a time.

A `Function` is a kernel under construction; its `Value`s carry operators, so that kernels read as arithmetic. Loops and
branches are `with` blocks and run in the compiled code; plain Python loops unroll. Rules of the language:

- no fast-math flag is ever set: every float operation rounds once, in the order written, so a result does not depend
  on the loop it is computed in;
- comparisons are signed; `//`, `%` and `>>` are unsigned;
- a scalar beside a vector is broadcast; a Python number takes the other operand's type;
- a pointer plus an integer counts bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union

from llvmlite import ir
from llvmlite.ir.instructions import StoreAtomicInstr

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR = ir.PointerType()
VOID = ir.VoidType()
LANES = 16
"""Width of every vector, whatever the CPU: LLVM splits it into the registers there are."""

Operand = Union["Value", int, float]


def vector(element: ir.Type, count: int = LANES) -> ir.Type:
    """The vector type of `count` elements."""
    return ir.VectorType(element, count)


F32x16, F16x16, I32x16, I16x16, I8x16 = (vector(t) for t in (F32, F16, I32, I16, I8))
I8x64 = vector(I8, 64)


class Value:
    """One SSA value with operators; see the module's rules."""

    __slots__ = ("builder", "ir")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.ir = value

    @property
    def type(self) -> ir.Type:
        """LLVM's type of this value."""
        return self.ir.type

    @property
    def is_vector(self) -> bool:
        """Whether there are lanes."""
        return isinstance(self.type, ir.VectorType)

    @property
    def element(self) -> ir.Type:
        """The type of one lane, or of a scalar."""
        return self.type.element if self.is_vector else self.type

    @property
    def is_float(self) -> bool:
        """Whether lanes are floating point."""
        return not isinstance(self.element, ir.IntType)

    def _with(self, value: ir.Value) -> "Value":
        return Value(self.builder, value)

    def _coerce(self, other: Operand) -> ir.Value:
        if not isinstance(other, Value):
            return constant(self.builder, self.type, other).ir
        if self.is_vector and not other.is_vector:
            return other.splat(self.type.count).ir
        return other.ir

    def _binary(self, other: Operand, on_int: str, on_float: str) -> "Value":
        if isinstance(other, Value) and other.is_vector and not self.is_vector:
            return self.splat(other.type.count)._binary(other, on_int, on_float)  # noqa: SLF001 - of this class
        operation = getattr(self.builder, on_float if self.is_float else on_int)
        return self._with(operation(self.ir, self._coerce(other)))

    def __add__(self, other: Operand) -> "Value":
        if self.type == PTR:
            index = other if isinstance(other, Value) else constant(self.builder, I64, other)
            return self._with(self.builder.gep(self.ir, [index.ir], source_etype=I8))
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Operand) -> "Value":
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Operand) -> "Value":
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Operand) -> "Value":
        assert self.is_float
        return self._binary(other, "fdiv", "fdiv")

    def __floordiv__(self, other: Operand) -> "Value":
        return self._binary(other, "udiv", "")

    def __mod__(self, other: Operand) -> "Value":
        return self._binary(other, "urem", "")

    def __and__(self, other: Operand) -> "Value":
        return self._binary(other, "and_", "")

    def __or__(self, other: Operand) -> "Value":
        return self._binary(other, "or_", "")

    def __xor__(self, other: Operand) -> "Value":
        return self._binary(other, "xor", "")

    def __lshift__(self, other: Operand) -> "Value":
        return self._binary(other, "shl", "")

    def __rshift__(self, other: Operand) -> "Value":
        return self._binary(other, "lshr", "")

    def arithmetic_shift_right(self, other: Operand) -> "Value":
        """This shifted right, the sign bit coming in."""
        return self._binary(other, "ashr", "")

    def __neg__(self) -> "Value":
        return self._with(self.builder.fneg(self.ir) if self.is_float else self.builder.neg(self.ir))

    def _compare(self, operator: str, other: Operand) -> "Value":
        compare = self.builder.fcmp_ordered if self.is_float else self.builder.icmp_signed
        return self._with(compare(operator, self.ir, self._coerce(other)))

    def __lt__(self, other: Operand) -> "Value":
        return self._compare("<", other)

    def __le__(self, other: Operand) -> "Value":
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> "Value":
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> "Value":
        return self._compare(">=", other)

    def equals(self, other: Operand) -> "Value":
        """Whether this is `other`, lane by lane (`==` would compare Python objects)."""
        return self._compare("==", other)

    def differs(self, other: Operand) -> "Value":
        """Whether this is not `other`."""
        return self._compare("!=", other)

    def select(self, if_true: "Value", if_false: "Value") -> "Value":
        """`if_true` where this condition holds, else `if_false`."""
        return self._with(self.builder.select(self.ir, if_true.ir, if_false.ir))

    def minimum(self, other: "Value") -> "Value":
        """The lesser of the two, lane by lane."""
        return (self < other).select(self, other)

    def maximum(self, other: "Value") -> "Value":
        """The greater of the two, lane by lane."""
        return (self > other).select(self, other)

    def splat(self, count: int = LANES) -> "Value":
        """A vector with this scalar in every lane."""
        undefined = ir.Constant(vector(self.type, count), ir.Undefined)
        first = self.builder.insert_element(undefined, self.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(vector(I32, count), [0] * count)
        return self._with(self.builder.shuffle_vector(first, undefined, zeros))

    def shuffle(self, lanes: Iterable[int]) -> "Value":
        """The vector whose lane i is lane `lanes[i]` of this one."""
        chosen = list(lanes)
        mask = ir.Constant(vector(I32, len(chosen)), chosen)
        return self._with(self.builder.shuffle_vector(self.ir, ir.Constant(self.type, ir.Undefined), mask))

    def concatenate(self, other: "Value") -> "Value":
        """This vector's lanes, then those of `other`, which has as many."""
        count = 2 * self.type.count
        mask = ir.Constant(vector(I32, count), list(range(count)))
        return self._with(self.builder.shuffle_vector(self.ir, other.ir, mask))

    def lane(self, index: int) -> "Value":
        """One lane."""
        return self._with(self.builder.extract_element(self.ir, ir.Constant(I32, index)))

    def bitcast(self, to: ir.Type) -> "Value":
        """The same bits as another type."""
        return self._with(self.builder.bitcast(self.ir, to))

    def to(self, element: ir.Type) -> "Value":
        """Every lane converted to `element`: integers sign-extend or truncate, floats round to nearest even."""
        target = vector(element, self.type.count) if self.is_vector else element
        source, to_float = self.element, not isinstance(element, ir.IntType)
        if source == element:
            return self
        if self.is_float and to_float:
            operation = "fpext" if _size(element) > _size(source) else "fptrunc"
        elif self.is_float:
            operation = "fptosi"
        elif to_float:
            operation = "sitofp"
        else:
            operation = "sext" if element.width > source.width else "trunc"
        return self._with(getattr(self.builder, operation)(self.ir, target))

    def zero_extend(self, element: ir.Type) -> "Value":
        """Every lane converted to the wider integer `element`, unsigned."""
        target = vector(element, self.type.count) if self.is_vector else element
        return self._with(self.builder.zext(self.ir, target))

    def as_address(self) -> "Value":
        """This pointer as an integer."""
        return self._with(self.builder.ptrtoint(self.ir, I64))

    def as_pointer(self) -> "Value":
        """This integer as a pointer."""
        return self._with(self.builder.inttoptr(self.ir, PTR))

    def load(self, kind: ir.Type) -> "Value":
        """The `kind` stored at this pointer; vectors need only their element's alignment."""
        instruction = self.builder.load(self.ir, typ=kind)
        instruction.align = _alignment(kind)
        return self._with(instruction)

    def store(self, value: "Value") -> None:
        """Write `value` at this pointer."""
        self.builder.store(value.ir, self.ir).align = _alignment(value.type)

    def prefetch(self, locality: int = 3) -> None:
        """Ask for the cache line at this pointer, which need not be valid; `locality` 3 is L1, 2 is L2."""
        name = "llvm.prefetch.p0"
        module = self.builder.module
        known = module.globals.get(name)
        if known is None:
            known = ir.Function(module, ir.FunctionType(VOID, [PTR, I32, I32, I32]), name)
        read, data = ir.Constant(I32, 0), ir.Constant(I32, 1)
        self.builder.call(known, [self.ir, read, ir.Constant(I32, locality), data])

    def load_atomic(self, kind: ir.Type) -> "Value":
        """The integer at this pointer; atomics here are sequentially consistent."""
        return self._with(self.builder.load_atomic(self.ir, "seq_cst", kind.width // 8, typ=kind))

    def store_atomic(self, value: "Value") -> None:
        """Write the integer `value` at this pointer."""
        # `IRBuilder.store_atomic` asks the pointer for its element type, which an opaque one does not have.
        instruction = StoreAtomicInstr(self.builder.block, value.ir, self.ir, "seq_cst", value.type.width // 8)
        self.builder._insert(instruction)  # noqa: SLF001

    def add_atomic(self, value: "Value") -> "Value":
        """What was stored at this pointer before `value` was added to it."""
        return self._with(self.builder.atomic_rmw("add", self.ir, value.ir, "seq_cst"))

    def swap_atomic_if(self, expected: "Value", new: "Value") -> "Value":
        """True if the value at this pointer was `expected` and now is `new`."""
        pair = self.builder.cmpxchg(self.ir, expected.ir, new.ir, "seq_cst", "seq_cst")
        return self._with(self.builder.extract_value(pair, 1))


def constant(builder: ir.IRBuilder, kind: ir.Type, value: float) -> Value:
    """`value` as a `kind`, in every lane of a vector."""
    if isinstance(kind, ir.VectorType):
        return Value(builder, ir.Constant(kind, [value] * kind.count))
    return Value(builder, ir.Constant(kind, value))


def _size(kind: ir.Type) -> int:
    sizes = {F16: 2, F32: 4, F64: 8, PTR: 8}
    return sizes[kind] if kind in sizes else max(1, kind.width // 8)


def _alignment(kind: ir.Type) -> int:
    return _size(kind.element if isinstance(kind, ir.VectorType) else kind)


class Variable:
    """A local that loops may change. LLVM keeps it in a register."""

    __slots__ = ("_kind", "_slot")

    def __init__(self, slot: Value, kind: ir.Type) -> None:
        self._slot = slot
        self._kind = kind

    @property
    def value(self) -> Value:
        """What the variable holds here."""
        return self._slot.load(self._kind)

    @value.setter
    def value(self, value: Value) -> None:
        self._slot.store(value)


class Loop:
    """The handle of `Function.forever`."""

    def __init__(self, function: "Function", after: ir.Block) -> None:
        self._function = function
        self._after = after

    def leave_if(self, condition: Value) -> None:
        """Continue behind the loop when `condition` holds."""
        builder = self._function.builder
        stay = builder.append_basic_block()
        builder.cbranch(condition.ir, self._after, stay)
        builder.position_at_end(stay)


class Layout:
    """Names for the 8-byte fields of a record in memory that Python fills and kernels read."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.size = 8 * len(names)
        self._offsets = {name: 8 * i for i, name in enumerate(names)}

    def at(self, record: Value, name: str) -> Value:
        """Where field `name` of `record` is."""
        return record + self._offsets[name]

    def get(self, record: Value, name: str, kind: ir.Type = I64) -> Value:
        """Field `name` of `record`."""
        return self.at(record, name).load(kind)

    def index(self, name: str) -> int:
        """Which of the fields `name` is."""
        return self._offsets[name] // 8

    def pack(self, **values: int) -> list[int]:
        """The fields in order; every one must be given."""
        assert values.keys() == set(self.names), f"fields {set(self.names) ^ values.keys()}"
        return [values[name] for name in self.names]


class Function:
    """A function under construction in `module`; arguments are attributes of `args`."""

    def __init__(
        self,
        module: ir.Module,
        name: str,
        params: Sequence[tuple[str, ir.Type]],
        *,
        exported: bool = False,
        result: ir.Type = VOID,
    ) -> None:
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(result, [kind for _, kind in params]), name)
        if not exported:
            self.ir.linkage = "internal"
        self._entry = self.ir.append_basic_block("entry")
        body = self.ir.append_basic_block("body")
        self._locals = ir.IRBuilder(self._entry)
        self._locals.branch(body)
        self._locals.position_before(self._entry.terminator)
        self.builder = ir.IRBuilder(body)
        self._params = {name: Value(self.builder, arg) for (name, _), arg in zip(params, self.ir.args, strict=True)}

    def __getitem__(self, param: str) -> Value:
        return self._params[param]

    def constant(self, kind: ir.Type, value: float) -> Value:
        """`value` as a `kind`, in every lane of a vector."""
        return constant(self.builder, kind, value)

    def variable(self, initial: Value) -> Variable:
        """A local that begins as `initial`."""
        slot = Value(self.builder, self._locals.alloca(initial.type))
        slot.store(initial)
        return Variable(slot, initial.type)

    def scratch(self, n_bytes: int) -> Value:
        """Pointer to `n_bytes` on the stack, aligned for vectors."""
        slot = self._locals.alloca(ir.ArrayType(I8, n_bytes))
        slot.align = 64
        slot.type = PTR  # llvmlite would tie the pointer to the array's type
        return Value(self.builder, slot)

    @contextmanager
    def range(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """The body once for start, start + step, ... below `stop`; as Python's, it may run not at all."""
        counter = self.variable(start if isinstance(start, Value) else self.constant(I64, start))
        with self.forever() as loop:
            index = counter.value
            loop.leave_if(index >= stop)
            yield index
            counter.value = index + step

    @contextmanager
    def forever(self) -> Iterator[Loop]:
        """The body again and again until `leave_if`."""
        builder = self.builder
        body, after = builder.append_basic_block(), builder.append_basic_block()
        builder.branch(body)
        builder.position_at_end(body)
        yield Loop(self, after)
        builder.branch(body)
        builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body if `condition` holds."""
        body, after = self.builder.append_basic_block(), self.builder.append_basic_block()
        self.builder.cbranch(condition.ir, body, after)
        self.builder.position_at_end(body)
        yield
        self.builder.branch(after)
        self.builder.position_at_end(after)

    @contextmanager
    def otherwise(self, condition: Value) -> Iterator[None]:
        """The body if `condition` does not hold."""
        with self.when(condition ^ self.constant(I1, 1)):
            yield

    def call(self, function: "Function", *args: Value) -> Value:
        """A function of the same module, called."""
        return Value(self.builder, self.builder.call(function.ir, [a.ir for a in args]))

    def call_address(self, address: Value, result: ir.Type, *args: Value) -> Value:
        """The C function at `address`, called."""
        kind = ir.FunctionType(result, [a.type for a in args])
        pointer = self.builder.inttoptr(address.ir, kind.as_pointer())
        return Value(self.builder, self.builder.call(pointer, [a.ir for a in args]))

    def intrinsic(self, name: str, result: ir.Type, *args: Value) -> Value:
        """The LLVM intrinsic `name`, called."""
        known: Any = self.module.globals.get(name)
        if known is None:
            known = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return Value(self.builder, self.builder.call(known, [a.ir for a in args]))

    def finish(self, result: Value | None = None) -> "Function":
        """End the function, returning `result`."""
        if result is None:
            self.builder.ret_void()
        else:
            self.builder.ret(result.ir)
        return self
