"""The table of ops: errors, descriptions and labels. test_new_op.py tests that it finds new ops and backends."""

import inspect

import pytest
import torch

from kernels import lookup, names, registry
from kernels import norm as norm_contract
from kernels.gpu import package_unavailable, triton_unavailable
from kernels.names import OPS, preset
from kernels.registry import (
    AttnConfig,
    KernelError,
    KernelsConfig,
    Unavailable,
    contract,
    describe,
    impls,
    importable_backends,
    label,
    load,
    resolve,
)

CPU = torch.device("cpu")


def test_the_error_names_an_unknown_or_incomplete_backend(monkeypatch):
    """A backend is incomplete if its file lacks the op's function."""
    with pytest.raises(KernelError, match=r"norm=fast: no file kernels/norm/fast.py; there are auto, cutile, eager"):
        load("norm", "fast", CPU)
    with pytest.raises(KernelError, match=r"kernels.mlp=sdpa: no file"):
        KernelsConfig(norm="eager", mlp="sdpa", loss="eager", compile=False)
    with pytest.raises(KernelError, match=r"attn.impl=../norm/eager: no file"):
        AttnConfig("../norm/eager")
    module = registry.backend("norm", "eager")
    monkeypatch.delattr(module, "norm")
    with pytest.raises(KernelError, match=r"kernels/norm/eager.py defines no function norm"):
        load("norm", "eager", CPU)


@pytest.mark.parametrize("line", ["TRAINS = False", "TRAINS: bool = False", "TRAINS: bool\nTRAINS = OTHER = False"])
def test_a_constant_of_a_contract_may_have_an_annotation(monkeypatch, tmp_path, line):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/__init__.py").write_text(f"{line}\nDEFAULT: str = 'mine'\n")
    monkeypatch.setattr(names, "ROOT", tmp_path)
    assert [names.read_constant("toy", name, "absent") for name in ("TRAINS", "DEFAULT", "FAMILY")] == [
        False,
        "mine",
        "absent",
    ]


@pytest.fixture
def broken_file(monkeypatch, tmp_path):
    """kernels/norm/ also has broken.py, which imports a package that does not exist."""
    (tmp_path / "broken.py").write_text("import no_such_package\n\n\ndef norm(x, **rest):\n    return x, x\n")
    monkeypatch.setattr("kernels.norm.__path__", [*norm_contract.__path__, str(tmp_path)])
    monkeypatch.setattr(lookup, "files", lambda op, files=lookup.files: files(op) + ["broken"] * (op == "norm"))


def test_a_file_that_cannot_be_imported_is_named_and_breaks_no_other_choice(broken_file, capsys):
    with pytest.raises(KernelError) as error:
        load("norm", "broken", CPU)
    assert str(error.value) == (
        "kernels/norm/broken.py cannot be imported (ModuleNotFoundError: No module named 'no_such_package'): "
        "python -c 'import kernels.norm.broken' shows where"
    )
    assert "takes no wings" in registry.missing_argument(load("norm", "eager", CPU), "wings", "norm")
    assert set(registry.importable_backends("norm")) == set(impls("norm")) - {"broken"}


def test_a_file_with_triton_needs_what_triton_needs(tmp_path, monkeypatch):
    """Without this, its kernels would fail in the middle of the first step."""
    path = tmp_path / "mine.py"
    path.write_text("import triton\n\n\ndef norm(x, residual, weight, bias, eps=1e-5):\n    return x, x\n")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert registry.unavailable("norm", str(path), CPU) == triton_unavailable(CPU)
    assert "for a trial on a CPU set TRITON_INTERPRET=1" in triton_unavailable(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert registry.unavailable("norm", str(path), CPU) is None


def test_all_backends_that_cannot_run_are_named_at_once(monkeypatch):
    for op, reason in {"norm": "it needs a", "mlp": "it needs b", "loss": "it needs a"}.items():
        monkeypatch.setattr(registry.backend(op, "eager"), "unavailable", lambda device, why=reason: why, raising=False)
    with pytest.raises(Unavailable) as error:
        resolve(KernelsConfig(), AttnConfig("eager"), CPU)
    assert str(error.value) == (
        "norm=eager, loss=eager cannot run here: it needs a; mlp=eager cannot run here: it needs b"
    )


def test_load_raises_unavailable_with_the_reason_of_the_backend(monkeypatch):
    module = registry.backend("norm", "eager")
    reason = "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    monkeypatch.setattr(module, "unavailable", lambda device: reason if device.type == "cpu" else None, raising=False)
    with pytest.raises(Unavailable, match=f"norm=eager cannot run here: {reason}"):
        load("norm", "eager", CPU)
    assert load("norm", "eager", torch.device("cuda")).__wrapped__ is module.norm


def test_every_op_has_a_contract():
    """Every op has eager and a cost for each shape. A name means one shape, in SHAPES or in CASES."""
    for op in registry.OPS:
        module = registry.contract(op)
        assert "eager" in impls(op)
        assert not module.SHAPES.keys() & module.CASES.keys()
        for shape in module.SHAPES.values():
            assert set(module.cost(**shape)) == {"forward", "backward"}


def test_describe_names_the_backend_that_sdpa_chooses():
    """It is PyTorch's own choice, also if torch.nn.attention.sdpa_kernel restricts the choice."""
    description = describe("attention", "sdpa", shape=(2, 64, 4, 32), packed=True, dtype=torch.bfloat16)
    assert description == f"sdpa (flash_for_cpu, torch {torch.__version__})"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        description = describe("attention", "sdpa", shape=(2, 64, 4, 32), dtype=torch.float32)
    assert description == f"sdpa (math, torch {torch.__version__})"


def test_labels_of_choices():
    sdpa = AttnConfig("sdpa")
    assert label(KernelsConfig(), sdpa, OPS) == "eager-sdpa"
    assert label(KernelsConfig(compile=True), sdpa, OPS) == "compile-sdpa"
    tuned = KernelsConfig(compile=True, compile_mode="max-autotune-no-cudagraphs")
    assert label(tuned, sdpa, OPS) == "compile.max-autotune-no-cudagraphs-sdpa"
    assert label(KernelsConfig(norm="triton"), sdpa, ["mlp", "norm"]) == "norm.triton+mlp.eager-sdpa"
    for op in (op for op in OPS if op != "attention"):  # the model does not call it, so the rest is a preset
        kernels = KernelsConfig(**preset("triton") | {op: "eager"})
        assert label(kernels, sdpa, [name for name in OPS if name != op]) == "triton-sdpa"


@pytest.mark.parametrize(
    ("compiles", "mode", "message"),
    [
        (True, "fast", "kernels.compile_mode=fast: choose default, max-autotune-no-cudagraphs, max-autotune-cutlass"),
        (
            True,
            "max-autotune",
            "compile_mode=max-autotune: it captures CUDA graphs of its own, and train.cuda_graph captures",
        ),
        (False, "max-autotune-no-cudagraphs", "no-cudagraphs has no effect: add kernels.compile=true"),
    ],
)
def test_a_wrong_mode_of_torch_compile_is_refused(compiles, mode, message):
    with pytest.raises(KernelError, match=message):
        KernelsConfig(compile=compiles, compile_mode=mode)


def test_resolve_stops_inductor_from_formatting_all_arguments():
    """The text of the arguments before a custom op doubles with every layer (compat.shorten_operator_errors)."""
    from torch._inductor.exc import MissingOperatorWithoutDecomp

    class Unprintable:
        def __str__(self):
            raise AssertionError("the argument was formatted")

    resolve(KernelsConfig(compile=True), AttnConfig("eager"), CPU)
    assert "aten.add" in MissingOperatorWithoutDecomp.operator_str(torch.ops.aten.add.Tensor, [Unprintable()], {})


@pytest.mark.parametrize("version", [None, "fa3"])
def test_a_loaded_function_has_no_attributes_of_the_backends_function(monkeypatch, version):
    """torch.compile() marks its functions with them. Dynamo would leave out the checks around such a function."""

    def attention(*arguments, version=None, **more):
        """Attend."""

    attention._torchdynamo_orig_callable = attention
    monkeypatch.setattr(registry.backend("attention", "eager"), "attention", attention)
    monkeypatch.setattr(registry, "unavailable", lambda *_: None)
    loaded = load("attention", "eager", torch.device("cpu"), version=version)
    assert (loaded.__name__, loaded.__doc__) == ("attention", "Attend.")
    assert not hasattr(loaded, "_torchdynamo_orig_callable")
    refused = registry.refuse_interpreted_bf16("attention", "eager", attention)
    assert not hasattr(refused, "_torchdynamo_orig_callable")


@pytest.mark.parametrize("op", OPS)
def test_a_backend_lacks_only_arguments_that_its_contract_calls_optional(op):
    """Otherwise the doctor, the benchmark and the judge would show a TypeError in the place of a refusal."""
    optional = {*getattr(contract(op), "OPTIONAL", ())}
    arguments = {*inspect.signature(contract(op).reference).parameters}
    assert optional <= arguments
    for impl, module in importable_backends(op).items():
        lacking = arguments - {*inspect.signature(getattr(module, op)).parameters}
        assert lacking <= optional, impl


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError, OSError])
def test_a_broken_package_is_a_reason_of_one_line(monkeypatch, tmp_path, error):
    """A package can fail in its import for lack of another one, or because its library is for another machine."""
    (tmp_path / f"broken_{error.__name__}.py").write_text(f"raise {error.__name__}('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    reason = package_unavailable("some-package>=1", f"broken_{error.__name__}.function")
    assert reason == "it needs some-package>=1 (two lines): pip install 'some-package>=1'"
