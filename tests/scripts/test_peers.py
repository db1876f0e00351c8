"""`python -m scripts.peers`: another system's model in the loop of train.py, with the weights of ours."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from common.files import read_line
from lab import rows
from lab.report.tables import throughput
from scripts import collect, peers

SHAPES = {
    "llama": "model.pos=rope model.norm=rmsnorm model.mlp=swiglu model.bias=false model.n_kv_head=2",
    "qwen3": "model.pos=rope model.norm=rmsnorm model.mlp=swiglu model.bias=false model.qk_norm=true model.head_dim=64",
    "gpt2": "model.tie_embeddings=false",
}
# A checkout of nanoGPT as far as scripts.peers needs it. It prints the dtypes of its first forward
NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.n_head
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd, bias=c.bias)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd, bias=c.bias)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(c.n_embd, bias=c.bias) for _ in range(2))
        self.attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        parts = {"wte": nn.Embedding(c.vocab_size, c.n_embd), "wpe": nn.Embedding(c.block_size, c.n_embd)}
        parts |= {"h": nn.ModuleList(Block(c) for _ in range(c.n_layer)), "ln_f": nn.LayerNorm(c.n_embd, bias=c.bias)}
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.calls = 0

    def forward(self, idx, targets):
        FAILURE
        t = self.transformer
        x = t.wte(idx) + t.wpe(torch.arange(idx.shape[1]))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        if self.calls == 0:
            print(f"weights {self.lm_head.weight.dtype} logits {logits.dtype}")
        self.calls += 1
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)

    def compile(self, *arguments, **options):
        print("compile", arguments, options)
"""


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run scripts.peers in an empty folder: command("liger=true", "--", ...) -> (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "nanogpt_model", raising=False)
    return lambda *words: called("peers.py", peers.main_with_training, "device=cpu", "out_dir=peer", *words)


@pytest.fixture
def checkout(tmp_path):
    """Write a checkout of nanoGPT, whose forward begins with a line; return the words that choose it."""

    def write(failure="pass"):
        (tmp_path / "nano").mkdir()
        (tmp_path / "nano/model.py").write_text(NANOGPT.replace("FAILURE", failure))
        return ["system=nanogpt", "path=nano"]

    return write


def training(tmp_path, *words):
    """Return words for train.py: three steps of a tiny model on a CPU."""
    Path("a.txt").write_text("".join(f"{i} to be or not to be, {i * i}\n" for i in range(2000)))
    sizes = ["train.block_size=32", "train.batch_size=4", "train.tokens_per_step=256", "train.log_every=1"]
    text = ["data=text", "data.path=a.txt", "data.tokenizer=bytes", f"data.cache={tmp_path / 'tokens'}"]
    return ["model=tiny", "model.n_layer=2", *sizes, *text, "train.max_steps=3", "optim.warmup_steps=1", *words]


def figures(folder):
    """Return (loss, gradient norm) of each step of a run."""
    lines = map(read_line, Path(folder, "metrics.jsonl").read_bytes().splitlines())
    return [(line["train/loss"], line["train/grad_norm"]) for line in lines]


def train_ours(hotswap, *words):
    code, _, err = hotswap("+experiment=throughput", "proof=false", "device=cpu", "out_dir=ours", *words)
    assert (code, err) == (0, "")
    return figures("ours")


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_trains_as_our_model(command, hotswap, tmp_path, monkeypatch, kind):
    """Losses and gradient norms are ours up to fp32's rounding, also after two updates. The row names what ran."""
    words = training(tmp_path, *SHAPES[kind].split(), "precision=fp32")
    code, out, _ = command("--", *words)
    assert (code, out.splitlines()[-1]) == (0, "done     peer/result.json")
    for theirs, ours in zip(figures("peer"), train_ours(hotswap, *words), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)
    row = json.loads(Path("peer/result.json").read_text())
    name = f"transformers {transformers.__version__}"
    assert (row["status"], row["kernels"]["peer"], row["steps"]) == ("ok", name, 3)
    assert row["env"]["transformers"] == transformers.__version__
    assert row["name"].endswith("M-transformers-fp32")
    monkeypatch.setattr(rows, "RESULTS", tmp_path / "results")
    collect.collect(Path("peer"), row, curves=False, beside="today")
    collect.collect(Path("ours"), json.loads(Path("ours/result.json").read_text()), curves=False, beside="today")
    lines = [[cell.strip() for cell in line.split("|")[1:3]] for line in throughput("today").splitlines()[4:]]
    assert sorted(lines) == [["eager", next(cell for kernels, cell in lines if kernels == "eager")], [name, "sdpa"]]


@pytest.mark.parametrize(("precision", "weights"), [("amp", "float32"), ("bf16", "bfloat16")])
def test_nanogpt_trains_as_its_users_train_it(command, hotswap, checkout, tmp_path, precision, weights):
    """It is compiled without options. In bf16 the weights have no fp32 masters, and in amp autocast casts.

    Its first loss is ours up to bf16's rounding of the logits and, in bf16, of the loss, 2^-8 each.
    """
    words = training(tmp_path, f"precision={precision}")
    code, out, err = command(*checkout(), "--", *words, "kernels=compile")
    assert (code, err) == (0, "")
    assert "compile () {}\n" in out
    assert f"weights torch.{weights} logits torch.bfloat16\n" in out
    ours = train_ours(hotswap, *words)
    assert figures("peer")[0][0] == pytest.approx(ours[0][0], rel=2**-7)
    row = json.loads(Path("peer/result.json").read_text())
    assert row["kernels"]["peer"] == f"nanoGPT {row['env']['nanogpt']} + torch.compile"


def test_nanogpt_without_rounding_is_our_gpt2(command, hotswap, checkout, tmp_path):
    words = training(tmp_path, "precision=fp32", "model.bias=false")
    assert command(*checkout(), "--", *words)[0] == 0
    for theirs, ours in zip(figures("peer"), train_ours(hotswap, *words), strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)


def test_liger_replaces_parts_of_the_models_class(command, monkeypatch, tmp_path):
    """Here its function for Llama only writes down that transformers' model did not exist yet."""
    built, applied = [], []
    build = transformers.AutoModelForCausalLM.from_config
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_config", lambda *a, **b: built.append(1) or build(*a, **b)
    )
    liger = SimpleNamespace(apply_liger_kernel_to_llama=lambda: applied.append(len(built)))
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace(transformers=liger, __path__=[]))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", liger)
    words = training(tmp_path, *SHAPES["llama"].split(), "precision=fp32")
    assert command("liger=true", "--", *words)[0] == 0
    assert (applied, built) == ([0], [1])
    words = training(tmp_path, "precision=fp32")
    error = command("liger=true", "out_dir=other", "--", *words)[2]  # Liger has no function for GPT-2 here
    assert error.startswith("error: transformers+liger-fp32 cannot run here: it needs liger-kernel")


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        ("raise RuntimeError('CUDA error: an illegal memory access\\nMore lines')", "failed: CUDA error: an illegal"),
        ("raise TypeError('no such kernel')", "failed: no such kernel"),  # such as Triton's errors, of any class
        ("raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9.00 GiB.')", "oom"),
    ],
)
def test_a_failure_of_the_peer_is_the_status_of_its_row(command, checkout, tmp_path, failure, status):
    code, _, err = command(*checkout(failure), "--", *training(tmp_path, "precision=fp32"))
    assert (code, err.count("\n")) == (1, 1), err
    assert err.startswith("error: ")
    row = json.loads(Path("peer/result.json").read_text())
    assert row["status"].startswith(status)
    assert collect.why_skipped(row) is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["system=llm.c"], "system=llm.c: choose transformers or nanogpt"),
        (["path=nano"], "system=transformers path=nano: path is for system=nanogpt: leave it out"),
        (["system=nanogpt"], "system=nanogpt path=None: pass path=FOLDER, a checkout of nanoGPT"),
        (["system=nanogpt", "path=nano"], "nanogpt-amp cannot run here: nano has no model.py"),
        (["liger=true"], "transformers+liger-amp cannot run here: it needs liger-kernel"),
        (["--", "kernels=triton"], "kernels.norm=triton is for our models: choose kernels=eager"),
        (["--", "precision=fp8"], "precision=fp8 is for our kernels"),
        (["--", "out_dir=x"], "out_dir=x stands after --: put it before --"),
        (["--", "kernels.adamw=triton"], "a peer trains with kernels.adamw=auto, not triton"),
        (["--", "optim=muon"], "a peer trains with optim.name=adamw, not muon"),
        (["--", "train.eval_every=5"], "a peer trains with train.eval_every=0, not 5"),
        (["--", "model.logit_softcap=30"], "this model has a soft cap of its logits (logit_softcap), which hf's GPT-2"),
        (["--", "model.bias=false"], "transformers-amp has 454,144 parameters, but our model has 451,200: choose"),
        (["--", "model.bis=false"], "model.bis"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(command, monkeypatch, tmp_path, words, error):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # as if it was not installed
    own = words[: words.index("--")] if "--" in words else words
    code, _, err = command(*own, "--", *training(tmp_path), *words[len(own) + 1 :])
    assert (code, err.count("\n")) == (1, 1), err
    assert error in err
    assert not Path("peer").exists()
