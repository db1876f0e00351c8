"""Every custom op that a backend calls, forward and backward, against PyTorch's rules for them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.registry import OPS, impls
from tests.kernels.test_backends import DEVICES, case_inputs, tensors, usable

CASES = {  # small: opcheck calls an op some ten times
    "norm": ["fp32_residual", "plain"],
    "attention": ["64"],
    "mlp": ["one_row", "no_bias"],
    "loss": ["some_ignored"],
}


class Record(TorchDispatchMode):
    """The arguments of our custom ops that pass, by op."""

    supports_higher_order_operators = True  # FlexAttention's are some

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "hotswap":
            self.calls[func] = args
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op", "impl", "case"), [(op, impl, case) for op in OPS for impl in impls(op) for case in CASES[op]]
)
def test_opcheck(op, impl, case, device):
    """No argument is written to or handed back, and fakes have the real thing's shapes and strides, symbols as well."""
    device = torch.device(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = case_inputs(op, case, dtype, device)
    function = usable(op, impl, device, inputs)
    with Record() as forward:
        outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with Record() as backward:
        torch.autograd.grad(outputs, tensors(inputs.values()), [torch.randn_like(out) for out in outputs])
    for record in (forward, backward):
        for func, args in record.calls.items():
            copies = [arg.detach().clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            if record is forward:
                for copy in tensors(copies):
                    copy.requires_grad_()
            torch.library.opcheck(func, copies)
