"""Every custom op that a backend calls, forward and backward, follows PyTorch's rules for custom ops."""

import pytest
import torch

from kernels.compat import TorchDispatchMode
from kernels.registry import OPS, contract, impls
from tests.kernels.test_backends import DEVICES, case_inputs, float_tensors, load_or_skip

CASES = {  # small, because opcheck calls an op about ten times; every case of an op that is not in the table
    "norm": ["fp32_residual", "plain"],
    "attention": ["64"],
    "linear": ["no_bias", "fp8"],
    "mlp": ["one_row", "no_bias", "fp8"],
    "loss": ["some_ignored", "fp8"],
}
UTILS = "test_faketensor", "test_autograd_registration", "test_schema", "test_aot_dispatch_dynamic"
FP8 = torch.float8_e4m3fn, torch.float8_e5m2


class CallRecorder(TorchDispatchMode):
    """Records the calls of our custom ops: op -> (arguments, results)."""

    supports_higher_order_operators = True  # FlexAttention uses higher-order operators

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace == "hotswap":
            self.calls[func] = args, result if isinstance(result, (tuple, list)) else (result,)
        return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op", "impl", "case"),
    [(op, impl, case) for op in OPS for impl in impls(op) for case in CASES.get(op, contract(op).CASES)],
)
def test_opcheck(op, impl, case, device, fp8_on_a_cpu):
    """torch.library.opcheck finds no mistake.

    An op neither changes nor returns its arguments. Its fake outputs have the real shapes and strides, also if sizes
    are symbols.
    """
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = case_inputs(op, case, dtype, device)
    function = load_or_skip(op, impl, device, inputs)
    with CallRecorder() as forward:
        outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with CallRecorder() as backward:
        torch.autograd.grad(outputs, float_tensors(inputs.values()), [torch.randn_like(out) for out in outputs])
    for record in (forward, backward):
        for func, (args, results) in record.calls.items():
            copies = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            if record is forward:
                for copy in float_tensors(copies):
                    copy.requires_grad_()
            # the last two checks compute with all tensors, which PyTorch cannot do in fp8
            in_fp8 = any(isinstance(value, torch.Tensor) and value.dtype in FP8 for value in (*args, *results))
            torch.library.opcheck(func, copies, test_utils=UTILS[:2] if in_fp8 else UTILS)
