"""Worker threads that share out one job after another in small pieces.

A job is a function over items 0..n-1. Whoever is free claims the next few items; the caller works too, and waits only
for pieces that are in hand: a thread that the system has put aside between two pieces holds up nobody. Waiting threads
spin for some microseconds, then sleep in the kernel, so that a neighbour who wants the core gets it.

The ticket, one 64-bit word, holds the job's number above the count of items nobody has claimed yet: claiming is one
compare-and-swap, and one that was prepared for an earlier job fails.
"""

from llvmlite import ir

from engine.kernels.compiled.isa import CPUPath
from engine.kernels.compiled.lang import I32, I64, PTR, VOID, Function, Value

_TICKET, _DONE, EPOCH, _SLEEPERS, _CALLER_SLEEPS, STOP = (64 * line for line in range(6))
_JOB = 64 * 6
_FUNCTION, _FRAME, _LAYER, _COUNT, _PIECE = (_JOB + 8 * i for i in range(5))
_SYSTEM = 64 * 7
SYSCALL, FUTEX, YIELD, THREADS = (_SYSTEM + 8 * i for i in range(4))
CONTROL_BYTES = 64 * 8
"""The control block. What threads write often has a cache line of its own."""

# Some 30 microseconds: longer than the gap between two jobs, shorter than anybody's patience. A pause takes three times
# as long on some CPUs as on others, so that turns are counted only where a program may not read the cycle counter.
_SPIN_TICKS, _SPIN_TURNS = 70_000, 2000
_FUTEX_WAIT, FUTEX_WAKE = 128, 129  # with FUTEX_PRIVATE_FLAG, from linux/futex.h
_LOW_HALF = 0xFFFFFFFF
_EVERYBODY = 1 << 30


class Pool:
    """The IR of the pool in one module: `run` hands out a job, `worker` is a thread's whole life."""

    def __init__(self, module: ir.Module, path: CPUPath) -> None:
        self._module = module
        self._is_x86 = path.triple.startswith("x86_64")
        self._work = self._build_work()
        self._run = self._build_run()
        self._build_worker()

    def run(self, f: Function, job: Function, layer: Value, count: Value, together: int) -> None:
        """Emit into `f`: `job(frame, layer, begin, end)` for all of 0..count-1, complete before what follows.

        Pieces are multiples of `together`, but the last. `f` has parameters `control` and `frame`.
        """
        address = Value(f.builder, f.builder.ptrtoint(job.ir, I64))
        f.call(self._run, f["control"], address, f["frame"], layer, count, f.constant(I64, together))

    def _build_work(self) -> Function:
        """Claim pieces of the current job and do them until none is left; true if any was done."""
        f = Function(self._module, f"{self._module.name}.work", [("control", PTR)], result=I64)
        control = f["control"]
        any_done = f.variable(f.constant(I64, 0))
        with f.forever() as loop:
            ticket = (control + _TICKET).load_atomic(I64)
            unclaimed = ticket & _LOW_HALF
            loop.leave_if(unclaimed.equals(0))
            taken = (control + _PIECE).load_atomic(I64).minimum(unclaimed)
            with f.when((control + _TICKET).swap_atomic_if(ticket, ticket - taken)):
                # The job cannot end before this piece does, so its description stands still from here on.
                begin = (control + _COUNT).load_atomic(I64) - unclaimed
                f.call_address(
                    (control + _FUNCTION).load_atomic(I64),
                    VOID,
                    (control + _FRAME).load_atomic(I64).as_pointer(),
                    (control + _LAYER).load_atomic(I64).as_pointer(),
                    begin,
                    begin + taken,
                )
                (control + _DONE).add_atomic(taken.to(I32))
                any_done.value = f.constant(I64, 1)
        return f.finish(any_done.value)

    def _build_run(self) -> Function:
        f = Function(
            self._module,
            f"{self._module.name}.run",
            [("control", PTR), ("function", I64), ("frame", PTR), ("layer", PTR), ("count", I64), ("together", I64)],
        )
        control, count = f["control"], f["count"]
        threads = (control + THREADS).load(I64)
        alone = (count <= f["together"]) | threads.equals(1)
        with f.when(alone):
            f.call_address(f["function"], VOID, f["frame"], f["layer"], f.constant(I64, 0), count)
        with f.otherwise(alone):
            self._share_out(f, control, count, threads)
        return f.finish()

    def _share_out(self, f: Function, control: Value, count: Value, threads: Value) -> None:
        for field, value in (
            (_FUNCTION, f["function"]),
            (_FRAME, f["frame"].as_address()),
            (_LAYER, f["layer"].as_address()),
            (_COUNT, count),
            # Some eight pieces a thread: the last one to finish is waited for by the others.
            (_PIECE, (count // (threads * 8 * f["together"])).maximum(f.constant(I64, 1)) * f["together"]),
        ):
            (control + field).store_atomic(value)
        (control + _DONE).store_atomic(f.constant(I32, 0))
        job_number = ((control + _TICKET).load_atomic(I64) >> 32) + 1
        (control + _TICKET).store_atomic((job_number << 32) | count)
        (control + EPOCH).add_atomic(f.constant(I32, 1))
        with f.when((control + _SLEEPERS).load_atomic(I32) > 0):
            self._wake(f, control + EPOCH)
        f.call(self._work, control)

        total = count.to(I32)
        patience = _Patience(f, self._is_x86)
        with f.forever() as loop:
            done = (control + _DONE).load_atomic(I32)
            loop.leave_if(done.equals(total))
            self._pause(f)
            with f.when(patience.is_over()):
                (control + _CALLER_SLEEPS).store_atomic(f.constant(I32, 1))
                self._sleep_while(f, control + _DONE, done)
                (control + _CALLER_SLEEPS).store_atomic(f.constant(I32, 0))

    def _build_worker(self) -> None:
        f = Function(self._module, f"{self._module.name}.worker", [("control", PTR)], exported=True)
        control = f["control"]
        patience = _Patience(f, self._is_x86)
        with f.forever() as loop:
            loop.leave_if((control + STOP).load_atomic(I32).differs(0))
            epoch = (control + EPOCH).load_atomic(I32)
            worked = f.call(self._work, control)
            with f.when(worked.differs(0)):
                patience.begin()
                with f.when((control + _CALLER_SLEEPS).load_atomic(I32).differs(0)):
                    self._wake(f, control + _DONE)
            self._pause(f)
            with f.when(patience.is_over()):
                (control + _SLEEPERS).add_atomic(f.constant(I32, 1))
                self._sleep_while(f, control + EPOCH, epoch)
                (control + _SLEEPERS).add_atomic(f.constant(I32, -1))
                patience.begin()
        f.finish()

    def _pause(self, f: Function) -> None:
        """Tell the core that this is a waiting loop."""
        if self._is_x86:
            f.intrinsic("llvm.x86.sse2.pause", VOID)

    def _wake(self, f: Function, word: Value) -> None:
        self._futex(f, word, FUTEX_WAKE, f.constant(I64, _EVERYBODY))

    def _sleep_while(self, f: Function, word: Value, value: Value) -> None:
        """Sleep until woken, not at all if `word` no longer holds `value`; without futexes, only yield."""
        self._futex(f, word, _FUTEX_WAIT, value.to(I64))
        with f.when((f["control"] + SYSCALL).load(I64).equals(0)):
            f.call_address((f["control"] + YIELD).load(I64), I32)

    def _futex(self, f: Function, word: Value, operation: int, value: Value) -> None:
        control = f["control"]
        syscall = (control + SYSCALL).load(I64)
        with f.when(syscall.differs(0)):
            zero = f.constant(I64, 0)
            number = (control + FUTEX).load(I64)
            f.call_address(syscall, I64, number, word, f.constant(I64, operation), value, zero, zero, zero)


class _Patience:
    """How long a thread of `f` has been waiting since `begin`, or since this was made."""

    def __init__(self, f: Function, has_ticks: bool) -> None:
        self._f = f
        self._has_ticks = has_ticks
        self._begun = f.variable(self._now())

    def begin(self) -> None:
        """Wait anew from here on."""
        self._begun.value = self._now()

    def is_over(self) -> Value:
        """Whether it is time to sleep. Asked once a turn."""
        if self._has_ticks:
            return self._now() - self._begun.value > _SPIN_TICKS
        self._begun.value = self._begun.value + 1
        return self._begun.value > _SPIN_TURNS

    def _now(self) -> Value:
        return self._f.intrinsic("llvm.readcyclecounter", I64) if self._has_ticks else self._f.constant(I64, 0)
