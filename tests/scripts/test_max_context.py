import json
import random
import shutil
from itertools import pairwise

import pytest

from runtime.device import GIB
from runtime.signals import Stopped
from scripts import max_context, report
from scripts.max_context import FULL, LAST, OCTAVE, index_of, length_of, longest, pace, search
from tests.model.test_memory import config

TRY = "probe=run", "model=tiny", "precision=fp32", "device=cpu", "memory_gib=2"


def test_lengths_are_a_grid_of_one_percent():
    lengths = [length_of(index) for index in range(LAST)]
    assert (lengths[0], lengths[OCTAVE], lengths[-1]) == (128, 256, 255 * 2**22)
    assert all(1 / 256 <= (b - a) / a <= 1 / 128 for a, b in pairwise(lengths))
    assert [index_of(length) for length in lengths] == list(range(LAST))
    assert length_of(index_of(2 * 1048576 - 1)) == 2 * 1048576 - 8192


@pytest.mark.parametrize("limit", [0, 1, 127, 128, 777, 1500, LAST - 2])
@pytest.mark.parametrize("start", [0, 130, 776, 777, 781, 1500, LAST - 1])
@pytest.mark.parametrize("step", [1, 4, OCTAVE])
def test_the_search_finds_the_last_that_fits(limit, start, step):
    """From far below and far above; a good start takes few tries, and nothing is tried twice."""
    asked = []
    assert search(lambda index: asked.append(index) or index <= limit, start, step) == limit
    assert len(asked) == len(set(asked)) <= abs(limit - start) / OCTAVE + 16
    if step == 4 and abs(limit - start) <= 4:
        assert len(asked) <= 5


def test_the_search_at_its_ends():
    assert search(lambda index: False, 1000, 4) is None
    assert search(lambda index: True, 1000, 4) == LAST - 1


@pytest.mark.parametrize("seed", range(20))
def test_the_search_among_noise(seed):
    """What fits now and not then: it ends all the same, at a length that ran beside one that did not."""
    chance, told = random.Random(seed), {}

    def fits(index):
        told[index] = index < 760 or (index < 790 and chance.random() < 0.5)
        return told[index]

    found = search(fits, chance.choice([300, 775, 1200]), 4)
    assert (told[found], told[found + 1]) == (True, False)
    assert len(told) < 30


def test_the_pace_is_linear_and_quadratic():
    rows = [{"T": T, "status": "ok", "seconds": 1e-6 * T + 1e-11 * T * T} for T in (2**17, 2**18)]
    assert pace(rows)(2**21) == pytest.approx(1e-6 * 2**21 + 1e-11 * 2**42)
    assert pace([rows[0], {"T": 2**18, "status": "oom"}])(2**21) == 0


class Machine:
    """Answers as tries would, on a device of 80 GiB: a token takes 64 KiB, and 1 us besides `quadratic`.

    What is short takes `bend` GiB more, and what is not `late` times as long.
    """

    LIMIT = 1310720

    def __init__(self, monkeypatch, predicted=2**16, quadratic=0.0, slides=True, crash=None, bend=0.0, late=1):
        self.predicted, self.quadratic, self.crash = predicted, quadratic, crash
        self.bend, self.late = bend, late
        self.asked, self.logged, self.row, self.stop = [], [], {}, None
        self.told = {
            "limit_gib": 80.0,
            "usable_gib": 80.0,
            "slides": slides,
            "row": predicted and self.foresee(80 * GIB / predicted),
        }
        monkeypatch.setattr(max_context, "ask", self.ask)

    def foresee(self, length):
        length = length_of(index_of(length))
        return {"T": length, "peak_gib": length * self.predicted / GIB}

    def seconds(self, length):
        return (1e-6 * length + self.quadratic * length**2) * (self.late if length > 2**17 else 1)

    def ask(self, cfg, what, length, window=None):
        if what == "predict":
            return {"row": self.predicted and self.foresee(length), "died": None} if length else self.told
        if len(self.asked) == self.stop:
            raise Stopped(130, "SIGINT")
        self.asked.append(length)
        seconds = 1e-6 * length if window else self.seconds(length)
        if 2 * seconds > 60 * cfg.probe_minutes:
            return {"row": None, "died": "timeout"}
        if self.crash and length > self.crash:
            return {"row": None, "died": "failed: an illegal memory access"}
        gib = min(80, length * 2**16 / GIB + self.bend * (length < 2**17))
        row = {"T": length, "window": window, "status": "ok", "seconds": seconds, "loss": 10.8}
        if length > self.LIMIT:
            row = {"T": length, "window": window, "status": "oom", "why": "out of memory"}
        return {"row": row | {"peak_gib": gib, "reserved_gib": gib}, "died": None}

    def log(self, step, figures):
        self.logged.append(figures)


@pytest.mark.parametrize(("predicted", "most"), [(2**16, 4), (60000, 10), (2**13, 20), (2**20, 22), (None, 30)])
def test_the_longest_that_fits(monkeypatch, predicted, most):
    """Whatever was predicted; the row has every try, and the prediction beside the measurement."""
    machine = Machine(monkeypatch, predicted)
    row = longest(config("mode=train"), machine.told, machine)
    assert (row["context/max_train"], row["context/train/limit"]) == (machine.LIMIT, "oom")
    assert (row["context/train/seconds"], row["context/train/window"]) == (pytest.approx(1.31, rel=1e-2), None)
    assert row["context/train/headroom_gib"] == 0
    assert [each["T"] for each in row["context/train/tries"]] == machine.asked
    assert [{"mode": "train", **each} for each in row["context/train/tries"]] == machine.logged
    assert len(machine.asked) <= most
    assert row.get("context/train/prediction_error") == (predicted and pytest.approx(predicted / 2**16 - 1))


@pytest.mark.parametrize("unseen", ["kernels.compile=true", "opaque"])
def test_what_was_not_predicted_is_measured(monkeypatch, unseen):
    """The uncompiled model's memory, or one without an op's: two short lengths tell what is really taken."""
    tries = {}
    for words in ((), (unseen,)):
        machine = Machine(monkeypatch, predicted=2**17)
        machine.told["row"]["opaque"] = ["an op"] * ("opaque" in words)
        row = longest(config("mode=train", *words[: unseen != "opaque"]), machine.told, machine)
        assert row["context/max_train"] == machine.LIMIT
        assert row["context/train/predicted"] == machine.LIMIT // 2
        tries[words] = len(machine.asked)
    assert (tries[unseen,], tries[()]) == (2 + (4 if "compile" in unseen else 2), 2 + 16)


def test_a_prediction_that_short_lengths_confirm_is_believed(monkeypatch):
    """A line through a sixteenth and an eighth of it is bent by what does not grow with T: here 2.3% too far."""
    machine = Machine(monkeypatch, bend=0.1)
    machine.told["row"]["opaque"] = ["an op"]
    assert longest(config("mode=train"), machine.told, machine)["context/max_train"] == machine.LIMIT
    assert machine.asked == [65536, 131072, machine.LIMIT, machine.LIMIT + 8192]


def test_a_slow_step_has_a_window(monkeypatch):
    """A minute a step, and a minute a try: the memory is that of the window, and the time of full attention is told."""
    machine = Machine(monkeypatch, quadratic=60 / Machine.LIMIT**2)
    row = longest(config("mode=train", "probe_minutes=1"), machine.told, machine)
    assert (row["context/max_train"], row["context/train/window"]) == (machine.LIMIT, 4096)
    assert row["context/train/seconds"] == pytest.approx(1.31, rel=1e-2)
    assert row["context/train/seconds_of_full_attention"] == pytest.approx(machine.seconds(machine.LIMIT))
    assert [each["window"] for each in row["context/train/tries"]][:3] == [None, None, 4096]


def test_without_a_window_the_limit_is_one_of_time(monkeypatch):
    machine = Machine(monkeypatch, quadratic=60 / Machine.LIMIT**2, slides=False)
    row = longest(config("mode=train", "probe_minutes=1"), machine.told, machine)
    found = row["context/max_train"]
    assert 2 * machine.seconds(found) <= 0.8 * 60 < 2 * machine.seconds(found * 129 / 128)
    assert (row["context/train/limit"], row["context/train/window"]) == ("timeout", None)
    assert max(machine.asked) == found  # the others were not run
    assert row["context/train/tries"][-1]["why"].startswith("not run: two steps would take 48 s")
    assert len(row["context/train/tries"]) == 4  # two short ones, where the time ends, and the next length


def test_a_try_that_outlasts_its_time_is_the_only_one(monkeypatch, capsys):
    """Long ones take 1.5 times what the short ones told."""
    machine = Machine(monkeypatch, quadratic=60 / Machine.LIMIT**2, slides=False, late=1.5)
    row = longest(config("mode=train", "probe_minutes=1"), machine.told, machine)
    found, late = row["context/max_train"], [length for length in machine.asked if 2 * machine.seconds(length) > 60]
    assert len(late) == 1
    assert found == pytest.approx(late[0] / 2**0.5, rel=1e-2)  # half the time, of what is quadratic
    assert row["context/train/limit"] == "timeout"
    assert f"T {late[0]:>11,} | timeout\n" in (out := capsys.readouterr().out)
    assert out.count("| not run: two steps would take ") == len(row["context/train/tries"]) - len(machine.asked)


@pytest.mark.parametrize(("predicted", "quadratic"), [(2**16, 20), (2**17, 84), (1.2 * 2**16, 29)])
def test_what_outlasts_its_time_is_tried_with_a_window(monkeypatch, predicted, quadratic):
    """Where the short lengths told too little, memory still ends the search, and the full step's time is no less."""
    machine = Machine(monkeypatch, int(predicted), quadratic / Machine.LIMIT**2, late=1.5)
    row = longest(config("mode=train", "probe_minutes=1"), machine.told, machine)
    assert (row["context/max_train"], row["context/train/window"]) == (machine.LIMIT, 4096)
    assert row["context/train/limit"] == "oom"
    assert row["context/train/seconds_of_full_attention"] >= 0.66 * machine.seconds(machine.LIMIT)
    assert sum(2 * machine.seconds(each["T"]) > 60 and not each["window"] for each in row["context/train/tries"]) <= 1


def test_a_timeout_and_a_crash_fit_no_more_than_a_full_memory(monkeypatch):
    """Where nothing was predicted, nothing tells that a step will be slow."""
    machine = Machine(monkeypatch, predicted=None, quadratic=60 / Machine.LIMIT**2, slides=False)
    row = longest(config("mode=train", "probe_minutes=1"), machine.told, machine)
    assert row["context/train/limit"] == "timeout"
    assert 2 * machine.seconds(row["context/max_train"]) <= 60
    machine = Machine(monkeypatch, crash=2**20)
    row = longest(config("mode=generate"), machine.told, machine)
    assert (row["context/max_generate"], row["context/generate/limit"]) == (2**20, "failed: an illegal memory access")
    machine = Machine(monkeypatch, crash=1)
    row = longest(config("mode=train"), machine.told, machine)
    assert (row["context/max_train"], row["context/train/limit"]) == (None, "failed: an illegal memory access")
    assert "context/train/seconds" not in row


def test_what_is_refused_is_not_searched_for(called, monkeypatch, tmp_path):
    """As kernels.compile with model.checkpointing=host: the prediction, which compiles nothing, does not mind."""
    machine = Machine(monkeypatch)
    machine.told |= {"env": {"device": "H200"}, "kernels": {}, "died": None}
    words = "device=cpu", "memory_gib=1", "mode=train", f"out_dir={tmp_path / 'run'}"
    died = {"row": None, "died": f"{max_context.REFUSED}kernels.compile=true cannot run with that: choose another"}
    monkeypatch.setattr(max_context, "ask", lambda cfg, what, *_: died if what == "run" else machine.told)
    code, out, err = called("max_context.py", max_context.main, *words)
    assert (code, out, err) == (1, "", "error: kernels.compile=true cannot run with that: choose another\n")


def test_a_sweep_has_a_folder_for_each(called, monkeypatch, tmp_path):
    machine = Machine(monkeypatch)
    machine.told |= {"env": {"device": "H200"}, "kernels": {"attention": "sdpa"}, "died": None}
    words = "-m", "device=cpu", "memory_gib=1", "mode=train", "attn=sdpa,eager", f"out_dir={tmp_path / 'sweep'}"
    code, _, err = called("max_context.py", max_context.main, *words)
    assert (code, err) == (0, "")
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/result.json"))]
    assert [row["config"]["attn"]["impl"] for row in rows] == ["sdpa", "eager"]


def test_a_sweep_that_was_stopped_goes_on(called, monkeypatch, tmp_path):
    """By its own command, which searches for what has no complete row."""
    machine = Machine(monkeypatch)
    machine.told |= {"env": {"device": "H200"}, "kernels": {"attention": "sdpa"}, "died": None}
    words = ["-m", "device=cpu", "memory_gib=1", "mode=train", "attn=sdpa,eager", f"out_dir={tmp_path / 'sweep'}"]
    assert called("max_context.py", max_context.main, *words)[0] == 0
    both = len(machine.asked)
    shutil.rmtree(tmp_path / "sweep")
    machine.asked, machine.stop = [], both - 2
    code, out, _ = called("max_context.py", max_context.main, *words)
    assert (code, out.splitlines()[-1]) == (
        130,
        f"stopped  go on with: python -m scripts.max_context {' '.join(words)}",
    )
    machine.stop = None
    code, out, err = called("max_context.py", max_context.main, *words)
    assert (code, err, out.count("done     before: "), len(machine.asked)) == (0, "", 1, both)
    assert called("max_context.py", max_context.main, *words)[1].count("done     before: ") == 2


def test_a_search_that_was_stopped_goes_on(called, monkeypatch, tmp_path):
    """With the same command and its folder: no length is tried twice, and the row is that of one go."""
    rows = {}
    for name, stops in (("whole", [None]), ("parts", [3, 9, 20, 25, None])):
        machine = Machine(monkeypatch, predicted=2**15)
        machine.told |= {"env": {"device": "H200"}, "kernels": {"attention": "sdpa (cudnn)"}, "died": None}
        words = "device=cpu", "memory_gib=1", f"out_dir={tmp_path / name}"
        for machine.stop in stops:
            code, out, err = called("max_context.py", max_context.main, *words)
            assert (code, err) == (130 if machine.stop else 0, "")
            assert (f"out_dir={tmp_path / name}" in out.splitlines()[-1]) == bool(machine.stop)
        assert len(machine.asked) > 25  # in both modes
        rows[name] = json.loads((tmp_path / name / "result.json").read_text())
        logged = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["T"] for line in logged] == machine.asked
    own = ("name", "started", "command", "config")
    assert {key: value for key, value in rows["parts"].items() if key not in own} == {
        key: value for key, value in rows["whole"].items() if key not in own
    }
    code, out, err = called("max_context.py", max_context.main, *words)
    assert (code, err[:6]) == (1, "error:")  # it is complete


def test_how_libraries_say_that_memory_is_full():
    """CUDA by its driver, Triton, cuBLAS and cuDNN, which raise errors of their own; and what is another failure."""
    said = "CUDA_ERROR_OUT_OF_MEMORY", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"
    said += "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "std::bad_alloc", "could not create a primitive"
    assert all(FULL.search(f"RuntimeError: {each} when calling it") for each in said)
    assert not FULL.search("CUDA error: an illegal memory access was encountered")


def test_the_table(monkeypatch, tmp_path):
    """The newest row of each choice, longest first; a window, a prediction, a search by time, and nothing at all."""
    choice = {"kernels": {"norm": "triton", "mlp": "triton", "loss": "triton", "compile": False}, "precision": "bf16"}
    row = {"config": choice | {"model": {"pos": "rope", "checkpointing": "none"}}, "parameters": 123_689_472}
    row |= {"kernels": {"attention": "sdpa (cudnn, torch 2.11.0)"}, "memory_gib": 139.8}
    row |= {"context/max_train": None, "context/train/limit": "oom", "context/max_generate": 4096}
    other = json.loads(json.dumps(row))
    other["config"]["model"]["checkpointing"] = "block"
    other |= {"context/max_train": 2**19, "context/train/seconds": 1.234, "context/train/peak_gib": 130.0}
    slow = other | {"context/train/window": 4096, "context/train/seconds_of_full_attention": 12.3456}
    slow |= {"context/train/prediction": {"peak_gib": 129}, "context/max_generate": None}
    kept = json.loads(json.dumps(other)) | {"context/max_train": 2**18}
    kept["config"]["model"]["keep_attention"] = True
    kept["context/generate/limit"] = "timeout"
    windowed = json.loads(json.dumps(row)) | {"context/max_generate": None, "status": "stopped: SIGINT"}
    windowed["config"]["model"] |= {"window": 64, "n_kv_head": 4}
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert "No rows yet" in report.max_context("h200")
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "context.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in (row, other, slow, kept, windowed))
    )
    who = "124M | bf16 | triton | sdpa (cudnn) | rope"
    assert report.fill("<!-- max_context: h200 -->\n<!-- end -->").splitlines()[3:-1] == [
        f"| {who} | block | 139.8 | **524,288** | 12.3, by shorter ones; 1.23 with window 4096 | 130.00 (129.00) |  |",
        f"| {who} | block, attention kept | 139.8 | **262,144** | 1.23 | 130.00 | 4,096 or more |",
        f"| {who} | none | 139.8 | oom |  |  | 4,096 |",
        f"| {who}, window 64, 4 K/V heads | none | 139.8 | oom |  |  | stopped |",
    ]


def test_from_the_command_line(called, monkeypatch, tmp_path):
    """The whole search in 0.15 GiB of a CPU: what was predicted is found, and the table is printed last."""
    monkeypatch.setattr(max_context, "RESULTS", tmp_path / "results")
    choice = "model=tiny", "attn=eager", "precision=fp32", "device=cpu", "memory_gib=0.15", "mode=train"
    code, out, err = called("max_context.py", max_context.main, *choice, "keep=true", f"out_dir={tmp_path / 'run'}")
    assert (code, err) == (0, "")
    row = json.loads((tmp_path / "run" / "result.json").read_text())
    [kept] = tmp_path.glob("results/*/context.jsonl")
    assert json.loads(kept.read_text()) == row
    longest, tries = row["context/max_train"], row["context/train/tries"]
    assert (row["status"], row["context/train/limit"]) == ("ok", "oom")
    assert longest == pytest.approx(row["context/train/predicted"], rel=0.1)
    status = {each["T"]: each["status"] for each in tries}
    assert (status[longest], status[length_of(index_of(longest) + 1)]) == ("ok", "oom")
    assert row["context/train/prediction"]["peak_gib"] == pytest.approx(0.15, rel=0.1)
    assert row["context/train/prediction_error"] == pytest.approx(0, abs=0.1)
    assert f"| **{longest:,}** |" in out.splitlines()[-3]
    assert len([line for line in out.splitlines() if line.startswith("train    T")]) == len(tries)


def test_generation_runs(called):
    """One try, in this process: a prompt of 200 and 64 new tokens."""
    code, out, _ = called("max_context.py", max_context.main, *TRY, "mode=generate", "model.pos=rope", "length=200")
    assert code == 0
    row = json.loads(out.splitlines()[-1])["row"]
    assert (row["T"], row["status"]) == (200, "ok")
    assert 0 < row["prefill_s"] < row["seconds"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode=both"], "mode=both: choose train, generate, or null for both"),
        (["probe=search"], "probe=search: choose predict or run, or null to search"),
        (["probe=predict"], "probe=predict needs mode=train or mode=generate"),
        (["probe=run", "mode=train"], "probe=run needs length=..."),
        (["length=0"], "length=0: it must be in [1, 2^30)"),
        (["memory_gib=0"], "memory_gib=0.0: it must be above 0"),
        (["probe_minutes=0"], "probe_minutes=0.0: it must be above 0"),
        (["precision=int8"], "precision=int8: choose fp32, amp, bf16"),
        (["train.batch_size=4"], "unknown key train.batch_size; "),
        (["mode=train", "probe=predict", "device=cpu", "memory_gib=inf"], "memory_gib=inf: this machine has "),
        (["mode=train", "probe=predict", "device=cpu"], "device=cpu: the search would fill the machine's memory; give"),
    ],
)
def test_mistakes(called, arguments, message):
    code, _, err = called("max_context.py", max_context.main, *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


def test_a_mistake_that_a_try_finds(called, monkeypatch, tmp_path):
    """It is this program's own, and leaves no folder."""
    monkeypatch.chdir(tmp_path)
    code, _, err = called("max_context.py", max_context.main, "device=cpu")
    assert (code, err) == (1, "error: device=cpu: the search would fill the machine's memory; give memory_gib=...\n")
    assert list(tmp_path.iterdir()) == []
