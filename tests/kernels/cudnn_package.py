"""A stand-in for the package nvidia-cudnn-frontend: the formulas, with the signatures and conventions of its source.

A graph reads and writes the tensors by the strides that it was told, from where each tensor begins, as cuDNN does.
"""

from types import SimpleNamespace

import torch

DTYPES = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32, "INT32": torch.int32}
ARGUMENTS = {"attn_scale", "diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound"}


class cudnnGraphNotSupportedError(RuntimeError):
    pass


class GraphTensor:
    def __init__(self, uid, dim=None, stride=None, data_type=None):
        self.uid, self.dim, self.stride, self.data_type = uid, dim, stride, data_type
        self.is_output = False

    def get_uid(self):
        return self.uid

    def set_output(self, value):
        self.is_output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self


class pygraph:
    built = 0

    def __init__(self, handle, io_data_type, intermediate_data_type, compute_data_type):
        assert intermediate_data_type == compute_data_type == torch.float32
        self.tensors, self.steps, self.io_data_type = [], [], io_data_type

    def new(self, *description):
        self.tensors.append(GraphTensor(len(self.tensors) + 1, *description))
        return self.tensors[-1]

    def tensor(self, name, dim, stride, data_type):
        return self.new(dim, stride, data_type)

    def sdpa(self, q, k, v, generate_stats, use_padding_mask=False, seq_len_q=None, seq_len_kv=None, **arguments):
        assert generate_stats
        assert arguments.keys() <= ARGUMENTS
        assert use_padding_mask == (seq_len_q is not None) == (seq_len_kv is not None)
        self.inputs = {"q": q, "k": k, "v": v, "queries": seq_len_q, "keys": seq_len_kv}
        self.results, self.arguments, self.compute = [self.new(), self.new()], arguments, forward
        return list(self.results)

    def sdpa_backward(self, q, k, v, o, dO, stats, **arguments):
        assert arguments.keys() <= ARGUMENTS
        self.inputs = {"q": q, "k": k, "v": v, "out": o, "dout": dO, "lse": stats}
        self.results, self.arguments, self.compute = [self.new() for _ in "qkv"], arguments, backward
        return list(self.results)

    def validate(self):
        if self.inputs["q"].dim[-1] % 8:
            raise cudnnGraphNotSupportedError(
                "no engine — python or backend — proposed a plan for this graph (the backend declined: hidden_dim "
                "should be multiple of 8.; python engines declined: sdpa_fwd_prefill_sm100: requires SM100-106)"
            )
        assert all(tensor.dim and tensor.stride and tensor.data_type for tensor in self.tensors)
        assert all(tensor.is_output for tensor in self.results)
        self.steps.append("validate")

    def build_operation_graph(self):
        self.steps.append("build")

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]
        self.steps.append("plan")

    def deselect_engines(self, names):
        assert names == ["sdpa_"]

    def check_support(self):
        self.steps.append("check")

    def build_plans(self):
        assert self.steps == ["validate", "build", "plan", "check"]
        pygraph.built += 1

    def get_workspace_size(self):
        return 48

    def execute(self, tensors, workspace, handle, tensor_uids):
        assert (workspace.dtype, workspace.shape) == (torch.uint8, (48,))
        given = dict(zip(tensor_uids, tensors, strict=True))
        assert given.keys() == {tensor.uid for tensor in self.tensors}

        def view(tensor):
            data = given[tensor.uid]
            assert not data.requires_grad
            assert data.dtype == tensor.data_type
            assert data.data_ptr() % 16 == 0
            assert all(data.element_size() * stride % 16 == 0 for stride in tensor.stride[:-1] if data.dim() == 4)
            return data.as_strided(tensor.dim, tensor.stride, data.storage_offset())

        inputs = {name: view(tensor).double() for name, tensor in self.inputs.items() if tensor is not None}
        results = self.compute(**inputs, **self.arguments)
        for tensor, result in zip(self.results, results, strict=True):
            view(tensor).copy_(result)


def masked_scores(q, k, attn_scale, queries=None, keys=None, diagonal_alignment=None, **bounds):
    """Return the scores (B, H, Tq, Tk), -inf where a query does not see the key.

    A query sees a key if column <= row + right bound, and column + left bound > row. BOTTOM_RIGHT adds to the row the
    difference of the lengths.
    """
    B, H, Tq, _ = q.shape
    scores = q @ k.repeat_interleave(H // k.shape[1], dim=1).mT * attn_scale
    lengths = [
        torch.full((B, 1, 1, 1), n) if given is None else given for n, given in ((Tq, queries), (k.shape[2], keys))
    ]
    row, column = torch.arange(Tq).view(1, 1, Tq, 1), torch.arange(k.shape[2]).view(1, 1, 1, -1)
    row = row + (lengths[1] - lengths[0] if diagonal_alignment == "BOTTOM_RIGHT" else 0)
    seen = column < lengths[1]
    if "diagonal_band_right_bound" in bounds:
        assert diagonal_alignment is not None
        seen = seen & (column <= row + bounds["diagonal_band_right_bound"])
    if "diagonal_band_left_bound" in bounds:
        seen = seen & (column + bounds["diagonal_band_left_bound"] > row)
    return scores.masked_fill(~seen, -torch.inf)


def forward(q, k, v, **arguments):
    scores = masked_scores(q, k, **arguments)
    out = scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return out, scores.logsumexp(-1, keepdim=True)


def backward(q, k, v, out, dout, lse, attn_scale, **arguments):
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    p = (masked_scores(q, k, attn_scale, **arguments) - lse).exp()
    ds = p * (dout @ values.mT - (dout * out).sum(-1, keepdim=True))
    of_heads = attn_scale * ds.mT @ q, p.mT @ dout
    dk, dv = (tensor.unflatten(1, (-1, group)).sum(2) for tensor in of_heads)
    return attn_scale * ds @ keys, dk, dv


PACKAGE = SimpleNamespace(
    pygraph=pygraph,
    data_type=SimpleNamespace(**DTYPES),
    diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"),
    heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
    cudnnGraphNotSupportedError=cudnnGraphNotSupportedError,
    backend_version=lambda: 91900,
    backend_version_string=lambda: "9.19.0",
    __version__="1.32.0",
)
