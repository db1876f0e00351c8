"""Compile our kernels in Helion for a Hopper GPU that is not here: `python -m tests.kernels.compile_helion`.

In bf16 no kernel may spill, and a thread moves 16 bytes at once. Helion writes the Triton kernels from tensors on the
CPU. If a tensor has more than 2^31 elements, its offsets are int64. With HELION_INTERPRET=1 Helion runs the loss in
plain PyTorch instead, and the program compares it with PyTorch's.
"""

import os

import torch
from torch.nn.functional import cross_entropy

from kernels.glu.helion import choose_kernel
from kernels.loss import _helion as loss
from kernels.loss.triton import softmax_launch
from kernels.norm.helion import backward_kernel, forward_kernel
from kernels.rope import _helion as rope
from kernels.rope.triton import default_launch
from tests.kernels.compile_triton import NUMBERS, POINTERS, compile_kernel

ROWS, VOCAB = 1024, 50304


def compile_for_hopper(name: str, kernel, arguments: tuple) -> str:
    """Compile the Triton kernel that Helion launches for these arguments. Return its PTX."""
    launches = []

    def record(kernel, grid, *values, **options):
        launches.append((kernel, values, options))

    bound = kernel.bind(arguments)
    bound.compile_config(bound.kernel.configs[0])(*arguments, _launcher=record)
    [(kernel, values, options)] = launches
    types, constants = {}, {}
    for parameter, value in zip(kernel.params, values, strict=True):
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):  # Triton specialises a stride of 1
            constants[parameter.name] = value
        else:
            is_tensor = isinstance(value, torch.Tensor)
            types[parameter.name] = POINTERS[value.dtype] if is_tensor else NUMBERS[type(value)]
    small = all(value.numel() < 2**31 for value in values if isinstance(value, torch.Tensor))
    return compile_kernel(name, kernel, 90, types, small=small, **constants, **options)


def compile_norm(rows: int, C: int, residual_dtype: torch.dtype) -> None:
    x, residual = torch.empty(rows, C, dtype=torch.bfloat16), torch.empty(rows, C, dtype=residual_dtype)
    weight, numbers = torch.empty(C, dtype=torch.bfloat16), torch.empty(rows)
    for name, bias, mean in (("norm", weight, numbers), ("rms_norm", None, None)):
        arguments = x, residual, weight, bias, 1e-5, torch.empty_like(x), residual, mean, numbers
        ptx = [compile_for_hopper(f"helion {name} forward {C}", forward_kernel(x), arguments)]
        kernel, programs = backward_kernel(residual)
        dresidual, partial = residual if residual_dtype != x.dtype else None, torch.empty(programs, C)
        arguments = (
            x,
            residual,
            residual,
            weight,
            mean,
            numbers,
            x,
            dresidual,
            partial,
            None if bias is None else partial,
        )
        ptx.append(compile_for_hopper(f"helion {name} backward {C}", kernel, arguments))
        assert all("ld.global.v4" in text and "st.global.v4" in text for text in ptx)


def compile_loss(rows: int, write: bool) -> None:
    launch, logits = softmax_launch(VOCAB), torch.empty(rows, VOCAB, dtype=torch.bfloat16)
    kernel = loss.kernel(launch["BLOCK_V"], write, launch["num_warps"])
    targets = torch.zeros(rows, dtype=torch.int64)
    ptx = compile_for_hopper("helion loss", kernel, (logits, targets, torch.empty(rows), -1, write))
    assert "ld.global.v4" in ptx
    assert ("st.global.v4" in ptx) == write


def compile_rope(tokens: int, heads: int = 36, D: int = 64) -> None:
    launch = default_launch(heads, D // 2)
    kernel = rope.kernel((launch["BLOCK_T"], launch["BLOCK_H"]), launch["num_warps"])
    x = torch.empty(tokens, heads, 2, D // 2, dtype=torch.bfloat16)
    ptx = compile_for_hopper("helion rope", kernel, (x, torch.empty(2, 1024, D // 2), x, 24, 1.0))
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


def compile_glu(rows: int, F: int = 1536) -> None:
    a, h = torch.empty(rows, F, dtype=torch.bfloat16), torch.empty(rows, 2, F, dtype=torch.bfloat16)
    for name, arguments in (("swiglu_fwd", (h, a)), ("swiglu_bwd", (a, h, h))):
        ptx = compile_for_hopper(f"helion {name}", choose_kernel(name, a), arguments)
        assert "ld.global.v4" in ptx
        assert "st.global.v4" in ptx


def run_loss(rows: int, vocab: int) -> None:
    """Compare losses and their sum's gradient with PyTorch's. If there are several rows, the first one is ignored."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator)
    targets = torch.randint(vocab, (rows,), generator=generator)
    if rows > 1:
        targets[0] = -1
    losses, leaf = torch.empty(rows), logits.double().requires_grad_()
    expected = cross_entropy(leaf, targets, ignore_index=-1, reduction="none")
    expected.sum().backward()
    loss.kernel(32, True, 4)(logits, targets, losses, -1, True)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.double(), leaf.grad, rtol=1e-5, atol=1e-6)
    print(f"helion loss: {rows} rows of {vocab} are right")


if __name__ == "__main__":
    if os.environ.get("HELION_INTERPRET") == "1":
        for rows, vocab in ((1, 77), (7, 77), (7, 32)):
            run_loss(rows, vocab)
    else:
        for C in (768, 1600):
            for dtype in (torch.bfloat16, torch.float32):
                compile_norm(ROWS, C, dtype)
        compile_norm(2**31 // 768 + 1, 768, torch.bfloat16)
        for write in (True, False):
            compile_loss(ROWS, write)
        for size in (ROWS, 2**31 // (36 * 64) + 1):
            compile_rope(size)
            compile_glu(size)
        compile_loss(2**31 // VOCAB + 1, True)
