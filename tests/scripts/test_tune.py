"""`python -m scripts.tune` as a command. On a CPU it is a trial in Triton's interpreter."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")
from triton.runtime._async_compile import active_mode
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from kernels import speeds
from kernels.mlp import triton as mlp
from kernels.norm import triton as norm
from kernels.registry import OPS, backend, contract
from kernels.tuned import launch_parameters, read_table, write_table
from lab.bench import tune as tuning
from lab.bench.compile_ahead import launches_only_compile
from scripts import tune

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME = "norm_fwd 5 float32 float32"
NARROW = "op=norm", "shape=narrow", "dtype=float32", "rounds=1"


@pytest.fixture
def command(called, tables):
    """Run the command in this process: command("op=norm", ...) -> (exit code, stdout, stderr)."""
    return lambda *arguments: called("tune.py", tune.main, *arguments)


def empty_kernel():
    pass


def fake_times(seconds):
    """Return a time_in_turns() that measures nothing: `seconds(parameters)` is the time of the parameters."""
    return lambda works, device, rounds: {text: [seconds(json.loads(text))] * rounds for text in works}


def test_the_fastest_parameters_are_stored_and_launched(command, tables, monkeypatch):
    monkeypatch.setattr(tuning, "time_in_turns", fake_times(lambda parameters: 1.0 / parameters["ROWS"]))
    code, out, err = command(*NARROW)
    assert (code, err) == (0, "")
    table = read_table(tables[0])
    entry = table[NAME]
    assert set(table) == {NAME, "norm_bwd 5 float32 float32"}
    assert entry["parameters"]["ROWS"] == 8192 // 8
    assert (entry["ms"], entry["default_ms"]) == pytest.approx((1e3 * 8 / 8192, 1e3 * 8 / 4096), abs=1e-4)
    assert re.search(rf"^{NAME} +narrow +forward +1\.953 +0\.977 +BLOCK_C 8, ROWS 1024, .* 8 *$", out, re.MULTILINE)
    assert ("a trial" in out) == (DEVICE.type == "cpu")
    key = "5 torch.float32 torch.float32"
    assert launch_parameters("norm_fwd", key, norm.forward_launch(5), DEVICE) == entry["parameters"]


def test_every_candidate_gives_the_right_answer(tables, monkeypatch):
    monkeypatch.setattr(tuning, "time_in_turns", fake_times(lambda parameters: 1.0))
    dtype = "bfloat16" if DEVICE.type == "cuda" else "float32"
    for op, shape in (("norm", "narrow"), ("mlp", "one_row"), ("loss", "one_row")):
        for row in tuning.tune_shape(op, shape, dtype, 1, DEVICE, tuning.Budget()):
            assert (row["is wrong"], row["tried"] > 2) == (0, True), row


def test_a_candidate_is_rejected_when_it_is_wrong_or_does_not_fit(command, tables, monkeypatch):
    """BLOCK_C=4 leaves out one of the 5 columns, so its answer is wrong. The fake GPU has no room for 32 warps."""
    kernel = norm._norm_fwd_kernel

    class SmallGpuKernel:
        def __getitem__(self, grid):
            def launch(*arguments, **parameters):
                if parameters["num_warps"] == 32:
                    raise OutOfResources(300_000, 232_448, "shared memory")
                kernel[grid](*arguments, **parameters)

            return launch

    monkeypatch.setattr(norm, "_norm_fwd_kernel", SmallGpuKernel())
    monkeypatch.setattr(norm, "candidates", lambda kernel, default: [{"BLOCK_C": 4}, {"num_warps": 32}])
    monkeypatch.setattr(tuning, "time_in_turns", fake_times(lambda parameters: 1.0))
    code, out, _ = command(*NARROW)
    assert code == 0
    assert re.search(r"^norm_fwd .* 3, 1 does not fit, 1 is wrong *$", out, re.MULTILINE)
    assert read_table(tables[0])[NAME]["parameters"] == norm.forward_launch(5)


@pytest.mark.parametrize(("candidate_seconds", "best_rows"), [(1.05, 512), (0.99, 1024)])
def test_the_default_stays_unless_a_median_is_below_its_p20(tables, monkeypatch, candidate_seconds, best_rows):
    """The default has ROWS=512 and a p20 of 1.0 s. The candidate has ROWS=1024."""

    def times(works, device, rounds):
        default, *candidates = works
        return {default: [1.0, 1.0, 1.1, 1.2, 1.2], **{text: [candidate_seconds] for text in candidates}}

    monkeypatch.setattr(norm, "candidates", lambda kernel, default: [{"ROWS": 1024}])
    monkeypatch.setattr(tuning, "time_in_turns", times)
    row = next(tuning.tune_shape("norm", "narrow", "float32", 1, DEVICE, tuning.Budget()))
    assert row["parameters"]["ROWS"] == best_rows


def test_the_stored_parameters_are_the_best_over_all_shapes_of_an_entry():
    """0.5 and 1.5 times the default's seconds are a gain, because the product is below 1; 0.9 and 1.5 times are none.
    Parameters that do not fit at one shape are not chosen."""
    default, good, bad, unfit = (json.dumps({"ROWS": rows}) for rows in (1, 2, 4, 8))
    short, long = {default: 1.0, good: 0.5, bad: 0.9, unfit: 0.1}, {default: 1.0, good: 1.5, bad: 1.5}
    rows = [
        {"default": default, "p20": 0.99, "medians": medians, "shape": shape}
        for shape, medians in (("short", short), ("long", long))
    ]
    best = tuning.choose_parameters(rows)
    assert best == {"parameters": {"ROWS": 2}, "ms": 2.0, "default_ms": 2.0, "shape": "short, long"}
    del short[good], long[good]
    assert tuning.choose_parameters(rows)["parameters"] == {"ROWS": 1}


def test_the_table_keeps_the_finished_kernels_when_the_search_is_interrupted(command, tables, monkeypatch):
    def times(works, device, rounds):
        if "programs" in next(iter(works)):
            raise KeyboardInterrupt
        return {text: [1.0] for text in works}

    monkeypatch.setattr(tuning, "time_in_turns", times)
    code, _, err = command(*NARROW)
    assert (code, err) == (130, f"interrupted: {tables[0]} has the results so far (kernels: 1)\n")
    assert set(read_table(tables[0])) == {NAME}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["minutes=0"], "minutes=0.0: it must be more than 0"),
        (["op=null", "auto=true", "shape=124m"], "shape=124m: it needs op=NAME"),
        (["auto=true", "keep=true"], "auto=true with keep=true: "),
        (["op=attention", "auto=true", "shape=124m"], "op=attention auto=true takes no shape: "),
        (["op=gemm"], f"op=gemm: choose {', '.join(OPS)}"),
        (["shape=huge"], "shape=huge: norm has 124m, "),
        (["dtype=int8"], "dtype=int8: choose bfloat16, float16, float32"),
        (["rounds=0"], "rounds=0: it must be at least 1"),
        (["device=cpu", "keep=true"], "keep=true needs a GPU: the repo's tables are for GPUs"),
    ],
)
def test_a_mistake_prints_one_line(command, arguments, message):
    code, _, err = command("op=norm", *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


def test_an_op_without_candidates_is_an_error(command, monkeypatch):
    monkeypatch.delattr(mlp, "candidates")
    assert command("op=mlp")[2] == "error: kernels/mlp/triton.py has no candidates() to try\n"


def test_an_op_whose_kernels_look_up_no_parameters_is_an_error(command, monkeypatch):
    """On Hopper, mlp in bf16 is such an op: its kernels in Gluon have constants."""
    for module in ("triton", "_triton_backward"):
        monkeypatch.setattr(f"kernels.norm.{module}.launch_parameters", lambda kernel, key, default, device: default)
    message = "error: op=norm float32: nothing to tune here at narrow: choose another op, dtype, shape or minutes\n"
    assert command(*NARROW)[2] == message


def test_without_an_op_all_ops_have_their_turn_in_five_minutes(command, tables, monkeypatch):
    """Here an hour passes during the third kernel. A line names an op that cannot run."""
    clock, seconds = [0.0], iter([10.0, 10.0, 3600.0])

    def times(works, device, rounds):
        clock[0] += next(seconds)
        default, *candidates = works
        return {default: [2e-3], **{text: [1e-3] for text in candidates}}

    def config(op, shape, *rest):
        shapes = {"norm": ["narrow", "one_row"], "loss": ["one_row"], "attention": ["one_head"]}
        return SimpleNamespace(op=op, shape=shapes[op], dtype="float32", rounds=1)

    monkeypatch.setattr(tuning, "time_in_turns", times)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(tune, "OPS", ["norm", "attention", "loss"])
    monkeypatch.setattr(tune, "OpConfig", config)
    monkeypatch.setattr(backend("attention", "triton"), "unavailable", lambda device: "it needs a rocket")
    code, out, err = command("dtype=float32", "rounds=1")
    assert (code, err) == (0, "")
    assert "without  attention at one_head: attention=triton cannot run here: it needs a rocket\n" in out
    assert set(read_table(tables[0])) == {"cross_entropy 257 float32", "linear_cross_entropy 64 257 float32", NAME}
    assert f"\n{NAME}: 2.000 -> 1.000 ms (2.00x), forward\n" in out
    assert "\ntotal of 3 kernels: 6.000 -> 3.000 ms (2.00x), 3 faster\n" in out
    assert "\nnot tried in 5 minutes: norm_bwd at narrow, norm at one_row\n" in out


def test_a_kernel_starts_only_if_the_longest_one_would_end_in_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock[0])
    budget = tuning.Budget(minutes=1)
    assert budget.allows("a")
    clock[0] += 35
    budget.spent_since(100.0)
    assert not budget.allows("b")
    assert budget.not_tried == ["b"]
    assert tuning.Budget().allows("c")


def test_the_first_shape_of_every_op_comes_before_the_second():
    order = tuning.search_order({"norm": ["124m", "wide"], "mlp": ["124m"], "loss": ["124m", "1558m"]})
    assert order == [("mlp", "124m"), ("loss", "124m"), ("norm", "124m"), ("loss", "1558m"), ("norm", "wide")]


def test_launches_only_compile_inside_the_block(monkeypatch):
    """A launch with the mode of Triton's that compiles in threads, which must also hold in the backward."""
    launches = []

    def run(self, *arguments, grid, warmup):
        launches.append((warmup, active_mode.get() is not None))

    class Launch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kernel[(1,)]()
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            kernel[(1,)]()
            return dx

    monkeypatch.setattr(JITFunction, "run", run)
    kernel, x = JITFunction(empty_kernel), torch.ones(1, device=DEVICE, requires_grad=True)
    with launches_only_compile():
        Launch.apply(x).backward()
    Launch.apply(x).backward()
    assert launches == [(True, True), (True, True), (False, False), (False, False)]
    assert JITFunction.run is run


def test_a_broken_table_is_an_error_before_the_search(command, tables):
    write_table(tables[0], {})
    tables[0].write_text("{")
    code, _, err = command(*NARROW)
    assert (code, err.count("\n")) == (1, 1)
    assert "is not a table of launch parameters" in err


def test_auto_stores_the_fastest_right_backend(command, tables, monkeypatch):
    """The fastest is wrong, so the second is taken. Eager stays if the fastest is not below its p20."""
    statuses = {"torch_chunked": "ok: torch", "eager": "ok: torch", "triton": "wrong: out0: error 1"}
    seconds = {"torch_chunked": 1.0, "eager": 2.0, "triton": 0.5, "floor": 0.1}

    def probe(groups, device, limit):
        return [[statuses.get(probe.impl, "unavailable: it is not here")] for [probe] in groups]

    def times(works, device, rounds):
        return {work: [seconds[work.split()[0]] / (2 if "forward" in work else 1)] * rounds for work in works}

    monkeypatch.setattr("lab.bench.speed.run_probes", probe)
    monkeypatch.setattr(backend("loss", "torch_chunked"), "unavailable", lambda device: None)  # it needs torch 2.13
    monkeypatch.setattr("lab.bench.speed.time_in_turns", times)
    words = "op=loss", "auto=true", "shape=one_row", "dtype=float32", "rounds=2"
    code, out, err = command(*words)
    assert (code, err) == (0, "")
    assert "without  loss=triton at one_row: wrong: out0: error 1\n" in out
    assert "auto     loss float32 64: torch_chunked (torch_chunked 1000.000 ms, eager 2000.000 ms)\n" in out
    assert read_table(tables[0])["loss float32"]["parameters"] == {"64": "torch_chunked"}
    [(name, entry)] = read_table(speeds.table_paths(DEVICE)[0], "times").items()
    assert re.fullmatch(r"loss=torch_chunked float32 C=64 V=257 targets at rows=\d+", name)
    assert entry["times"]["both"] == {"ms": 1000.0, "eager": [2000.0] * 3}
    seconds["eager"] = 1.0
    assert "auto     loss float32 64: eager (" in command(*words)[1]


def test_auto_chooses_for_the_shapes_of_gpt2_on_a_cpu():
    config = tune.Config(None, True, None, None, "cpu", 1, None, False, None)
    shapes = {op: list(contract(op).SHAPES) for op in OPS}
    assert {each.op: each.shape for each in config.configs} == shapes | {"decode": ["one"]}  # a tiny model
    assert tune.Config("norm", False, None, None, "cpu", 1, None, False, None).configs[0].shape == ["768"]
