"""Each private part in model/compat.py still works, and is still needed. A failure says what to change there."""

import inspect

import pytest
import torch

from model import compat

X, Y = 2 * torch.eye(4), 3 * torch.eye(4)


def square_as_a_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A wrong decomposition of mm(), whose effect is easy to see: x @ y becomes x @ x."""
    return torch.bmm(x[None], x[None])[0]


def wrong_backend(graph, examples):
    return compat.compile_graph(graph, examples, {torch.ops.aten.mm.default: square_as_a_product})


def product(x, y):
    """Inductor calls libraries for products, and so compiles no C++, which would take 7 s of CPU time."""
    return x @ y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lists_of_tensors_are_added(dtype):
    """As with add_() one by one, also into another dtype."""
    targets, sources = [torch.zeros(3), torch.zeros(2, 2)], [torch.full((3,), 0.1), torch.full((2, 2), 0.3)]
    sources = [source.to(dtype) for source in sources]
    compat.add_tensors(targets, sources)
    assert all(torch.equal(target, source.float()) for target, source in zip(targets, sources, strict=True))


def test_compile_graph_uses_the_decompositions():
    torch.compiler.reset()
    assert torch.equal(torch.compile(product)(X, Y), X @ Y)
    assert torch.equal(torch.compile(product, backend=wrong_backend)(X, Y), X @ X)


def test_the_cache_of_autograd_still_ignores_decompositions(tmp_path, monkeypatch):
    """Without compile_graph()'s setting, a compilation with a decomposition returns cached code that lacks it."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    def cached_backend(graph, examples):
        table = {**select_decomp_table(), torch.ops.aten.mm.default: square_as_a_product}
        return compile_fx(graph, examples, decompositions=table)

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with config.patch(enable_autograd_cache=True):
        torch.compiler.reset()
        torch.compile(product)(X, Y)
        torch.compiler.reset()
        result = torch.compile(product, backend=cached_backend)(X, Y)
    assert torch.equal(result, X @ Y), (
        "the key of AOTAutograd's cache contains the decompositions: remove config.patch() from compile_graph()"
    )


def test_torch_compile_still_takes_no_decompositions():
    names = {
        *torch.compiler.list_backends(),
        *torch._inductor.list_options(),
        *inspect.signature(torch.compile).parameters,
    }
    assert "decompositions" not in names, "torch.compile takes decompositions: remove compile_graph()"
