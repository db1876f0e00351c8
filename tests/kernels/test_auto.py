"""kernels=auto and attn=auto run the backends that were the fastest in measurements here, and name them."""

import json
import re
from dataclasses import replace

import pytest
import torch

from kernels import fastest
from kernels.attention import auto
from kernels.decode import Model
from kernels.decode import auto as auto_decoder
from kernels.registry import AttnConfig, KernelsConfig, Unavailable, backend, called_backends, contract, describe, load
from kernels.sampling import Sampling
from kernels.tuned import merged_table, table_paths, write_table
from lab.bench import choose
from model.config import GPTConfig
from model.decoder import make_decoder
from model.executed import executed_kernels
from model.generate_config import GenerateConfig
from model.step import build, load_ops
from scripts import bench_attention, tune
from scripts import generate as script

CPU = torch.device("cpu")
FLOAT = {"dtype": torch.float32}


@pytest.fixture
def filled(tables):
    """The path of a table in which eager is the fastest at T = 64 and sdpa at T = 128."""
    choice = {"parameters": {"64": "eager", "128": "sdpa"}}
    kinds = "causal", "causal decode"
    path, _ = table_paths(CPU)
    write_table(path, {f"attention {kind} float32 64 x1": choice for kind in kinds})
    return path


def test_auto_picks_the_backend_of_the_nearest_measured_length(filled):
    """The nearest length by ratio: between 64 and 128 the boundary is at (64 x 128)^1/2 = 90.5."""
    load("attention", "auto", CPU)
    for length, name in ((1, "eager"), (90, "eager"), (91, "sdpa"), (4096, "sdpa")):
        inputs = contract("attention").inputs((1, 1, 2, 64), keys=length, **FLOAT)
        assert auto.choose_backend(inputs["q"], inputs["k"]) == (name, backend("attention", name))
    assert describe("attention", "auto", shape=(1, 100, 2, 64), **FLOAT).startswith("auto (sdpa: ")
    assert describe("attention", "auto", shape=(1, 1, 2, 64), keys=64, lengths=(64,), **FLOAT) == "auto (eager)"


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_computes_with_the_backend_that_it_picks(filled, compiled):
    """The output equals the output of that backend, also under torch.compile."""
    attention = load("attention", "auto", CPU)
    function = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    for length in (60, 100, 110):
        inputs = contract("attention").inputs((1, length, 2, 64), **FLOAT)
        expected = backend("attention", "eager" if length < 90 else "sdpa").attention(**inputs)
        torch.testing.assert_close(function(**inputs), expected, rtol=1e-6, atol=1e-6)


def test_auto_raises_for_a_kind_of_attention_that_was_not_measured(filled):
    """The message has the command that measures it. Without any measurement load() raises."""
    attention = load("attention", "auto", CPU)
    inputs = contract("attention").inputs((1, 8, 4, 80), kv_heads=2, window=5, **FLOAT)
    message = "`attention window float32 80 x2` .* auto=true window=5 heads=4 kv_heads=2 head_dim=80 dtype=float32"
    with pytest.raises(Unavailable, match=message):
        attention(**inputs)
    filled.unlink()
    merged_table.cache_clear()
    with pytest.raises(Unavailable, match="nothing was measured on this device yet: run python -m scripts"):
        load("attention", "auto", CPU)


def test_bench_attention_fills_the_table(filled, called, monkeypatch, tmp_path):
    """A second run adds its T to the entries of the first. A decoding step has an entry of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lab.bench.attention.TOKENS", 64)
    monkeypatch.setattr("lab.bench.op.impls", lambda op: ["eager", "sdpa"])
    for length in (16, 32):
        shape = f"lengths=[{length}]", "heads=4", "kv_heads=2", "head_dim=8", "dtype=float32", "device=cpu", "rounds=2"
        code, out, err = called("bench_attention.py", bench_attention.main, "auto=true", *shape)
        assert (code, err) == (0, "")
        assert f"auto     attention causal float32 8 x2 {length}: " in out
    entries = json.loads(filled.read_text())
    for name in ("attention causal float32 8 x2", "attention causal decode float32 8 x2"):
        assert set(entries[name]["parameters"]) == {"16", "32"}
        times = entries[name]["ms"]["32"]
        assert entries[name]["parameters"]["32"] == min(times, key=times.get)
        assert set(times) == {"eager", "sdpa"}
    load("attention", "auto", CPU)
    assert describe("attention", "auto", shape=(1, 20, 4, 8), kv_heads=2, **FLOAT).startswith("auto (")


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_takes_another_backend_where_the_fastest_refuses(filled, compiled, monkeypatch):
    """gluon takes no cache, and its loss no odd vocabulary; torch_chunked takes no cap.

    The row then names what runs instead.
    """
    entries = {
        "attention causal float32 64 x1": {"parameters": {"64": "gluon"}},
        "loss float32": {"parameters": {"64": "gluon", "128": "torch_chunked"}},
    }
    entries["attention causal decode float32 64 x1"] = {"parameters": {"64": "sdpa"}}
    write_table(table_paths(CPU)[0], entries)
    for op, refusing, changes in (
        ("attention", "gluon", {}),
        ("loss", "gluon", {"vocab": 50}),
        ("loss", "torch_chunked", {"shape": (3, 128), "vocab": 64, "softcap": 5.0}),
    ):
        monkeypatch.setattr(backend(op, refusing), "unavailable", lambda device: None)
        function = load(op, "auto", CPU)
        function = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
        shapes = {"attention": {"shape": (1, 8, 2, 64), "keys": 20}, "loss": {"shape": (3, 64)}}
        sizes = shapes[op] | changes
        inputs, impl = contract(op).inputs(**sizes, **FLOAT), {"attention": "sdpa", "loss": "eager"}[op]
        expected = getattr(backend(op, impl), op)(**inputs)
        torch.testing.assert_close(function(**inputs), expected, rtol=1e-6, atol=1e-6)
        assert describe(op, "auto", **sizes, **FLOAT).startswith(f"auto ({impl}")


def test_a_window_inside_documents_is_measured_separately(filled):
    """The fastest backend for windows may not support documents, so entries for each alone do not count."""
    entries = {f"attention {kind} float32 64 x1": {"parameters": {"64": "eager"}} for kind in ("window", "documents")}
    write_table(table_paths(CPU)[0], entries)
    attention = load("attention", "auto", CPU)
    inputs = contract("attention").inputs((1, 8, 2, 64), window=5, documents=(3, 5), **FLOAT)
    with pytest.raises(Unavailable, match=r"`attention window documents float32 64 x1` .* window=5 documents=512"):
        attention(**inputs)


def test_auto_ignores_a_measured_backend_that_no_longer_exists(filled):
    """It picks another measured backend, and raises if there is none."""
    entries = {"attention causal float32 64 x1": {"parameters": {"64": "mine", "128": "sdpa"}}}
    write_table(table_paths(CPU)[0], entries | {"attention window float32 64 x1": {"parameters": {"64": "mine"}}})
    load("attention", "auto", CPU)
    assert describe("attention", "auto", shape=(1, 8, 2, 64), **FLOAT).startswith("auto (sdpa: ")
    with pytest.raises(Unavailable, match="nothing was measured for `attention window float32 64 x1`"):
        describe("attention", "auto", shape=(1, 8, 2, 64), window=5, **FLOAT)


@pytest.fixture
def filled_ops(tables, monkeypatch):
    """A table with a choice for each op in fp32. At a width of 64 the loss is eager, and at 256 torch_chunked."""
    monkeypatch.setattr(backend("loss", "torch_chunked"), "unavailable", lambda device: None)  # it needs torch 2.13
    entries = {f"{op} float32": {"parameters": {"64": "eager"}} for op in ("norm", "linear", "mlp")}
    entries["loss float32"] = {"parameters": {"64": "eager", "256": "torch_chunked"}}
    entries["attention causal float32 32 x1"] = {"parameters": {"64": "sdpa"}}
    write_table(table_paths(CPU)[0], entries)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_op_takes_the_backend_of_the_nearest_width(filled_ops, compiled, monkeypatch):
    """Widths 64 and 256 were measured. The border is 128, their geometric mean."""
    marks = {"eager": 1.0, "torch_chunked": 2.0}
    for impl, mark in marks.items():
        monkeypatch.setattr(backend("loss", impl), "loss", lambda x, *_, ignore_index, mark=mark: x.sum() * mark)
    loss = load("loss", "auto", CPU)
    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    for width, impl in ((8, "eager"), (128, "eager"), (129, "torch_chunked"), (2048, "torch_chunked")):
        inputs = contract("loss").inputs((3, width), vocab=50, **FLOAT)
        torch.testing.assert_close(function(**inputs), inputs["x"].sum() * marks[impl])
        assert describe("loss", "auto", shape=(3, width), vocab=50, **FLOAT).startswith(f"auto ({impl}")


def test_an_entry_is_for_the_dtypes_of_all_tensors(filled_ops):
    """Measurements in one dtype say nothing about another one, nor about fp8. The message has the command."""
    for op, inputs, entry, dtype in (
        (
            "norm",
            contract("norm").inputs((2, 64), residual_dtype=torch.float32, dtype=torch.bfloat16),
            "norm bfloat16 float32",
            "bfloat16",
        ),
        ("mlp", contract("mlp").inputs((2, 64), fp8=True, **FLOAT), "mlp float32 fp8", "float32"),
    ):
        function = load(op, "auto", CPU)
        message = (
            f"{op}=auto: nothing was measured for `{entry}` on this device: run {fastest.FILL_COMMAND} dtype={dtype}"
        )
        with pytest.raises(Unavailable, match=re.escape(message)):
            function(**inputs)


TINY = GPTConfig(block_size=8, vocab_size=32, n_layer=1, n_head=2, n_embd=64, pos="learned", bias=True, dropout=0.0)
AUTO = KernelsConfig(norm="auto", linear="auto", mlp="auto", loss="auto")


@pytest.fixture
def triton_here(monkeypatch):
    """Triton counts as available on the CPU, also beside a GPU, where its interpreter is off."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    for op in ("norm", "linear", "mlp"):
        monkeypatch.setattr(backend(op, "triton"), "unavailable", lambda device: None)


@pytest.mark.parametrize("precision", ["bf16", "amp", "fp8"])
def test_a_model_has_the_functions_of_the_chosen_backends(precision, tables, triton_here, monkeypatch):
    """It never calls a function that chooses, so neither does torch.compile."""
    monkeypatch.setattr(fastest, "call_fastest", None)
    in_fp8 = " fp8" if precision == "fp8" else ""
    norm = "norm bfloat16 float32" if precision == "amp" else "norm bfloat16"
    choices = {norm: "triton", f"linear bfloat16{in_fp8}": "eager", f"mlp bfloat16{in_fp8}": "triton"}
    choices[f"loss bfloat16{in_fp8}"] = "eager"
    write_table(table_paths(CPU)[0], {entry: {"parameters": {"64": impl}} for entry, impl in choices.items()})
    groups = TINY, AUTO, AttnConfig("sdpa"), precision
    model = build(*groups, CPU, seed=0)
    [block] = model.h
    functions = {"linear": block.attn.c_attn.linear, "mlp": block.mlp.mlp, "loss": model.loss}
    if in_fp8:
        assert all(function.keywords == {"fp8": True} for function in functions.values())
        functions = {op: function.func for op, function in functions.items()}
    functions |= {"norm": model.ln_f.norm}
    names = {op: function.__module__ for op, function in functions.items()}
    assert names == {entry.split()[0]: f"kernels.{entry.split()[0]}.{impl}" for entry, impl in choices.items()}
    assert block.attn.c_proj.linear is block.attn.c_attn.linear
    assert block.ln_2.norm is (backend("norm", "triton").norm_in_fp8 if in_fp8 else model.ln_f.norm)
    executed = executed_kernels(*groups, (1, 8), CPU)
    assert executed["norm"].startswith("auto (triton: triton 3.")
    assert (executed["linear"], executed["loss"]) == ("auto (eager)", "auto (eager)")


def test_torch_compile_with_fp8_needs_ptxas_only_if_a_chosen_backend_does(tables, triton_here, monkeypatch):
    """Triton's backends round with kernels of their own, and eager's with Inductor's."""
    monkeypatch.setattr("kernels.fp8.choose_ptxas", lambda device: "it needs ptxas")
    monkeypatch.setattr(backend("loss", "triton"), "unavailable", lambda device: None)
    groups = TINY, replace(AUTO, compile=True), AttnConfig("sdpa"), "fp8", CPU
    for impl in ("triton", "eager"):
        entries = {f"{op} bfloat16 fp8": impl for op in ("linear", "mlp", "loss")} | {"norm bfloat16": "triton"}
        write_table(table_paths(CPU)[0], {entry: {"parameters": {"64": name}} for entry, name in entries.items()})
        if impl == "eager":
            with pytest.raises(Unavailable, match="with precision=fp8 cannot run here: it needs ptxas"):
                load_ops(*groups)
        else:
            assert load_ops(*groups).mlp.func.__module__ == "kernels.mlp.triton"


def test_linear_is_a_backend_that_takes_both_projections(tables, triton_here, monkeypatch):
    """Eager, if the fastest refuses one of them. The row says it. A call of the op alone has no such limit."""
    write_table(table_paths(CPU)[0], {"linear float32": {"parameters": {"64": "triton"}}})
    kernels = KernelsConfig(linear="auto")
    for refused, impl in ((64, "eager"), (192, "eager"), (65, "triton")):

        def refusal(x, weight, *rest, fp8=False, refused=refused):
            return "no such weight" if len(weight) == refused else None

        monkeypatch.setattr(backend("linear", "triton"), "refusal", refusal, raising=False)
        groups = TINY, kernels, AttnConfig("sdpa"), "fp32"
        assert load_ops(*groups, CPU).linear.__module__ == f"kernels.linear.{impl}"
        assert executed_kernels(*groups, (1, 8), CPU)["linear"].startswith(f"auto ({impl}")
    assert describe("linear", "auto", shape=(3, 64), out=64, **FLOAT).startswith("auto (triton: ")


def test_projections_of_two_widths_take_the_first_backend_that_takes_both(tables, triton_here, monkeypatch):
    """With head_dim, x of the output projection is not n_embd wide, and the table may name another backend for it."""
    write_table(table_paths(CPU)[0], {"linear float32": {"parameters": {"64": "triton", "128": "eager"}}})
    groups = replace(TINY, head_dim=2 * TINY.n_embd // TINY.n_head), KernelsConfig(linear="auto"), AttnConfig("sdpa")
    for refused, impl in ((None, "triton"), (128, "eager")):

        def refusal(x, weight, *rest, fp8=False, refused=refused):
            return "no such weight" if weight.shape[1] == refused else None

        monkeypatch.setattr(backend("linear", "triton"), "refusal", refusal, raising=False)
        assert load_ops(*groups, "fp32", CPU).linear.__module__ == f"kernels.linear.{impl}"


def test_auto_takes_eager_for_a_model_with_a_cap_that_the_fastest_lacks(filled_ops, monkeypatch):
    write_table(table_paths(CPU)[0], {"loss float32": {"parameters": {"64": "torch_chunked"}}})
    for softcap, impl in ((None, "torch_chunked"), (30.0, "eager")):
        groups = replace(TINY, logit_softcap=softcap), KernelsConfig(loss="auto"), AttnConfig("sdpa"), "fp32"
        assert load_ops(*groups, CPU).loss.__module__ == f"kernels.loss.{impl}"
        assert executed_kernels(*groups, (1, 8), CPU)["loss"].startswith(f"auto ({impl}")


def test_a_dtype_without_a_measurement_is_refused_before_the_model_is_built(filled_ops, hotswap, monkeypatch):
    """The line has the command that measures it. The table has fp32 alone."""
    monkeypatch.setattr("model.step.GPT", None)
    monkeypatch.setattr("data.open_dataset", None)
    code, _, err = hotswap("+experiment=smoke", "kernels=auto", "precision=bf16")
    measure = f"run {fastest.FILL_COMMAND} dtype=bfloat16"
    assert (code, err) == (1, f"error: norm=auto: nothing was measured for `norm bfloat16` on this device: {measure}\n")


def test_the_row_and_the_header_name_the_backends(filled_ops, hotswap, tmp_path):
    words = (
        "+experiment=smoke",
        "kernels=auto",
        "attn=auto",
        "train.max_steps=1",
        "train.sample_tokens=0",
        "out_dir=run",
    )
    code, out, err = hotswap(*words)
    assert (code, err) == (0, "")
    kernels = json.loads((tmp_path / "run/result.json").read_text())["kernels"]
    assert [kernels[op] for op in ("norm", "linear", "mlp", "loss")] == 4 * ["auto (eager)"]
    assert kernels["attention"].startswith("auto (sdpa: ")
    assert "kernels  norm auto (eager) | linear auto (eager) | attention auto (sdpa: " in out


def test_without_a_table_one_line_names_the_command_that_fills_it(tables, hotswap):
    code, _, err = hotswap("+experiment=smoke", "kernels=auto", "attn=auto")
    why = f"nothing was measured on this device yet: run {fastest.FILL_COMMAND}"
    ops = "norm=auto, linear=auto, attention=auto, mlp=auto, loss=auto"
    assert (code, err) == (1, f"error: {ops} cannot run here: {why}\n")


def test_a_receipt_expects_the_kernels_of_the_backend_that_auto_calls():
    row = {"norm": "auto (triton: triton 3.6.0)", "mlp": "auto (eager)", "attention": "auto (sdpa: cudnn)"}
    kernels, attn = KernelsConfig(norm="auto", mlp="auto", linear="triton"), AttnConfig("auto")
    row |= {"linear": "triton (triton 3.6.0)"}
    called = {"norm": "triton", "linear": "triton", "attention": "sdpa", "mlp": "eager"}
    assert called_backends(kernels, attn, row) == called


def decoder_table(**entries):
    """Write a table of decoders: decoder_table(w64={1: {"blocks": 2.0, "triton": 1.0}}), ms by width and batch."""
    table = {}
    for width, sizes in entries.items():
        parameters = {str(batch): min(ms, key=ms.get) for batch, ms in sizes.items()}
        times = {str(batch): ms for batch, ms in sizes.items()}
        table[f"decode float32 {width.removeprefix('w')}"] = {"parameters": parameters, "ms": times}
    write_table(table_paths(CPU)[0], table)


@pytest.fixture
def decoders_here(tables, monkeypatch):
    """Decoders for GPUs count as available on the CPU. flashinfer has the functions of blocks."""
    pytest.importorskip("triton", reason="Triton is for Linux")
    for impl in ("triton", "persistent", "flashinfer"):
        monkeypatch.setattr(backend("decode", impl), "unavailable", lambda device: None)
    for name in ("pack", "decode"):
        monkeypatch.setattr(backend("decode", "flashinfer"), name, getattr(backend("decode", "blocks"), name))
    monkeypatch.setattr(backend("decode", "flashinfer"), "detail", lambda: "of a test")


def test_a_batch_takes_the_decoders_of_the_nearest_width_and_batch(decoders_here):
    """The fastest comes first. Between widths 64 and 1024 the boundary is 256, and between batches 1 and 64 it is 8."""
    few = {"triton": 0.2, "blocks": 0.9, "persistent": 0.1}
    many = {"persistent": 3.0, "triton": 1.0, "blocks": 2.0}
    decoder_table(w64={1: few, 64: many}, w1024={8: {"flashinfer": 1.0}})
    ranked = {"few": ["persistent", "triton", "blocks"], "many": ["triton", "blocks", "persistent"]}
    for width, batch, expected in (
        *((256, batch, ranked["few"]) for batch in (1, 2, 8)),
        *((16, batch, ranked["many"]) for batch in (9, 64, 1000)),
        (257, 1, ["flashinfer", "blocks"]),
    ):
        assert fastest.rank_decoders(torch.float32, width, batch, CPU) == expected
    with pytest.raises(Unavailable, match=r"`decode bfloat16` .* auto=true op=decode dtype=bfloat16"):
        fastest.rank_decoders(torch.bfloat16, 64, 1, CPU)


def test_a_measured_decoder_that_no_longer_exists_does_not_decode(decoders_here):
    decoder_table(w64={1: {"gone": 0.1, "triton": 0.2}, 8: {"triton": 0.2, "gone": 0.3}})
    for batch in (1, 8):
        assert fastest.rank_decoders(torch.float32, 64, batch, CPU) == ["triton", "blocks"]
    decoder_table(w64={1: {"gone": 0.1}, 8: {"gone": 0.1}})
    with pytest.raises(Unavailable, match=r"decode=auto cannot run here: nothing was measured on this device yet"):
        fastest.rank_decoders(torch.float32, 64, 1, CPU)


def test_a_decoder_that_cannot_run_here_is_passed_over(decoders_here, generate, monkeypatch):
    """Its package may be gone. It was the fastest for other batches, or for this one, and then a warning says why."""
    why = "decode=flashinfer cannot run here: it needs flashinfer-python"
    slower = f"warning: decode=auto takes blocks, because what was measured to be faster refuses: {why}\n"
    for ms, warning in (
        ({1: {"blocks": 0.1}, 8: {"flashinfer": 0.1}}, ""),
        ({1: {"flashinfer": 0.1, "blocks": 0.2}}, slower),
    ):
        decoder_table(w64=ms)
        monkeypatch.setattr(backend("decode", "flashinfer"), "unavailable", lambda device: "it needs flashinfer-python")
        code, _, err, row = generate()
        assert (code, err, row["kernels"]["decode"]) == (0, warning, "auto (blocks)")


def test_the_next_decoder_runs_where_the_fastest_refuses(decoders_here, monkeypatch):
    """A refusal of the decoder itself, or of Decoder: no draft, no torch.compile. auto's own pack() does the same."""

    def refuse(*_):
        raise Unavailable("no such model")

    monkeypatch.setattr(backend("decode", "triton"), "pack", refuse)
    ms = {"triton": 0.1, "persistent": 0.2, "flashinfer": 0.3, "blocks": 0.4}
    decoder_table(w64={1: ms})
    model = build(TINY, KernelsConfig(), AttnConfig("sdpa"), "fp32", CPU, seed=0).eval()
    sampling, ngram = Sampling(32, temperature=0), GenerateConfig(speculate="ngram", draft_tokens=1)
    monkeypatch.setattr(backend("decode", "persistent"), "pack", backend("decode", "blocks").pack)
    assert make_decoder(model, 1, 8, sampling, decode="auto").name == "persistent"
    assert make_decoder(model, 1, 6, sampling, decode="auto", options=ngram).name == "flashinfer"
    assert make_decoder(model, 1, 8, sampling, decode="auto", compiled=True).name == "blocks"
    inputs = contract("decode").inputs(1, [5], **FLOAT)
    packed = auto_decoder.pack(Model(None, lambda: inputs["weights"]), inputs["cache"])
    assert packed[0] is backend("decode", "persistent")
    monkeypatch.setattr(backend("decode", "blocks"), "pack", refuse)
    message = (
        "decode=auto: no such model; kernels.decode=persistent verifies no draft: .*; no such model; no such model$"
    )
    monkeypatch.setattr(backend("decode", "flashinfer"), "pack", refuse)
    with pytest.raises(Unavailable, match=message):
        make_decoder(model, 1, 6, sampling, decode="auto", options=ngram)


GENERATE = "checkpoint=random", "model=tiny", "model.n_layer=1", "device=cpu", "precision=fp32", "prompt=ab"
GENERATE = *GENERATE, "max_new_tokens=3", "kernels.decode=auto"


@pytest.fixture
def generate(called, monkeypatch, tmp_path):
    """Run scripts.generate with kernels.decode=auto: generate("batch=8") -> (exit code, stdout, stderr, row)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "measured_bandwidth", lambda device: 1e10)

    def run(*words):
        folder = tmp_path / f"run{len(list(tmp_path.glob('run*')))}"
        answers = called("generate.py", script.main_with_exact_prompt, *GENERATE, f"out_dir={folder}", *words)
        return *answers, json.loads((folder / "result.json").read_text()) if answers[0] == 0 else None

    return run


def test_generate_names_the_decoder_that_runs(decoders_here, generate):
    """In the row and in the header. Blocks run the other ops in their steps, and the header then says so."""
    decoder_table(w64={1: {"flashinfer": 0.1, "blocks": 0.2}, 8: {"flashinfer": 0.2, "blocks": 0.1}})
    code, out, err, row = generate("proof=true")
    assert (code, err, row["kernels"]["decode"]) == (0, "", "auto (flashinfer: of a test)")
    assert "\nprefill  norm eager (" in out
    assert "\nkernels  decode auto (flashinfer: of a test)\n" in out
    assert (row["config"]["kernels"]["decode"], row["proof"]["ok"]) == ("auto", True)
    code, out, err, row = generate("batch=8")
    assert (code, err, row["kernels"]["decode"]) == (0, "", "auto (blocks)")
    assert re.search(r"\nkernels  norm eager .* \| decode auto \(blocks\)\n", out)


def test_generate_without_a_table_prints_the_command_that_fills_it(tables, generate):
    code, _, err, _ = generate()
    why = f"nothing was measured on this device yet: run {fastest.FILL_COMMAND} op=decode"
    assert (code, err) == (1, f"error: decode=auto cannot run here: {why}\n")


def test_tune_fills_the_table_of_decoders(decoders_here, called, generate, monkeypatch):
    """The fastest decoder with right tokens is stored. One with wrong tokens, and one that fails, have a line."""
    ms = {"flashinfer": {1: 1.0, 4: 4.0}, "blocks": {1: 2.0, 4: 3.0}}

    def probes(groups, device, limit):
        assert all((group[0].shape["batch"], group[0].shape["n_layer"]) == (1, 1) for group in groups)
        return [["wrong: error 1" if group[0].impl == "persistent" else "ok: fine"] * len(group) for group in groups]

    def broken(packed, tokens, cache):
        return backend("decode", "blocks").decode(packed, tokens, cache).roll(1, -1)

    def fail(*_):
        raise RuntimeError("it crashes")

    monkeypatch.setattr(choose, "BATCHES", (1, 4))
    monkeypatch.setattr(choose, "PROMPT", 4)
    monkeypatch.setattr(choose, "NEW_TOKENS", 4)
    monkeypatch.setattr(choose, "run_probes", probes)
    monkeypatch.setattr(choose, "step_ms", lambda decoder, idx: ms[decoder.name][len(idx)])
    monkeypatch.setattr(backend("decode", "triton"), "pack", fail)
    words = "op=decode", "auto=true", "dtype=float32", "device=cpu", "rounds=1"
    code, out, err = called("tune.py", tune.main, *words)
    assert (code, err) == (0, "")
    for line in (
        "without  decode=persistent at one, 1 sequences: wrong: error 1",
        "without  decode=triton at one, 4 sequences: failed: RuntimeError: it crashes",
        "auto     decode float32 64 1: flashinfer (flashinfer 1.000 ms, blocks 2.000 ms)",
        "auto     decode float32 64 4: blocks (blocks 3.000 ms, flashinfer 4.000 ms)",
    ):
        assert f"{line}\n" in out
    assert generate()[3]["kernels"]["decode"] == "auto (flashinfer: of a test)"
    monkeypatch.setattr(backend("decode", "flashinfer"), "decode", broken)
    out = called("tune.py", tune.main, *words)[1]
    assert "without  decode=flashinfer at one, 1 sequences: wrong: 3 of 4 greedy tokens are not" in out
    assert "auto     decode float32 64 1: blocks (blocks 2.000 ms)\n" in out


def test_a_decoder_is_timed_as_generation_runs_it(monkeypatch):
    """The real step_ms(): from the first new token to the last one."""
    times = iter([10.0, 10.5, 11.0, 12.0])
    monkeypatch.setattr(choose, "stream", lambda decoder, idx, new_tokens: range(4))
    monkeypatch.setattr(choose, "NEW_TOKENS", 5)
    monkeypatch.setattr(choose.time, "perf_counter", lambda: next(times))
    assert choose.step_ms(None, None) == 500.0
