"""kernels/rms_norm/pallas.py: its kernels for a GPU that is not here, and what it refuses.

test_backends.py compares its results with float64, on a CPU by Pallas's interpreter.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels import rms_norm, xla
from kernels.compat import FakeTensorMode
from kernels.registry import AttnConfig, KernelsConfig, Unavailable, backend, describe, load, unavailable
from model.config import GPTConfig
from model.step import build
from tests.kernels.test_xla import SMALL

CPU = torch.device("cpu")
if reason := unavailable("rms_norm", "pallas", CPU):
    pytest.skip(reason, allow_module_level=True)
ROWS = 65536
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.fixture(scope="module")
def jax():
    """Return the module jax, with a Hopper GPU that is not here. JAX 0.11 and newer ask which one to compile for."""
    with xla.settings() as jax:
        gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu)):
            yield jax


def lower(jax, way, C, stream_dtype, N=ROWS):
    """Lower the forward or the backward of x (N, C) in bf16 for CUDA. Return what its only call of a kernel has."""
    from kernels.rms_norm import _pallas

    shapes = ((N, C), "bfloat16"), ((N, C), stream_dtype), ((C,), "bfloat16"), ((N,), "float32")
    x, stream, weight, rstd = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    if way == "fwd":
        function, arguments = functools.partial(_pallas.forward, eps=1e-5, interpret=False), (x, stream, weight)
    else:
        options = {"x_dtype": "bfloat16", "multiprocessors": 132, "interpret": False}
        function, arguments = functools.partial(_pallas.backward, **options), (stream, weight, rstd, x, stream)
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    [call] = calls(lowered.compiler_ir("stablehlo").operation)
    assert call.attributes["call_target_name"].value == "__gpu$xla.gpu.triton"
    return call.attributes["mhlo.backend_config"]


def calls(operation):
    """Return the calls of kernels in an operation of MLIR."""
    if operation.name == "stablehlo.custom_call":
        return [operation]
    inner = (op.operation for region in operation.regions for block in region for op in block)
    return [call for op in inner for call in calls(op)]


def kernel_text(config):
    """Return the kernel in Triton's MLIR, which JAX hands to XLA as bytes."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    with ir.Context() as context:
        dialect.register_dialect(context)
        return ir.Module.parse(config["ir"].value_bytes).operation.get_asm()


@pytest.mark.parametrize("stream_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("C", [768, 576, 769, 4096])
@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_a_kernel_compiles_for_hopper(jax, way, C, stream_dtype, tmp_path):
    """By the Triton here, which is not XLA's. No thread spills, all programs of the backward fit, loads are wide."""
    config = lower(jax, way, C, stream_dtype)
    assert config["name"].value == f"pallas_rms_norm_{way}"
    assert config["name"].value in backend("rms_norm", "pallas").RUNS
    warps = config["num_warps"].value
    if way == "bwd":
        assert config["grid_x"].value * warps == 132 * 32
    source, cubin = tmp_path / "kernel.ttir", tmp_path / "kernel.cubin"
    source.write_text(kernel_text(config))
    binary = triton.compile(str(source), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    cubin.write_bytes(binary.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    assert (stack, registers <= 64) == (0, True)  # 32 warps of 64 registers fill a multiprocessor
    for instruction in ("ld.global.v4.b32", "st.global.v4.b32"):  # 16 bytes
        assert (instruction in binary.asm["ptx"]) == (C % 8 == 0)


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_offsets_into_large_tensors_have_64_bits(jax, way):
    """JAX chooses by the size of each tensor. x has 2^28 or 2^32 numbers."""
    for rows, bits in ((2**18, "32"), (2**22, "64")):
        text = kernel_text(lower(jax, way, 1024, "bfloat16", rows))
        assert {*re.findall(r"tt\.addptr .*, tensor<\d+x1024xi(\d+)>", text)} == {bits}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_a_cpu_interprets(device, monkeypatch):
    """A GPU runs the kernels, or nothing."""
    calls = []
    monkeypatch.setattr(xla, "compute", lambda *arguments, **options: calls.append(options) or arguments[2:5])
    module = backend("rms_norm", "pallas")
    monkeypatch.setattr(module, "multiprocessors", lambda _: 132)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, weight, rstd = (torch.empty(size, device=device) for size in ((4, 64), 64, 4))
        module.run_forward(x, x, weight, None, 1e-5)
        module.launch_backward(x, weight, None, x.dtype, x.dtype, x, x, rstd, rstd)
    assert [options["interpret"] for options in calls] == [device == "cpu"] * 2
    described = describe("rms_norm", "pallas", shape=(4, 64), dtype=torch.float32, device=CPU)
    assert re.fullmatch(r"pallas \(jax [\d.]+, XLA [\d.]+, interpreted\)", described)
    assert "interpreted" not in module.detail(x=x) or device == "cpu"


def test_what_is_refused(monkeypatch):
    """torch.compile and CUDA graphs, as in kernels/xla.py; and what does not fit into registers."""
    message = r"^kernels\.compile=true cannot run here: .*, and kernels\.rms_norm\.pallas runs in XLA: choose"
    config = GPTConfig(**vars(SMALL) | {"norm": "rmsnorm", "bias": False})
    with pytest.raises(Unavailable, match=message):
        build(config, KernelsConfig(rms_norm="pallas", compile=True), AttnConfig("eager"), "fp32", CPU, seed=0)
    function = load("rms_norm", "pallas", CPU)
    inputs = rms_norm.inputs((4, 64), dtype=torch.float32)
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"torch\.compile cannot trace rms_norm=pallas, which XLA compiles: choose"):
        torch.compile(function, fullgraph=True, backend="eager")(**inputs)
    for options, refused in (
        ({"shape": (2, 16392), "dtype": torch.float32}, "widths up to 16384, not 16392"),
        ({"shape": (2, 64), "dtype": torch.float64}, "float32, bfloat16 and float16, not torch.float64"),
    ):
        with pytest.raises(Unavailable, match=f"^rms_norm=pallas takes {refused}: choose kernels.rms_norm=eager$"):
            function(**rms_norm.inputs(**options))

    class OnGpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    message = r"^a CUDA graph cannot contain rms_norm=pallas, because .*: choose kernels\.rms_norm=eager$"
    with pytest.raises(Unavailable, match=message):
        backend("rms_norm", "pallas").rms_norm(OnGpu(), None, None)


def test_a_jax_without_the_compiler_is_named(monkeypatch):
    """JAX 0.11 says that a later JAX will lack it."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    reason = unavailable("rms_norm", "pallas", CPU)
    assert reason.startswith("it needs jax>=0.10,<0.13 (")
    assert reason.endswith("): pip install 'jax>=0.10,<0.13'")
