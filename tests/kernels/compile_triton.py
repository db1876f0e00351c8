"""Compile our Triton kernels for a GPU that is not here: `python -m tests.kernels.compile_triton 90`.

In bf16 a kernel may spill only as many bytes as its `spilled` says: 0 for most kernels. No kernel may add to a pointer
what can pass 2^31 in int32 (narrow_products.py). This is a separate program, because the tests run Triton's
interpreter, which holds for a whole process.
"""

import contextlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import KernelInterface

from kernels import decode as decode_contract
from kernels import matmul, quantize, sums
from kernels.adamw import triton as adamw
from kernels.attention import _gluon_backward, _gluon_forward
from kernels.attention import _triton_backward as attention_backward
from kernels.attention import _triton_tiles as tiles
from kernels.attention import triton as attention
from kernels.cache import FP8
from kernels.compat import FakeTensorMode
from kernels.decode import _few as decode_few
from kernels.decode import _many as decode_many
from kernels.decode import _sampling as sampling
from kernels.decode import _step as decode_step
from kernels.decode import int8
from kernels.decode import triton as decode
from kernels.decode._step import can_launch_early
from kernels.glu import _gluon_kernel as glu_gluon
from kernels.glu import _triton_fp8 as glu_fp8
from kernels.glu import triton as glu
from kernels.gpu import has_tma
from kernels.loss import _exponentials as loss_exponentials
from kernels.loss import _unnormalised as loss_unnormalised
from kernels.loss import gluon as loss_gluon
from kernels.loss import triton as loss
from kernels.mlp import _gluon_kernel as gluon
from kernels.mlp import _triton_fp8 as mlp_fp8
from kernels.mlp import triton as mlp
from kernels.muon import _updates as muon_updates
from kernels.muon import triton as muon
from kernels.norm import _fp8 as norm_fp8
from kernels.norm import _triton_backward as norm_backward
from kernels.norm import triton as norm
from kernels.rope import triton as rope
from lab.report.compiled_table import GPUS
from tests.kernels.narrow_products import kernel_names, narrow_products
from tests.kernels.spills import spills_in_loops

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NEWER_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
SHARED = {capability: 1024 * kilobytes for capability, (kilobytes, _) in GPUS.items()}  # bytes, for one program
MATMUL = dict.fromkeys(SHARED, "mma.sync") | {90: "wgmma", 100: "tcgen05.mma"}  # the instruction of a matmul
TENSOR_MEMORY = 512  # columns that a program may use on 10.0; other GPUs have none
SOFTCAPS = None, 30.0  # of the logits: without a cap, and Gemma 2's
GPU = torch.device("cuda", 0)  # not here: torch.cuda.get_device_capability is replaced
compiled: set[str] = set()  # the names of the kernels that compile_binary() has compiled


def compile_kernel(name, kernel, capability, types, source=ASTSource, spilled=0, small=False, **constants):
    """Compile a kernel as compile_binary() does, and return its PTX. compile_binary() describes the arguments."""
    return compile_binary(name, kernel, capability, types, source, spilled, small, **constants).asm["ptx"]


def compile_binary(name, kernel, capability, types, source=ASTSource, spilled=0, small=False, **constants):
    """Compile a kernel and check its stack, its shared memory and its offsets.

    At most `spilled` bytes of stack are allowed, and a loop of a Triton kernel may not use them. None allows any stack.
    Offsets may be products in int32 only if `small` is true: then no tensor that the kernel gets has more than 2^31
    elements.

    `types` gives the types of the arguments that are not constants, bf16 pointers, strides or 32-bit integers. Pointers
    and integers count as multiples of 16, except integers that the kernel does not specialise. tile_type() is the type
    of a TMA descriptor. Launch parameters that the kernel does not take, such as `programs`, are ignored.
    """
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in constants}
    names = kernel.arg_names
    constants = {key: value for key, value in constants.items() if key in names}
    default_types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in names}
    default_types |= {name: ("i32",) * 3 for name in names if name.endswith("_strides")}
    signature = {name: "constexpr" if name in constants else types.get(name, default_types[name]) for name in names}
    odd = {parameter.name for parameter in getattr(kernel, "params", ()) if parameter.do_not_specialize}
    is_aligned = {name: kind in ("i32", "i64") or kind[0] == "*" for name, kind in signature.items()}
    aligned = [(i,) for i, name in enumerate(names) if is_aligned[name] and name not in odd]
    aligned += [(i, j) for i, name in enumerate(names) if isinstance(signature[name], tuple) for j in range(3)]
    multiples = {position: [["tt.divisibility", 16]] for position in aligned}
    is_ast = source is ASTSource
    source = source(kernel, signature, {(names.index(key),): value for key, value in constants.items()}, multiples)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = cuobjdump("-res-usage", file.name)
        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
        in_loops = stack > 0 and is_ast and spills_in_loops(cuobjdump("-sass", file.name))
    print(f"{name}: {registers} registers, {stack} bytes of stack, {binary.metadata.shared} of shared memory")
    compiled.add(kernel.fn.__name__)
    assert spilled is None or stack <= spilled
    assert spilled is None or not in_loops, f"a loop uses the stack: {in_loops}"
    products = narrow_products(binary.asm.get("ttir") or binary.asm["ttgir"])
    assert small or not products, f"products in int32: {products}"
    assert binary.metadata.shared <= SHARED[capability]
    assert getattr(binary.metadata, "tmem_size", 0) <= TENSOR_MEMORY
    return binary


def tile_type(*block: int, dtype: str = "bf16") -> str:
    """Return the type of a TMA descriptor of tiles of this shape, in Triton."""
    return f"tensordesc<{dtype}[{', '.join(map(str, block))}]>"


def cuobjdump(*arguments: str) -> str:
    return subprocess.run([CUOBJDUMP, *arguments], capture_output=True, text=True, check=True).stdout


def main(capability: int) -> None:
    for C in (768, 1600, 4096) if capability == 90 else (768,):
        for residual in {1600: ("*bf16",), 4096: ("*fp32",)}.get(C, ("*bf16", "*fp32")):
            launch = {"C": C, "HAS_BIAS": True, "CENTRED": True, **norm.forward_launch(C)}
            types = dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32") | {"eps": "fp32"}
            types |= dict.fromkeys(("residual_ptr", "out_ptr", "dstream_ptr", "saved_ptr", "dresidual_ptr"), residual)
            name = f"{C} {residual}"
            forward = compile_kernel(
                f"norm forward {name}", norm._norm_fwd_kernel, capability, types, HAS_RESIDUAL=True, **launch
            )
            launch |= norm_backward.backward_launch(C)
            launch |= {"HAS_DSTREAM": True, "HAS_DRESIDUAL": residual == "*fp32", "MAX_RATIO": None}
            backward = compile_kernel(
                f"norm backward {name}", norm_backward._norm_bwd_kernel, capability, types, **launch
            )
            launch["MAX_RATIO"] = 16.0
            compile_kernel(
                f"norm backward from y {name}",
                norm_backward._norm_bwd_kernel,
                capability,
                types | {"saved_ptr": "*bf16"},
                **launch,
            )
            wide = re.compile(r"ld\.global\.v4|cp\.async\.cg\.shared\.global .*, 0x10")
            assert all(wide.search(ptx) and "st.global.v4" in ptx for ptx in (forward, backward))
            launch |= {"HAS_BIAS": False, "CENTRED": False, "MAX_RATIO": None}
            compile_kernel(f"rms_norm backward {name}", norm_backward._norm_bwd_kernel, capability, types, **launch)
            compile_kernel(
                f"rms_norm backward from y {name}",
                norm_backward._norm_bwd_kernel,
                capability,
                types | {"saved_ptr": "*bf16"},
                **{**launch, "MAX_RATIO": 16.0},
            )
            launch |= norm.forward_launch(C)
            compile_kernel(
                f"rms_norm forward {name}", norm._norm_fwd_kernel, capability, types, HAS_RESIDUAL=True, **launch
            )
    types = {"losses_ptr": "*fp32", "targets_ptr": "*i64", "shifts_ptr": "*fp32"}
    for softcap in SOFTCAPS:
        launch = {"V": 50304, "WRITE": True, "SOFTCAP": softcap, **loss.softmax_launch(50304)}
        compile_kernel(f"loss{capped(softcap)}", loss.cross_entropy_kernel, capability, types, **launch)
    scaling = compile_kernel("loss, scale", loss.scale_kernel, capability, {"factor_ptr": "*fp32"}, BLOCK=4096)
    assert all(word in scaling for word in ("ld.global.v4", "st.global.v4"))
    compile_sums_and_optimizers(capability)
    compile_rope(capability)
    compile_matmuls(capability)
    if capability == 90:
        compile_gluon_loss()
        for backward in (False, True):
            for fp8 in (False, True):
                compile_gluon_mlp(backward, fp8)
        compile_gluon_glu()
    if capability >= 89:  # fp8
        compile_fp8(capability)
    compile_attention(capability)
    if capability == 86:
        compile_fp32(capability)
    compile_decode(capability)
    compile_sampling(capability)
    if capability == 90:
        compile_gluon_attention()
    missing = kernel_names(gluon=capability == 90) - compiled
    assert capability < 89 or not missing, f"nobody compiles {missing}"  # before 8.9 there is no fp8


def compile_rope(capability: int) -> None:
    """Compile the rotation for the heads of SmolLM2-135M, and with the norm for those of Qwen3-0.6B."""
    for heads, kv_heads, half, norm_, from_output in (
        (15, 3, 32, False, False),
        (32, 8, 64, True, False),
        (32, 8, 64, True, True),
    ):
        types = {"table_ptr": "*fp32", "partial_ptr": "*fp32", "rstd_ptr": "*fp32", "eps": "fp32"}
        constants = {"HEADS": heads, "KV_HEADS": kv_heads, "HALF": half, **rope.default_launch(half)}
        constants |= {"MAX_RATIO": 16.0 if from_output else None}
        constants |= {} if from_output else {"rstd_ptr": None}
        constants |= dict.fromkeys(() if norm_ else ("q_weight_ptr", "k_weight_ptr", "saved_ptr", "partial_ptr"))
        name = f"{2 * half}{', norm' if norm_ else ''}{' from its output' if from_output else ''}"
        for way, kernel in (("forward", rope._rope_fwd_kernel), ("backward", rope._rope_bwd_kernel)):
            ptx = compile_kernel(f"rope {way} {name}", kernel, capability, types, **constants)
            assert all(word in ptx for word in ("ld.global.v4", "st.global.v4"))


def compile_matmuls(capability: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile the matmuls of linear, the MLP and the loss with default launches."""
    with mock.patch("torch.cuda.get_device_capability", return_value=divmod(capability, 10)):
        tma = has_tma.__wrapped__(GPU) and dtype == torch.bfloat16
    end = "" if dtype == torch.bfloat16 else " in fp32"

    def build(name, kernel, launch, matrices, types=None, pointer=POINTERS[dtype], **constants):
        """`matrices` is {argument: the shape of its tiles}; a shape of three is of fp32."""
        types = {"target_logits_ptr": "*fp32", "sums_ptr": "*fp32", "partial_ptr": "*fp32"} | (types or {})
        types |= dict.fromkeys(("b_ptr", "bias_ptr"), pointer)
        for matrix, tile in matrices.items():
            element = "fp32" if len(tile) == 3 and matrix == "out" else pointer[1:]
            types[matrix] = f"tensordesc<{element}[{', '.join(map(str, tile))}]>" if tma else f"*{element}"
        fixed = {"TMA": tma, "PRECISION": matmul.precision(dtype), **launch, **constants}
        spilled = 0 if dtype == torch.bfloat16 else None
        ptx = compile_kernel(name + end, kernel, capability, types, spilled=spilled, **fixed)
        assert dtype == torch.float32 or MATMUL[capability] in ptx
        assert ("cp.async.bulk.tensor" in ptx) == tma

    for name, by_rows, C in (("matmul", True, 768), ("matmul, W by columns", False, 2304)):
        launch = matmul.default_launch(dtype, tma, C)
        n, f, c, width = tile_sizes(launch)
        matrices = {"x": (n, c), "w": (f, c) if by_rows else (c, f), "y": (n, width)}
        build(name, matmul._tiled_matmul_kernel, launch, matrices, W_BY_ROWS=by_rows)
    for name, F, C in (("matmul transposed", 2304, 768), ("matmul transposed, 1600 wide", 4800, 1600)):
        launch = matmul.default_launch_transposed(dtype, tma, F, C)
        n, f, c, _ = tile_sizes(launch)
        matrices = {"a": (n, f), "b": (n, c), "out": (1, f, c // launch["PARTS"])}
        build(name, matmul._split_matmul_kernel, launch, matrices)

    launch = mlp.default_launch(dtype, tma, backward=False)
    n, f, c, width = tile_sizes(launch)
    matrices = {"x": (n, c), "w": (f, c), "h": (n, width), "a": (n, width)}
    for name, activation in (("mlp", "gelu"), ("mlp, relu2", "relu2")):
        build(f"{name} forward", mlp._mlp_fwd_kernel, launch, matrices, ACTIVATION=activation)
    launch = mlp.default_launch(dtype, tma, backward=True)
    n, f, c, width = tile_sizes(launch)
    matrices = {"dy": (n, c), "w": (c, f)} | dict.fromkeys(("h", "a", "dh"), (n, width))
    sums = min(launch["num_warps"], n // 16)
    for name, activation in (("mlp", "gelu"), ("mlp, relu2", "relu2")):
        build(f"{name} backward", mlp._mlp_bwd_kernel, launch, matrices, SUMS=sums, ACTIVATION=activation)
    launch = glu.default_launch(dtype, tma, backward=False)
    n, f, c, width = tile_sizes(launch)
    matrices = {"x": (n, c), "w": (2, f // 2, c)} | dict.fromkeys(("gate", "up", "a"), (n, width))
    build("glu forward", glu._glu_fwd_kernel, launch, matrices)
    launch = glu.default_launch(dtype, tma, backward=True)
    n, f, c, width = tile_sizes(launch)
    matrices = {"dy": (n, c), "w": (c, f)} | dict.fromkeys(("gate", "up", "a", "dgate", "dup"), (n, width))
    build("glu backward", glu._glu_bwd_kernel, launch, matrices, SUMS=min(launch["num_warps"], n // 16))
    launch = muon.launch_parameters(dtype, tma)
    matrices = dict.fromkeys("xy", (launch["BLOCK_M"], launch["BLOCK_C"]))
    pointer = "*fp32" if dtype == torch.float32 else "*fp16"  # its matmuls are in fp16 for bf16 matrices
    numbers = dict.fromkeys(("x_ptr", "y_ptr", "out_ptr"), pointer) | dict.fromkeys(("alpha", "beta", "gamma"), "fp32")
    symmetric = {"launch": launch, "matrices": matrices, "types": numbers, "pointer": pointer}
    build("muon, Q", muon._muon_symmetric_kernel, **symmetric)
    for name, absent in (("P", ["y_ptr"]), ("P A", ["x_ptr"]), ("X X^T", ["x_ptr", "y_ptr"])):
        build(f"muon, {name}", muon._muon_symmetric_kernel, **symmetric, **dict.fromkeys(absent))
    matrices = {"q": matrices["x"], "x": (1, launch["BLOCK_C"], launch["BLOCK_M"])}
    numbers |= {"identity": "fp32"}
    build("muon, Q X", muon._muon_product_kernel, launch, matrices, types=numbers, pointer=pointer)
    if dtype == torch.bfloat16:
        compile_exponentials(capability, tma, build)


def compile_exponentials(capability: int, tma: bool, build: Callable) -> None:
    """Compile the loss's matmul that exponentiates, and the kernels around it."""
    launch = loss_exponentials.default_launch(torch.bfloat16, tma)
    n, f, c, width = tile_sizes(launch)
    matrices = {"x": (n, c), "w": (f, c), "p": (n, width)}
    for partial, softcap in itertools.product((False, True), SOFTCAPS):
        name, constants = f"loss, exponentials{capped(softcap)}", {"PARTIAL": partial, "SOFTCAP": softcap}
        build(name, loss_exponentials._cross_entropy_exp_kernel, launch, matrices, **constants)
    types = dict.fromkeys(("target_logits_ptr", "sums_ptr", "losses_ptr", "scales_ptr"), "*fp32")
    types |= {"targets_ptr": "*i64"}
    shift = "shift", loss_unnormalised._cross_entropy_shift_kernel, {"ROWS": 4, "BLOCK": 1024}
    finish = "finish", loss_unnormalised._cross_entropy_finish_kernel, {"ROWS": 16, "BLOCK": 64}
    for (name, kernel, size), softcap in itertools.product((shift, finish), SOFTCAPS):
        compile_kernel(f"loss, {name}{capped(softcap)}", kernel, capability, types, SOFTCAP=softcap, **size)


def capped(softcap: float | None) -> str:
    return "" if softcap is None else ", capped"


def tile_sizes(launch: dict) -> tuple[int, int, int, int]:
    """Return BLOCK_N, BLOCK_F, BLOCK_C, and the columns of a part of the epilogue."""
    n, f, c = (launch[name] for name in ("BLOCK_N", "BLOCK_F", "BLOCK_C"))
    return n, f, c, f // launch["PARTS"]


def descriptor_type(*block, dtype=gl.bfloat16):
    """Return the type of a TMA descriptor of tiles of this shape."""
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return f"tensordesc<{dtype}[{','.join(map(str, block))}],{layout!r}>"


def compile_gluon_attention() -> None:
    """Compile attention's kernels for Hopper."""
    N = _gluon_forward.BLOCK_N.value
    for D, consumers, slots in ((64, 2, 4), (64, 3, 4), (128, 2, 2)):
        types = dict.fromkeys(("q", "out"), descriptor_type(1, 1, _gluon_forward.ROWS.value, D))
        types |= dict.fromkeys(("k", "v"), descriptor_type(1, 1, N, D))
        types |= {"lse_ptr": "*fp32", "plan_ptr": "*i32", "scale": "fp32"}
        fixed = {"GROUP": 1, "CONSUMERS": consumers, "SLOTS": slots, "num_warps": 4}
        fixed["maxnreg"] = 128 if consumers == 3 else 168
        spilled = 176 if consumers == 3 and NEWER_TRITON else 0  # outside the loop over blocks
        name = f"attention forward in Gluon {D}, {consumers} consumers"
        kernel = _gluon_forward._attention_fwd_gluon_kernel
        assert "setmaxnreg" in compile_kernel(name, kernel, 90, types, GluonASTSource, spilled, **fixed)
    size = _gluon_backward.TILE.value
    # bytes, most of them spilled outside the loops over tiles; for D = 128 these loops also read 2 and 5 of them
    spilled = {64: 136, 128: 184} if NEWER_TRITON else {64: 8, 128: 120}
    for D, launch in _gluon_backward.LAUNCH.items():
        types = dict.fromkeys(("q", "k", "v", "dout", "dq", "dk", "dv"), descriptor_type(1, 1, size, D))
        types |= {"lse_delta": descriptor_type(2 * size, dtype=gl.float32), "scale": "fp32", "scale_log2": "fp32"}
        types |= {"sums_ptr": "*fp32", "turns_ptr": "*i32"}
        fixed = {"GROUP": 1, "num_warps": 4, "maxnreg": 128, **launch}
        kernel = _gluon_backward._attention_bwd_gluon_kernel
        ptx = compile_kernel(f"attention backward in Gluon {D}", kernel, 90, types, GluonASTSource, spilled[D], **fixed)
        assert "wgmma" in ptx
        assert "setmaxnreg" in ptx
        assert "add.v4.f32" in ptx  # 16 bytes at once
        types = dict.fromkeys(("lse_ptr", "lse_delta_ptr"), "*fp32")
        compile_kernel("attention lse and delta", _gluon_backward._lse_delta_kernel, 90, types, D=D, TILE=size)


def compile_gluon_loss() -> None:
    """Compile the loss whose matmul exponentiates, for Hopper."""
    n, v, c, columns = (getattr(loss_gluon, name).value for name in ("BLOCK_N", "BLOCK_V", "BLOCK_C", "SLICE"))
    types = dict.fromkeys(("target_logits_ptr", "sums_ptr"), "*fp32")
    types |= {"x": descriptor_type(n, c), "w": descriptor_type(v, c), "p": descriptor_type(n, columns)}
    kernel, launch = loss_gluon._cross_entropy_gluon_kernel, {"num_warps": 4, "maxnreg": 168}
    for partial, softcap in itertools.product((False, True), SOFTCAPS):
        name, constants = f"loss in Gluon{capped(softcap)}", {"PARTIAL": partial, "SOFTCAP": softcap, **launch}
        ptx = compile_kernel(name, kernel, 90, types, GluonASTSource, **constants)
        assert "wgmma" in ptx
        assert "setmaxnreg" in ptx


def compile_gluon_mlp(backward: bool, fp8: bool) -> None:
    """Compile the MLP's kernel for Hopper."""
    n, f, columns = gluon.BLOCK_N.value, gluon.BLOCK_F.value, gluon.SLICE.value
    c = gluon.ROW_BYTES.value // (1 if fp8 else 2)
    weight, gradient = (gl.float8e4nv, gl.float8e5) if fp8 else (gl.bfloat16, gl.bfloat16)
    by_columns = backward and fp8
    types = {"x": descriptor_type(n, c, dtype=gradient if backward else weight)}
    types |= {"w": descriptor_type(*((c, f) if backward and not fp8 else (f, c)), dtype=weight)}
    types |= {"h": descriptor_type(n, f // 2 if backward else columns)}
    types |= {"a": descriptor_type(*((columns, n) if by_columns else (n, columns)), dtype=weight)}
    types |= {"dh": descriptor_type(n, columns, dtype=gradient)}
    types |= {"dh_columns": descriptor_type(columns, n, dtype=gradient)}
    types |= {"partial_ptr": "*fp32", "w_unit_ptr": "*fp32", "x_unit": "fp32"}
    types |= dict.fromkeys("NFC", "i32")
    unused = ["b_ptr"] if backward else ["dh", "partial_ptr"]
    unused += [] if by_columns else ["dh_columns"]
    unused += [] if fp8 else ["w_unit_ptr"]
    fixed = dict.fromkeys(unused) | {"BACKWARD": backward}
    name = f"mlp {'backward' if backward else 'forward'} in Gluon{', fp8' if fp8 else ''}"
    spilled = (96 if NEWER_TRITON else 8) if backward else 0  # outside the loop over matmuls
    ptx = compile_kernel(
        name, gluon._mlp_gluon_kernel, 90, types, GluonASTSource, spilled, num_warps=4, maxnreg=168, **fixed
    )
    assert "wgmma" in ptx
    assert "setmaxnreg" in ptx


def compile_gluon_glu() -> None:
    """Compile the gated MLP's kernels for Hopper, with and without the bias of W_fc."""
    names = "BLOCK_N", "BLOCK_F", "BLOCK_C", "UNITS", "SLICE"
    n, f, c, units, columns = (getattr(glu_gluon, name).value for name in names)
    slices = dict.fromkeys(("gate", "up", "a", "dgate", "dup"), descriptor_type(n, columns))
    slices |= {"partial_ptr": "*fp32"}
    forward = {"x": descriptor_type(n, c), "w": descriptor_type(2, units, c)}
    backward = {"dy": descriptor_type(n, c), "w": descriptor_type(c, f)}
    for bias in (False, True):
        for name, kernel, operands, unused, spilled in (
            ("forward", glu_gluon._glu_fwd_gluon_kernel, forward, "b_ptr", 0),
            # 24 bytes, in the first slice of an epilogue
            ("backward", glu_gluon._glu_bwd_gluon_kernel, backward, "partial_ptr", 24 * bias),
        ):
            fixed = glu_gluon.LAUNCH | ({} if bias else {unused: None})
            name = f"glu {name} in Gluon{', bias' if bias else ''}"
            ptx = compile_kernel(name, kernel, 90, slices | operands, GluonASTSource, spilled, **fixed)
            assert "wgmma" in ptx
            assert "setmaxnreg" in ptx
            assert ("cp.async.bulk.tensor.3d.shared" in ptx) == (operands is forward)  # gate and up in one load


def compile_sums_and_optimizers(capability: int) -> None:
    """Compile the sums of rows, AdamW, and Muon's passes. A thread moves 16 bytes of a tensor at once."""
    rows = compile_kernel("sum of rows", sums._sum_rows_kernel, capability, {"out_ptr": "*fp32"}, **sums.ROWS)
    types = {"x_ptr": "*fp32"}
    launch = sums.PARTIAL_SUMS
    partial = compile_kernel("sum of partial sums", sums._sum_rows_kernel, capability, types, **launch)
    fp32 = ("master_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "lr_ptr", "scale_ptr", "corrections_ptr")
    types = dict.fromkeys(fp32, "*fp32") | {"refuse_ptr": "*i1"}
    types |= dict.fromkeys(("beta1", "beta2", "one_minus_beta1", "one_minus_beta2", "eps", "weight_decay"), "fp32")
    update = compile_kernel("adamw", adamw._adamw_kernel, capability, types, BLOCK=adamw.BLOCK, num_warps=4)
    launch = {"BLOCK": muon_updates.BLOCK, "num_warps": 4}
    fp32 = ("momentum_ptr", "scale_ptr", "master_ptr", "lr_ptr", "norm_ptr")
    types = dict.fromkeys(fp32, "*fp32") | {"refuse_ptr": "*i1", "x_ptr": "*fp16"}
    types |= dict.fromkeys(("beta", "one_minus_beta", "length", "weight_decay", "eps"), "fp32")
    passes = {"before": muon_updates._muon_before_kernel, "after": muon_updates._muon_after_kernel}
    passes["scale"] = muon._muon_scale_kernel
    assert all("ld.global.v4" in ptx for ptx in (rows, partial, update))
    assert "st.global.v4" in update
    for transposed in (False, True):
        launch["TRANSPOSED"] = transposed
        end = ", transposed" if transposed else ""
        for name, kernel in passes.items():
            ptx = compile_kernel(f"muon, {name}{end}", kernel, capability, types, **launch)
            assert all(word in ptx for word in ("ld.global.v4", "st.global.v4"))


def compile_fp8(capability: int) -> None:
    """Compile the passes that round to fp8. A thread moves 16 bytes of a tensor at once."""
    numbers = dict.fromkeys(("maxima_ptr", "unit_ptr", "scale_ptr", "dy_unit_ptr", "sums_ptr", "shifts_ptr"), "*fp32")
    numbers |= {"targets_ptr": "*i64"}
    e4m3 = numbers | dict.fromkeys(("rows_ptr", "columns_ptr", "a_ptr"), "*fp8e4nv")
    e5m2 = numbers | dict.fromkeys(("rows_ptr", "columns_ptr", "dh_rows_ptr", "dh_columns_ptr"), "*fp8e5")
    size = quantize.default_launch()
    unused = dict.fromkeys(("da_ptr", "dy_unit_ptr", "dh_rows_ptr", "dh_columns_ptr", "sums_ptr"))
    passes = [
        ("x to fp8", quantize._quantize_kernel, e4m3, {"maxima_ptr": None, "sums_ptr": None, "MAXIMA": 1}),
        ("dy to fp8", quantize._quantize_kernel, e5m2, {"maxima_ptr": None, "MAXIMA": 1}),
        ("weight to fp8", quantize._quantize_kernel, e4m3, {"sums_ptr": None, "MAXIMA": 512}),
        *[
            pass_
            for name, kernel, constants in (
                ("gelu", mlp_fp8._gelu_fp8_kernel, {"ACTIVATION": "gelu"}),
                ("relu2", mlp_fp8._gelu_fp8_kernel, {"ACTIVATION": "relu2"}),
                ("swiglu", glu_fp8._glu_fp8_kernel, {"BLOCK_N": glu_fp8.ROWS}),
            )
            for pass_ in (
                (f"{name} to fp8", kernel, e4m3, {"BACKWARD": False, "SCALE": 4.0, **constants, **unused}),
                (
                    f"{name} backward to fp8",
                    kernel,
                    e5m2 | {"a_ptr": "*fp8e4nv"},
                    {"BACKWARD": True, "SCALE": 4.0, **constants},
                ),
            )
        ],
        *[(f"dlogits to fp8{capped(cap)}", loss.dlogits_fp8_kernel, e5m2, {"SOFTCAP": cap}) for cap in SOFTCAPS],
    ]
    maxima = compile_kernel("maxima", quantize._maxima_kernel, capability, numbers, **quantize.MAXIMA_LAUNCH)
    assert "ld.global.v4" in maxima
    for name, kernel, types, constants in passes:
        spilled = 8 if (name, capability) == ("swiglu backward to fp8", 120) else 0  # of 168 registers
        ptx = compile_kernel(name, kernel, capability, types, spilled=spilled, **(size | constants))
        assert "cvt.rn.satfinite" in ptx
        assert "shr.u16" not in ptx  # a byte of half a word, which ptxas may compile wrongly (kernels/quantize.py)
        assert "ld.global.v4" in ptx
        if "swiglu" not in name:  # its threads hold 8 numbers of each tensor, which are 8 bytes
            assert "st.global.v4" in ptx
            assert not re.search(r"st\.global\.(v2|b8|b16|b64)", ptx)
    types = e4m3 | dict.fromkeys(("mean_ptr", "rstd_ptr"), "*fp32") | {"eps": "fp32"}
    for op, C in itertools.product(("norm", "rms_norm"), (768, 1600)):
        constants = {"C": C, "SCALE": 4.0, "HAS_RESIDUAL": True, "CENTRED": op == "norm", **norm_fp8.default_launch(C)}
        ptx = compile_kernel(f"{op} to fp8 {C}", norm_fp8._norm_fwd_fp8_kernel, capability, types, **constants)
        assert "cvt.rn.satfinite" in ptx
        assert bool(re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)) == (constants["STAGES"] > 1)
        assert "shr.u16" not in ptx
        assert not re.search(r"st\.global\.(b8|b16) ", ptx)


def compile_attention(capability: int) -> None:
    """Compile the attention kernels, causal and with documents."""
    fixed = {"lengths_ptr": None, "GROUP": 1, "CAUSAL": True, "SPLITS": 1, "PRECISION": "tf32"}
    types = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "starts_ptr": "*i32", "ends_ptr": "*i32", "scale": "fp32"}

    def build(name, kernel, D, tma, **constants):
        given = {**fixed, **tiles.default_parameters(name, torch.bfloat16, D, tma), "D": D, "TMA": tma, **constants}
        given["REGISTERS"] = capability == 90 and tma and given["BLOCK_D"] == 128
        descriptors = {}
        if tma:
            queries, keys = {"forward": ("out", "k v"), "dq": ("dq", "k v"), "dkdv": ("q dout", "dk dv")}[name]
            for rows, tensors in (("BLOCK_M", queries), ("BLOCK_N", keys)):
                tile = tile_type(1, 1, given[rows], given["BLOCK_D"])
                descriptors |= {f"{tensor}_ptr": tile for tensor in tensors.split()}
        if tma and name == "dkdv":
            descriptors |= dict.fromkeys(("lse_ptr", "delta_ptr"), tile_type(1, given["BLOCK_M"], dtype="fp32"))
        given["spilled"] = 24 if (name, D, tma) == ("dkdv", 64, False) else 0
        return compile_kernel(f"attention {name} {D}", kernel, capability, types | descriptors, **given)

    tma = has_tma(GPU)
    for D in (64, 128, 256):
        for name, kernel in (
            ("forward", attention._fwd_kernel),
            ("dq", attention_backward._dq_kernel),
            ("dkdv", attention_backward._dkdv_kernel),
        ):
            ptx = build(name, kernel, D, tma)
            assert MATMUL[capability] in ptx
            assert ("cp.async.bulk.tensor" in ptx) == tma
    build("decode", attention._fwd_kernel, 64, False, SPLITS=4)
    numbers = {"part_out_ptr": "*fp32", "part_lse_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32"}
    compile_kernel("attention combine", attention._combine_kernel, capability, numbers, D=64, SPLITS=32, BLOCK_D=64)


def compile_fp32(capability: int) -> None:
    """Compile the kernels that need the most shared memory in fp32. They may spill, because fp32 is not for speed."""
    kernel = attention_backward._dkdv_kernel
    types = {name: "*fp32" for name in kernel.arg_names if name.endswith("_ptr")} | {
        "ends_ptr": "*i32",
        "scale": "fp32",
    }
    fixed = {"GROUP": 1, "CAUSAL": True, "PRECISION": "ieee", "TMA": False}
    for D in (64, 128, 256):
        given = {**fixed, **tiles.default_parameters("dkdv", torch.float32, D, False), "D": D}
        compile_kernel(f"attention dkdv {D} in fp32", kernel, capability, types, spilled=None, **given)
    compile_matmuls(capability, torch.float32)


POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32"}
POINTERS |= {torch.int8: "*i8", FP8: "*fp8e4nv"}
NUMBERS = {int: "i32", float: "fp32", bool: "i1"}


def recorded_launches(capability: int, *steps: tuple) -> list[tuple]:
    """Return (kernel, arguments) of every launch in these steps. A step is (backend, keyword arguments of inputs()).

    The tensors are fake. The launches are for a GPU with this compute capability, and as many multiprocessors as an
    H200.
    """
    launches = []

    def record(kernel, grid):
        return lambda **arguments: launches.append((kernel, arguments))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", record))
        stack.enter_context(mock.patch.object(decode_step, "can_launch_early", return_value=True))
        for module in (decode_few, decode_many, decode_step):
            stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=132))
        stack.enter_context(mock.patch.object(decode_many, "shared_bytes", return_value=SHARED[capability]))
        stack.enter_context(FakeTensorMode())
        for backend, sizes in steps:
            weights, tokens, cache = decode_contract.inputs(**sizes, dtype=torch.bfloat16).values()
            with mock.patch.object(decode, "check"), mock.patch.object(int8, "check"):
                packed = backend.pack(decode_contract.Model(None, lambda weights=weights: weights), cache)
            backend.decode(packed, tokens, cache)
    return launches


def compile_decode(capability: int) -> None:
    """Compile all kernels of the decoding steps of GPT-2 124M and 1558M, SmolLM2-135M and Qwen3-0.6B.

    On Hopper a kernel lets the next kernel start, and waits for its predecessor before it writes. The products for few
    rows load W before they wait. Their reductions have the same layouts for any number of rows, so the sums have the
    same order. With 16 rows LayerNorm has 128 numbers a thread, so 512 bytes of stack are allowed; otherwise 64.

    For compute capabilities other than 9.0 there are fewer sizes, because all sizes would take half a minute more.
    """
    sizes = {"n_layer": 2, "vocab": 50304, "rows": 1024, "lengths": [1000]}
    small, large = {"width": 768, "heads": 12, **sizes}, {"width": 1600, "heads": 25, **sizes}
    smollm2, qwen3 = ({**decode_contract.SHAPES[name], **sizes} for name in ("smollm2-135m", "qwen3-0.6b"))
    steps = [(decode, {"batch": batch, **small}) for batch in (16, 64)] + [(int8, {"batch": 16, **small})]
    steps += [(decode, {**qwen3, "batch": batch}) for batch in (16, 64)]
    if capability == 90:
        steps += [(decode, {**smollm2, "batch": batch}) for batch in (1, 16, 64)]
        steps += [(decode, {**qwen3, "batch": 1}), (int8, {**qwen3, "batch": 16})]
        steps += [(decode, {**smollm2, "batch": batch, "mlp": "relu2", "norm": "layernorm"}) for batch in (16, 64)]
        steps += [(decode, {"batch": batch, **small}) for batch in (1, 3, 8, 32, 256)]
        steps += [(decode, {"batch": batch, **large}) for batch in (1, 16)]
        steps += [(decode, {"batch": 16, **small, "kv_heads": 4})]
        steps += [
            (decode, {"batch": 16, **small, **options}) for options in ({"rope": True}, {"stream_dtype": torch.float32})
        ]
        steps += [(decode, {"batch": 1, **small, "lengths": [100], "rows": 256})]
        steps += [(decode, {"batch": 1, **small, "lengths": [8000], "rows": 8192})]  # too many keys for registers
        steps += [(decode, {"batch": 1, **small, "kv_dtype": FP8})]
    done, orders = set(), {}
    for kernel, arguments in recorded_launches(capability, *steps):
        fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
        options = {name: arguments.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in arguments}
        arguments.pop("launch_pdl", None)
        constants = {name: value for name, value in arguments.items() if name in fixed or value is None}
        constants |= {"PDL": can_launch_early(GPU), **options}
        types = {
            name: POINTERS[value.dtype] if isinstance(value, torch.Tensor) else NUMBERS[type(value)]
            for name, value in arguments.items()
            if name not in constants
        }
        if (key := (kernel, *sorted(constants.items(), key=str), *sorted(types.items()))) in done:
            continue
        done.add(key)
        rows = constants.get("ROWS")
        names = ("OUT", "K", "ROWS") if "K" in constants else ("D", "SPLITS")
        label = ", ".join(f"{name} {constants[name]}" for name in names if name in constants)
        name = f"decode {kernel.fn.__name__.strip('_').removesuffix('_kernel')} {label}"
        binary = compile_binary(name, kernel, capability, types, spilled=512 if rows == 16 else 64, **constants)
        ptx = binary.asm["ptx"]
        before, _, after = ptx.partition("griddepcontrol.wait")
        if can_launch_early(GPU):
            assert "griddepcontrol.launch_dependents" in (after if "TILES" in constants else before)
            assert "st.global" not in before
            assert "st.global" in after
        if rows:
            elements = constants["BLOCK_N"] * constants["BLOCK_K"] * (1 if types["weight_ptr"] == "*i8" else 2)
            assert before.count("ld.global.v4") >= elements // (16 * 32 * constants["num_warps"])
            matrix = tuple(item for item in key if item != ("ROWS", rows))
            orders.setdefault(matrix, set()).add(reduction_layouts(binary.asm["ttgir"]))
        elif "TILES" in constants:  # attention in registers: all old keys and values of a short split before the wait
            elements = 2 * constants["TILES"] * constants["BLOCK_KEYS"] * constants["BLOCK_D"]
            assert before.count("ld.global.v4") >= elements // (16 * 32 * constants["num_warps"])
        elif "BLOCK_M" in constants:  # attention on tensor cores, and matmuls of many rows
            assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)
    assert all(len(layouts) == 1 for layouts in orders.values())


def reduction_layouts(ttgir: str) -> tuple[str, ...]:
    """Return the layout of each reduction's operand, as text."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    operands = re.findall(r'"tt\.reduce"\(.*?\}\) : \(tensor<[^,]*, (#\w+)>', ttgir, re.DOTALL)
    return tuple(layouts[operand] for operand in operands)


def compile_sampling(capability: int) -> None:
    """Compile both kernels for GPT-2's vocabulary. On an A100 the second one may spill 8 bytes.

    In fp32 the kernels are compiled with all limits only, because kernels without a limit are parts of these.
    """
    block = sampling.block_size(50257)
    limits = [("temperature", "top_k", "top_p"), ("top_k", "top_p"), ("top_p",), ("top_k",), ()]
    for dtype, off in [(torch.bfloat16, off) for off in limits] + [(torch.float32, ())]:
        types = {"logits_ptr": POINTERS[dtype], "summary_ptr": "*fp32", "list_ptr": "*i32", "temperature": "fp32"}
        types |= dict.fromkeys(("seeds_ptr", "positions_ptr", "tokens_ptr", "output_ptr"), "*i64") | {"top_p": "fp32"}
        fixed = {**dict.fromkeys(off), "BLOCK": block, "STEP": 1, "PDL": can_launch_early(GPU)}
        name = f"{POINTERS[dtype]} without {', '.join(off) or 'nothing'}"
        summary = f"sampling, summary {name}"
        ptx = compile_kernel(summary, sampling._summary_kernel, capability, types, **fixed, SIZE=64)
        assert "ld.global.v4" in ptx
        fixed |= {"SHIFT": sampling.SHIFTS[dtype], "num_warps": sampling.count_draw_warps(block)}
        spilled = 8 if capability == 80 else 0
        compile_kernel(f"sampling, draw {name}", sampling._draw_kernel, capability, types, spilled=spilled, **fixed)


if __name__ == "__main__":
    given = int(sys.argv[1])
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=divmod(given, 10)):
        main(given)
