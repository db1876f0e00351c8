"""The families of kernels that were seen on an H200, and a step that did not run the kernel that its row names."""

import time

import pytest
import torch

from kernels.registry import OPS, family_patterns, impls
from lab.proof.receipt import family_of, missing_kernel, optimizer_ms, profile_step
from model.optim import OptimConfig
from model.optimizers import make_optimizer
from tests.model.test_optim import ADAMW

FAMILIES_OF_KERNELS = {
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "gemm",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>": "gemm",
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int)": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel": "attention",
    "triton_tem_fused_flex_attention_backward_transpose_1": "attention",
    "triton_per_fused__softmax_backward_data_view_10": "attention",
    "_fwd_kernel": "attention",
    "_dkdv_kernel": "attention",
    "_lse_delta_kernel": "attention",
    "_attention_fwd_gluon_kernel": "attention",
    "_attention_bwd_gluon_kernel": "attention",
    "_mlp_gluon_kernel": "mlp",
    "triton_poi_fused_gelu_gelu_backward_view_5": "mlp",
    "void at::native::vectorized_elementwise_kernel<8, at::native::GeluBackwardCUDAKernelImpl>": "mlp",
    "_norm_bwd_kernel": "norm",
    "triton_per_fused_add_native_layer_norm_native_layer_norm_backward_view_8": "norm",
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16>": "norm",
    "cross_entropy_kernel": "loss",
    "_cross_entropy_gluon_kernel": "loss",
    "dlogits_fp8_kernel": "loss",
    "_gelu_fp8_kernel": "mlp",
    "_quantize_kernel": "linear",
    "_maxima_kernel": "linear",
    "triton_red_fused__log_softmax__to_copy_prepare_softmax_online_4": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>": "loss",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedOpti": "optimizer",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_vectorized<at::native::Opaq": "copies and fills",
    "Memset (Device)": "copies and fills",
    "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16>>": "elementwise and sums",
    "triton_red_fused_sum_view_3": "elementwise and sums",
}


@pytest.mark.parametrize(("name", "expected"), FAMILIES_OF_KERNELS.items())
def test_a_kernel_belongs_to_the_family_of_its_op(name, expected):
    """With its own backend chosen it has the expected family. With another backend it may have no op's family."""
    called = [op for op in OPS if op != "rms_norm"]
    backends = [{op: impl} for op in called for impl in impls(op)]
    families = {family_of(name, family_patterns(dict.fromkeys(called, "eager") | backend)) for backend in backends}
    assert expected in families
    assert families <= {expected, "other", "elementwise and sums"}


def test_a_receipt_has_the_operators_of_a_step_on_a_cpu():
    """The families have all of their time, and the longest operator comes first."""
    a = torch.randn(200, 200)
    eager = family_patterns(dict.fromkeys(OPS, "eager"))
    receipt = profile_step(lambda: torch.nn.functional.gelu(a @ a), torch.device("cpu"), eager)
    assert {"gemm", "mlp"} <= receipt["families"].keys()
    assert receipt["busy_ms"] == pytest.approx(sum(kernel["ms"] for kernel in receipt["kernels"]))
    times = [kernel["ms"] for kernel in receipt["kernels"]]
    assert times == sorted(times, reverse=True)
    assert {kernel["name"]: kernel["calls"] for kernel in receipt["kernels"]}["aten::mm"] == 1
    counted = profile_step(lambda: [a @ a for _ in range(4)], torch.device("cpu"), eager, lambda: 8)
    assert {kernel["name"]: kernel["calls"] for kernel in counted["kernels"]}["aten::mm"] == 0.5
    assert counted["busy_ms"] == pytest.approx(sum(kernel["ms"] for kernel in counted["kernels"]))
    assert missing_kernel(receipt, {"mlp": ("eager", ("aten::gelu", "aten::mm"))}) is None
    assert missing_kernel(receipt, {"attention": ("flash (fa4)", ("aten::mm", "FlashAttentionForwardSm"))}) == (
        "the row says attention=flash (fa4), but no kernel of the profiled step matches FlashAttentionForwardSm"
    )


def test_the_time_of_an_update_is_the_optimizers_alone(monkeypatch):
    """It is the median without the first call, and changes no weight. A forward takes 50 ms more."""
    embedding = torch.nn.Embedding(11, 6)
    optimizer = make_optimizer(embedding, OptimConfig(**ADAMW), dtype=torch.float32)
    before, sleeps, step = embedding.weight.detach().clone(), iter((0.2, 0.03, 0.01, 0.2)), optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda *given: (time.sleep(next(sleeps)), step(*given)))

    def model(ids, targets):
        time.sleep(0.05)
        return embedding(ids).square().mean()

    ids = torch.arange(4)
    assert 30 <= optimizer_ms(model, optimizer, (ids, ids)) < 200
    assert torch.equal(before, embedding.weight)
    assert next(sleeps, None) is None
