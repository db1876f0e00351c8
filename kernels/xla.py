"""Call a function in JAX with PyTorch's tensors: what the backends `xla` of all ops share.

jax.jit compiles the function with XLA for each combination of shapes and dtypes, which takes 0.1 s or more. DLPack
passes tensors in both directions without a copy. XLA takes only contiguous tensors whose address is a multiple
of 64 bytes, so call() copies others, such as the views of a packed q, k and v.

The backward is jax.vjp's. It saves the inputs, the outputs and the results of matmuls. jax.checkpoint recomputes all
else, and XLA fuses that into the backward. Saved inputs and outputs are not copied. Arguments that need no gradient get
none.

On a GPU, XLA launches its kernels on a stream of its own, and nothing here waits on the host:

    before    for each input, XLA's stream waits for PyTorch's current stream
    after     for each result, PyTorch's current stream waits for XLA's stream
    memory    PyTorch may free an input when call() ends, because PyTorch's stream then waits until XLA has read it.
              XLA may write to a result that PyTorch freed, because its next call waits for PyTorch's stream

A call costs the host about 0.1 ms a tensor: 2 ms for mlp, forward and backward, on one core of an AMD EPYC. A CUDA
graph cannot contain such a call, and torch.compile cannot trace it: both are refused. XLA's
allocator owns the results, so torch.cuda.max_memory_allocated() does not count them.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from common.memory import OTHER_PEAKS
from kernels.compat import FakeTensor
from kernels.direct import refuse_second_derivative
from kernels.gpu import package_unavailable
from kernels.names import override_key
from kernels.registry import Unavailable

RUNTIME = "XLA"
ALIGNMENT = 64  # bytes. JAX would copy another tensor silently
KEPT = "kept"  # checkpoint_name() of tensors that the backward saves besides the results of matmuls
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_UNORDERED = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT"


def unavailable(device: torch.device) -> str | None:
    if reason := package_unavailable("jax>=0.10", "jax.enable_x64"):
        return reason
    if device.type == "cpu":
        return None
    if os.environ.get(_UNORDERED, "0").lower() not in ("", "0", "false"):
        return f"with {_UNORDERED} JAX does not wait for PyTorch's stream: unset it"
    try:
        start_jax().devices(device.type)
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), "no reason given")
        return f"this JAX has no device {device.type} ({reason}): pip install 'jax[cuda13]', or choose device=cpu"
    return None


def detail(**inputs: Any) -> str:
    device = next((value.device.type for value in inputs.values() if isinstance(value, Tensor)), "cpu")
    return f"jax {version('jax')}, XLA {version('jaxlib')}{', matmuls by its autotuner' if device == 'cuda' else ''}"


@functools.cache
def start_jax() -> Any:
    """Return the module jax, with its devices. It allocates a GPU's memory on demand, unless the user set the variable.

    By default it would allocate 75% at once. JAX reads the variable only here, so it is not left in the environment.
    """
    import jax

    unset = _PREALLOCATE not in os.environ
    os.environ.setdefault(_PREALLOCATE, "false")
    try:
        jax.devices()
    finally:
        if unset:
            del os.environ[_PREALLOCATE]
    return jax


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that XLA has held on a GPU since it started. PyTorch does not count them.

    It is 0 if the user's XLA_PYTHON_CLIENT_ALLOCATOR keeps no count.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return (start_jax().local_devices(backend=device.type)[index].memory_stats() or {}).get("peak_bytes_in_use", 0)


@contextlib.contextmanager
def settings() -> Iterator[Any]:
    """Yield the module jax. Within this context, JAX keeps 64-bit dtypes, and multiplies fp32 without TF32."""
    jax = start_jax()
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield jax


class Derivative(NamedTuple):
    """Rebuilds the function of jax.vjp from its leaves. `sources[i]` is the index of leaf i in inputs + outputs.

    It is None if leaf i is saved by itself.
    """

    tree: Any
    sources: tuple[int | None, ...]

    def __call__(self, *leaves: Any) -> Callable:
        return self.tree.unflatten(leaves)


class Program(NamedTuple):
    """The jitted functions of a call.

    compute(*arrays) -> outputs; differentiate(*arrays) -> outputs and a Partial of a Derivative, with its residuals;
    backward(partial, douts) -> the gradients of the wanted arguments
    """

    compute: Callable
    differentiate: Callable
    backward: Callable


programs: dict[Callable, tuple[str, str]] = {}  # jitted function -> its op and its name
compiled: dict[tuple, tuple] = {}  # (jitted function, shape, dtype and device of each tensor) -> abstract arguments


@functools.cache
def program(op: str, function: Callable, options: tuple[tuple[str, Any], ...], wanted: tuple[int, ...]) -> Program:
    """Return the Program of function(*arrays, **options), with gradients of the arguments in `wanted`."""
    jax = start_jax()
    policies = jax.checkpoint_policies
    policy = policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names(KEPT))

    def outputs(*arrays: Any) -> tuple:
        results = function(*arrays, **dict(options))
        return results if isinstance(results, tuple) else (results,)

    outputs.__name__ = function.__name__  # in profiles and in hlo()

    def differentiate(*arrays: Any) -> tuple[tuple, Callable]:
        def of_wanted(*leaves: Any) -> tuple:
            arguments = dict(enumerate(arrays)) | dict(zip(wanted, leaves, strict=True))
            return outputs(*arguments.values())

        of_wanted = jax.checkpoint(of_wanted, policy=policy, prevent_cse=False)  # the backward is a program of its own
        results, vjp = jax.vjp(of_wanted, *(arrays[i] for i in wanted))
        leaves, tree = jax.tree.flatten(vjp)
        known = [*arrays, *results]
        sources = [next((i for i, value in enumerate(known) if value is leaf), None) for leaf in leaves]
        residuals = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return results, jax.tree_util.Partial(Derivative(tree, tuple(sources)), *residuals)

    def backward(vjp: Callable, douts: Sequence[Any]) -> tuple:
        return vjp()(tuple(douts))

    return Program(*(jit(op, each) for each in (outputs, differentiate, backward)))


def jit(op: str, function: Callable) -> Callable:
    jitted = start_jax().jit(function)
    programs[jitted] = op, function.__name__
    return jitted


def run(function: Callable, *arguments: Any) -> Any:
    """Return function(*arguments) for a jitted function. Tensors in `arguments` become arrays, and the results tensors.

    With fake tensors XLA compiles and runs nothing, and the results are fake.
    """
    with settings() as jax:
        leaves = jax.tree.leaves(arguments)
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            names = jax.tree.map(lambda tensor: str(tensor.dtype).removeprefix("torch."), arguments)
            shapes = jax.tree.map(lambda tensor, name: jax.ShapeDtypeStruct(tensor.shape, name), arguments, names)
            results = jax.eval_shape(function, *shapes)
            make = functools.partial(torch.empty, device=leaves[0].device)
            return jax.tree.map(lambda array: make(array.shape, dtype=getattr(torch, array.dtype.name)), results)
        arrays = jax.tree.map(to_jax, arguments)  # alive until PyTorch's stream waits for the results
        key = function, *((leaf.shape, leaf.dtype, leaf.device) for leaf in leaves)
        if key not in compiled:
            compiled[key] = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
            if leaves[0].is_cuda:
                OTHER_PEAKS[RUNTIME] = peak_bytes
                # XLA times matmuls when it compiles, in free memory that queued kernels of PyTorch may still read
                torch.cuda.synchronize(leaves[0].device)
        # On a CPU, from_dlpack() waits until XLA has finished, because PyTorch's next operator may write to an input
        return jax.tree.map(torch.from_dlpack, function(*arrays))


def to_jax(tensor: Tensor) -> Any:
    """Return the tensor as an array with the same memory. It is copied if it is not contiguous or not aligned."""
    tensor = tensor.detach().contiguous()
    if tensor.data_ptr() % ALIGNMENT:
        tensor = tensor.clone()
    return start_jax().dlpack.from_dlpack(tensor, copy=False)


@functools.cache
def autograd_function(op: str) -> type[torch.autograd.Function]:
    """Return a function with autograd: (a function from the wanted arguments to a Program, tied, *tensors) -> outputs.

    `tied` is the argument of call().
    """

    def forward(
        ctx: FunctionCtx, make_program: Callable, tied: tuple[int, int] | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        needed = [i for i, is_needed in enumerate(ctx.needs_input_grad[2:]) if is_needed]
        ctx.same = {}  # argument -> another one, with the same gradient
        if tied and {*tied} <= {*needed} and tensors[tied[0]].dtype == tensors[tied[1]].dtype:
            ctx.same = {tied[0]: tied[1]}
        ctx.wanted = tuple(i for i in needed if i not in ctx.same)
        ctx.program = make_program(ctx.wanted)
        outputs, vjp = run(ctx.program.differentiate, *tensors)
        ctx.derivative, residuals, known = vjp.func, iter(vjp.args), [*tensors, *outputs]
        sources = ctx.derivative.sources
        ctx.save_for_backward(*(next(residuals) if source is None else known[source] for source in sources))
        return outputs

    def backward(ctx: FunctionCtx, *douts: Tensor) -> tuple[Tensor | None, ...]:
        vjp = start_jax().tree_util.Partial(ctx.derivative, *ctx.saved_tensors)
        gradients = dict(zip(ctx.wanted, run(ctx.program.backward, vjp, douts), strict=True))
        return None, None, *(gradients.get(ctx.same.get(i, i)) for i in range(len(ctx.needs_input_grad) - 2))

    differentiate = refuse_second_derivative(backward, f"{__package__}.{op}.xla")
    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    return type(f"xla_{op}", (torch.autograd.Function,), methods)


def call(
    op: str, function: Callable, *tensors: Tensor | None, tied: tuple[int, int] | None = None, **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """Return function(*arrays, **options), computed by XLA, with its gradients. A None among `tensors` stays None.

    `function` is of a module, not a local one: its compiled versions are kept by its identity and the options. `tied`
    are the numbers of two tensors that it only adds. If their dtypes are equal, both get the same gradient tensor.
    Raises Unavailable under torch.compile and in a CUDA graph.
    """
    refuse_capture(op, "xla", tensors[0])
    make_program = functools.partial(program, op, function, tuple(options.items()))
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        outputs = autograd_function(op).apply(make_program, tied, *tensors)
    else:
        outputs = run(make_program(()).compute, *tensors)
    return outputs[0] if len(outputs) == 1 else outputs


def compute(op: str, function: Callable, *tensors: Tensor | None, **options: Any) -> tuple[Tensor | None, ...]:
    """Return function(*arrays, **options) as call() does, without gradients: for a backward of our own."""
    return run(program(op, function, tuple(options.items()), ()).compute, *tensors)


def refuse_capture(op: str, impl: str, tensor: Tensor) -> None:
    """Raise Unavailable under torch.compile, or if PyTorch captures a CUDA graph on the device of `tensor`."""
    if torch.compiler.is_compiling():
        remedy = f"choose {override_key(op)}=eager"
        raise Unavailable(f"torch.compile cannot trace {op}={impl}, which XLA compiles: {remedy}")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        reason = "because XLA launches its kernels on a stream of its own"
        raise Unavailable(f"a CUDA graph cannot contain {op}={impl}, {reason}: choose {override_key(op)}=eager")


def hlo(ops: Collection[str]) -> dict[str, str]:
    """Return {op: the HLO of each program that was compiled for it, after XLA's fusion}. It compiles them again."""
    texts = {}
    with settings():
        for (function, *_), shapes in compiled.items():
            op, name = programs[function]
            if op in ops:
                text = function.lower(*shapes).compile().as_text()
                texts[op] = texts.get(op, "") + f"// {op}: {name}\n{text}\n"
    return texts
