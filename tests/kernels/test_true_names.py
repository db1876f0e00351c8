"""A backend's name and description say who computes: no other language and no other library runs under its name."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.names import preset
from kernels.registry import OPS, AttnConfig, KernelsConfig, contract, describe, family_patterns, impls, unavailable
from lab.bench.op import forward_and_backward, outputs, random_gradients
from lab.proof.receipt import profile_step
from model.config import GPTConfig
from model.executed import call_shapes, executed_kernels
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from model.step import build, train_step
from runtime.console import model_header
from runtime.timing import synchronize
from tests.kernels.test_backends import DEVICES, load_or_skip
from tests.kernels.who_computes import COMPUTING, imported_files, imports, own_kernels, source_file, unexplained

pytest.importorskip("triton", reason="Triton is for Linux")

BACKENDS = [(op, impl) for op in OPS for impl in impls(op) if impl != "auto"]
TRITON = [(op, impl) for op in [*OPS, "decode"] for impl in impls(op) if impl.startswith("triton")]
GLUON = [(op, impl) for op in OPS for impl in impls(op) if impl.startswith("gluon")]
SMALL = GPTConfig(
    block_size=128, vocab_size=512, n_layer=2, n_head=2, n_embd=128, pos="learned", bias=True, dropout=0.0
)
GPU = pytest.mark.gpu


@pytest.mark.parametrize(("op", "impl"), TRITON)
def test_a_backend_in_triton_imports_no_gluon(op, impl):
    """Nor does any file that it imports. Its name is a promise for every GPU."""
    for path in imported_files(source_file(op, impl)):
        assert "gluon" not in path.stem
        assert not [name for name in imports(path) if "gluon" in name], path


@pytest.mark.parametrize(("op", "impl"), GLUON)
def test_a_backend_in_gluon_has_kernels_in_gluon(op, impl):
    assert any("gluon" in name for name in own_kernels(op, impl))
    assert (op, impl.replace("gluon", "triton")) in TRITON  # what its refusals name


@pytest.mark.parametrize(("op", "impl"), GLUON)
def test_on_a_cpu_gluon_says_what_it_needs_and_what_can_run(op, impl):
    key = "attn" if op == "attention" else f"kernels.{op}"
    remedy = f"choose {key}={impl.replace('gluon', 'triton')}"
    assert unavailable(op, impl, torch.device("cpu")) == f"it needs a Hopper GPU (compute capability 9.0): {remedy}"


@pytest.mark.parametrize("impl", ["triton", "int8"])
def test_every_kernel_of_a_decoder_is_of_its_family(impl):
    """So the profile of a step counts all of them as decoding."""
    texts = [path.read_text() for path in imported_files(source_file("decode", impl)) if path.parent.name == "decode"]
    names = re.findall(r"^@triton\.jit.*\ndef (_\w+_kernel)\(", "\n".join(texts), re.MULTILINE)
    family = "|".join(family_patterns({"decode": impl})["decode"])
    assert "_product_kernel" in names
    assert [name for name in names if not re.search(family, name)] == []


def test_the_preset_gluon_takes_triton_for_the_ops_that_gluon_lacks():
    choices = preset("gluon")
    others = dict.fromkeys(("norm", "rms_norm", "linear", "rope"), "triton")
    assert choices == {**others, "mlp": "gluon", "glu": "gluon", "loss": "gluon"}
    assert preset("triton") == dict.fromkeys(choices, "triton")
    assert preset("liger") == {op: "eager" if op in ("linear", "mlp") else "liger" for op in choices}


def test_the_unexplained_kernels_of_a_step():
    """Names from the receipts of steps on an H200. On Hopper, `triton` ran the two kernels in Gluon."""
    names = ["_mlp_fwd_kernel", "_fwd_kernel", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "Memset (Device)"]
    names += ["void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>", "_sum_rows_kernel"]
    chosen = {"mlp": "triton (triton 3.6.0, cuBLAS matmuls)", "attention": "triton (triton 3.6.0)"}
    assert unexplained(names, chosen) == []
    others = ["_mlp_gluon_kernel", "_attention_fwd_gluon_kernel", "cross_entropy_kernel"]
    others += ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1"]
    others += ["void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl>"]
    assert unexplained([*names, *others], chosen) == others
    assert unexplained(names[2:3], {"mlp": "triton (triton 3.6.0)"}) == names[2:3]
    assert unexplained(others[:2], {"mlp": "gluon (triton 3.6.0)", "attention": "gluon (triton 3.6.0)"}) == []
    assert unexplained(names[:1], {"mlp": "auto (triton: triton 3.6.0)"}) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(("op", "impl"), BACKENDS)
def test_a_backend_runs_only_what_its_description_says(op, impl, fp8, device, fp8_on_a_cpu):
    """Forward and backward at a small model's shape: on a GPU every kernel is explained, on a CPU every matmul.

    On a CPU, Triton's interpreter runs no operator of PyTorch for a kernel.
    """
    device = torch.device(device)
    precision = "fp8" if fp8 else "bf16" if device.type == "cuda" else "fp32"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = replace(SMALL, **getattr(contract(op), "MODEL", {}))
    arguments = call_shapes(model, KernelsConfig(), precision, (2, 128))[op]
    if fp8 and "fp8" not in arguments:
        pytest.skip(f"{op} has no products in fp8")
    inputs = contract(op).inputs(**arguments, dtype=dtype, device=device)
    function = load_or_skip(op, impl, device, inputs)
    douts = random_gradients(outputs(function, inputs), inputs)
    forward_and_backward(function, inputs, douts)  # compiles
    receipt = profile_step(lambda: forward_and_backward(function, inputs, douts), device, family_patterns({}))
    names = [kernel["name"] for kernel in receipt["kernels"]]
    if device.type == "cpu":
        names = [name for name in names if COMPUTING.search(name)]
    description = describe(op, impl, **arguments, dtype=dtype, device=device)
    assert unexplained(names, {op: description}, everywhere=device.type == "cuda") == []


@GPU
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("kernels", "attn"),
    [
        ("triton", "triton"),
        ("gluon", "gluon"),
        *(("eager", attn) for attn in ("eager", "sdpa", "cudnn", "cudnn_frontend", "flash", "mem_efficient", "math")),
    ],
)
def test_a_training_step_runs_only_what_the_header_says(kernels, attn, precision):
    """Every kernel in the profile of a step is explained by the descriptions of the chosen backends."""
    device = torch.device("cuda")
    choices = preset(kernels) | ({"loss": "triton"} if (kernels, precision) == ("gluon", "fp8") else {})
    groups = SMALL, KernelsConfig(**choices), AttnConfig(attn), precision
    for op, impl in {**choices, "attention": attn}.items():
        if reason := unavailable(op, impl, device):
            pytest.skip(f"{op}={impl}: {reason}")
    model = build(*groups, device, seed=0)
    optimizer = make_optimizer(model, OptimConfig(6e-4, 6e-5, 10, 0.1, 0.9, 0.95, 1.0))
    ids = torch.randint(SMALL.vocab_size, (2, 4, 129), device=device)
    batches = [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]
    train_step(model, optimizer, batches, 1e-4)
    receipt = profile_step(lambda: train_step(model, optimizer, batches, 1e-4), device, family_patterns({}))
    synchronize(device)
    descriptions = executed_kernels(*groups, (4, 128), device)
    descriptions.pop("compile")
    assert unexplained([kernel["name"] for kernel in receipt["kernels"]], descriptions) == []


def test_the_header_of_a_generation_separates_the_prefill_from_the_decoder():
    """The steps of a decoder other than blocks run none of the other kernels."""
    kernels = {"norm": "eager (torch 2.11.0)", "attention": "sdpa (cudnn)", "compile": False}
    config = {"precision": "bf16", "kernels": {"compile": False}}
    row = {"env": {"device": "H200"}, "config": config, "kernels": kernels}
    kernels["decode"] = "triton (triton 3.6.0)"
    *_, prefill, steps = model_header(row, "124M").splitlines()
    assert prefill == "prefill  norm eager (torch 2.11.0) | attention sdpa (cudnn)"
    assert steps == "kernels  decode triton (triton 3.6.0)"
    kernels["decode"] = "blocks (torch 2.11.0)"
    assert model_header(row, "124M").splitlines()[-1].startswith("kernels  norm eager (torch 2.11.0) | attention")
