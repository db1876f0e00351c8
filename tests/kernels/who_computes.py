"""Which kernels a backend may run, by what its name and its detail() say.

Our kernels are the functions with @triton.jit or @gluon.jit in the files that the backend imports. The kernels of a
library are known by their names, and a backend may run them if its description names the library.
"""

import ast
import functools
import re
from pathlib import Path

from kernels.lookup import ROOT, source_file

PYTORCH = r"at::|at_cuda_detail|cunn_|softmax_warp|triton_(poi|per|red|tem)_|^aten::"
CUBLAS = r"(?i:nvjet|gemm|gemv|cublas|splitK|xmma|cutlass::Kernel2?<cutlass_)|^aten::_?(add|scaled_|b|badd)*b?mm"
# A pattern of a description -> the names of its library's kernels. Plain PyTorch calls cuBLAS
LIBRARIES = {
    r"^(?!mem_efficient)\S+ \((torch|math, torch)|^auto \(eager": f"{PYTORCH}|{CUBLAS}",
    r"cuBLAS|nvmath": CUBLAS,
    r"cudnn": r"cudnn",
    r"PyTorch's fa2|\(flash, torch": r"pytorch_flash::",
    r"\bmem_efficient\b|\(efficient": r"fmha_cutlass|PyTorchMemEffAttention",
    r"\bflash \(fa[23]": r"\bflash::|FlashAttn",
    r"\bfa4\b": r"flash_attn|FlashAttention\w*Sm|cutlass_kernel|kernel_cutlass",
    r"cutlass-dsl": r"kernel_cutlass|quack|^_lce_glue",
    r"liger-kernel": r"liger|_(layer|rms)_norm_\w+_kernel|element_mul|_swiglu_\w+_kernel|_triton_rope",
    r"helion": r"helion",
    r"cuda-tile": r"cutile_",
    r"tilelang": r"tilelang",
    r"^pallas ": r"pallas_",
    r"_for_cpu": r"_for_cpu",
    r"\bXLA\b": r"fusion|^wrapped_|^(loop|input)_|^triton_|RepeatBuffer|redzone",
}
# Of every step: elementwise work and sums of autograd and of the model, the embedding, the optimizer, copies and fills
EVERYWHERE = (
    r"at::native::.*(elementwise|reduce|[Ff]ill|[Cc]opy|CatArray|multi_tensor|embedding|index|sort|[Ss]catter|[Gg]ather"
    r"|distribution|arange|compute_|krn_|sum_and_|split_)|^exp2_kernel_vectorized|cub::|^Mem(set|cpy)|lpnorm|NormTwoOps|fused_adam|^_adamw_kernel$"
)
# What the ops compute. Such a kernel is never a part of `EVERYWHERE`
OF_AN_OP = r"(?i)gelu|softmax|(layer|rms)_?norm|GammaBeta|nll_loss|cross_entropy|attention|sdpa|flash|fmha"
COMPUTING = re.compile(  # operators on a CPU that compute an op
    r"^aten::(_?(add|scaled_|b|badd)*b?mm|gelu|_?(log_)?softmax|native_layer_norm|_?(fused_)?rms_norm|nll_loss|_scaled_dot)"
)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports: modules, and names in modules."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def imported_files(path: Path) -> set[Path]:
    """Return the file, and the files of kernels/ that it imports, directly or not. Contracts are left out."""
    found, todo = set(), [path]
    while todo:
        file = todo.pop()
        found.add(file)
        paths = (ROOT.parent / f"{name.replace('.', '/')}.py" for name in imports(file) if name.startswith("kernels."))
        todo += {other for other in paths if other.exists()} - found
    return found


def own_kernels(op: str, impl: str) -> set[str]:
    """Return the names of the kernels in Triton and Gluon that the backend's file imports."""
    texts = [path.read_text(encoding="utf-8") for path in imported_files(source_file(op, impl))]
    found = [re.findall(r"^@(?:triton|gluon)\.jit.*\ndef (\w+_kernel)\(", text, re.MULTILINE) for text in texts]
    return {name for names in found for name in names}


def unexplained(names: list[str], descriptions: dict[str, str], everywhere: bool = True) -> list[str]:
    """Return the kernels, or on a CPU the operators, that no chosen backend explains.

    `descriptions` is op -> registry.describe() of its backend: "triton (triton 3.6.0, cuBLAS matmuls)". With
    `everywhere`, the kernels of every step are explained, too.
    """
    impls = {op: re.sub(r"^auto \((\w+).*", r"\1", text).partition(" (")[0] for op, text in descriptions.items()}
    ours = {name for op, impl in impls.items() for name in own_kernels(op, impl)}
    words = [
        pattern for word, pattern in LIBRARIES.items() if any(re.search(word, text) for text in descriptions.values())
    ]

    def is_explained(name: str) -> bool:
        if name in ours or any(re.search(pattern, name) for pattern in words):
            return True
        return everywhere and bool(re.search(EVERYWHERE, name)) and not re.search(OF_AN_OP, name)

    return [name for name in names if not is_explained(name)]
