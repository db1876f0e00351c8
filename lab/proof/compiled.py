"""The memory of a model under torch.compile, on fake tensors.

AOTAutograd's partition decides which tensors a compiled model saves for its backward. It reads shapes only, so it works
on fake tensors. simulate_code() is a backend of torch.compile: Inductor traces and partitions a graph with its own
settings, and stops. In place of Inductor's code it returns a function that allocates and frees what that code would,
in the order of the graph. So a simulated step runs a compiled model like any other (lab/proof/memory.py).

Inductor fuses operators, and most of the tensors between them never exist. The rules here are Inductor's own:

- A matmul, an attention and a custom op are kernels of their own. What they read and write is in memory. Each run of
  other operators between two of them is one kernel.
- Inside such a kernel a reduction is stored, and so is a tensor with many inputs (MOST_READS). What only the kernel
  itself reads is not.
- A kernel writes a result over an argument of the same size that nothing reads later.

Inductor may move a kernel: a step of 124M in bf16 takes 0.5 GiB more than predicted. The size fits a delay of the
gradient of the head's weight.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from kernels.compat import storage_id
from lab import compat

# Inductor stores a tensor that two operators use if it reads more than 4 tensors, and any other from 8 on
# (torch._inductor.config.realize_reads_threshold, torch._inductor.ir.StorageBox.has_exceeded_max_reads)
MOST_READS_OF_REUSED, MOST_READS = 4, 8
Values = dict[fx.Node, object]  # the tensors that exist now


def simulate_code(graph: fx.GraphModule, examples: Sequence[Tensor]) -> Callable:
    """Compile a graph, as a backend of torch.compile, into functions that allocate and compute nothing."""
    return compat.compile_without_code(graph, examples, allocations)


def allocations(graph: fx.GraphModule, _, **options) -> Callable[[list], list]:
    """Return a function with the arguments and results of `graph`, a forward or a backward from AOTAutograd."""
    nodes = list(graph.graph.nodes)
    stored = stored_nodes(nodes)
    kernels = group(nodes, stored)
    last_reads = nodes_by_last_reader(kernels, stored)
    inputs = [node for node in nodes if node.op == "placeholder"]

    def run(arguments: list) -> list:
        values = dict(zip(inputs, arguments, strict=True))
        arguments.clear()  # the caller has given up its references
        for kernel, dying in zip(kernels, last_reads, strict=True):
            for node in kernel:
                if node.op == "call_function" and node in stored and not (node in dying and is_tensor(node)):
                    if is_fused(node):
                        overwrite(values, dying, node)
                    values[node] = evaluate(node, values)
            if kernel[0].op != "output":
                remove(values, dying)
        return list(fx.node.map_arg(nodes[-1].args[0], values.get))

    run._boxed_call = True  # AOTAutograd then passes a list
    return run


def is_tensor(node: fx.Node) -> bool:
    """Return whether the result is one tensor, and not several."""
    return isinstance(node.meta["val"], Tensor)


def is_fused(node: fx.Node) -> bool:
    return node.op == "call_function" and compat.is_fusible(node) and not compat.is_view(node)


def is_part(node: fx.Node) -> bool:
    """Return whether the node is a part of a kernel, and no kernel of its own."""
    return is_fused(node) or compat.is_view(node)


def stored_nodes(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[fx.Node]]:
    """Return the nodes whose results are in memory, if a kernel after their own reads them, and what they read."""
    needed = set()  # what a kernel of its own reads, and the results
    for node in reversed(nodes):
        if not is_part(node) or (compat.is_view(node) and node in needed):
            needed.update(node.all_input_nodes)
    stored, reads = {}, {}  # reads: a node -> the stored nodes that are read to compute its users
    for node in nodes:
        sources = reads[node] = set().union(*(reads[argument] for argument in node.all_input_nodes))
        if compat.is_view(node):
            is_stored = node.all_input_nodes[0] in stored
        else:
            limit = MOST_READS_OF_REUSED if len(node.users) > 1 else MOST_READS
            is_stored = not is_fused(node) or node in needed or is_reduction(node) or len(sources) > limit
            if is_stored:
                reads[node] = {node}
        if is_stored:
            stored[node] = sources
    return stored


def group(nodes: Sequence[fx.Node], stored: dict[fx.Node, set[fx.Node]]) -> list[list[fx.Node]]:
    """Return the kernels. A fused node that only reads results of earlier kernels joins the last of these, if fused."""
    kernels, place = [], {}
    for node in nodes:
        latest = max((place[source] for source in stored.get(node, ())), default=0)
        if is_fused(node) and node in stored and is_part(kernels[latest][0]):
            place[node] = latest
        else:
            if not (kernels and is_part(node) and is_part(kernels[-1][0])):
                kernels.append([])
            place[node] = len(kernels) - 1
        kernels[place[node]].append(node)
    return kernels


def is_reduction(node: fx.Node) -> bool:
    """Return whether the result is smaller than an argument, or is two tensors (var_mean)."""
    values = [node.meta["val"], *(argument.meta.get("val") for argument in node.all_input_nodes)]
    sizes = [value.numel() for value in values if isinstance(value, Tensor)]
    return not is_tensor(node) or sizes[0] < max(sizes)


def nodes_by_last_reader(kernels: list[list[fx.Node]], stored: dict[fx.Node, set[fx.Node]]) -> list[set[fx.Node]]:
    """Return for each kernel the nodes that no later kernel reads. What is not stored is computed where it is read."""
    last = {}
    for index, kernel in reversed(list(enumerate(kernels))):
        for node in reversed(kernel):
            is_kept = node in stored and not compat.is_alias(node)
            reader = index if is_kept else last.get(node, index)
            for argument in node.all_input_nodes:
                last[argument] = max(last.get(argument, reader), reader)
    dying = [set() for _ in kernels]
    for node, index in last.items():
        dying[index].add(node)
    return dying


def overwrite(values: Values, dying: set[fx.Node], node: fx.Node) -> None:
    """Remove one dying tensor, with its views, that is as large as the result of `node`."""
    for other in dying:
        value = values.get(other)
        if is_tensor(node) and isinstance(value, Tensor) and value.nbytes == node.meta["val"].nbytes:
            key = storage_id(value.untyped_storage())
            tensors = [(n, values[n]) for n in dying if isinstance(values.get(n), Tensor)]
            remove(values, [n for n, tensor in tensors if storage_id(tensor.untyped_storage()) == key])
            return


def remove(values: Values, nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        values.pop(node, None)


def evaluate(node: fx.Node, values: Values) -> object:
    """Allocate the result of a node. A view shares its argument's memory, and a custom op allocates inside, too."""
    runs = compat.is_view(node) or compat.is_custom_op(node)
    if runs and all(argument in values for argument in node.all_input_nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.get)
        return node.target(*args, **kwargs)
    return compat.tree_map_only(Tensor, allocate_like, node.meta["val"])


def allocate_like(tensor: Tensor) -> Tensor:
    """Allocate a tensor like one of another FakeTensorMode, which torch.empty_like() refuses."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
