"""`python -m scripts.max_context` as a command."""

import json
import shutil

import pytest

from lab import rows as lab_rows
from lab.context import attempt
from lab.context.prober import REFUSED, Prober, ProbeResult
from lab.context.search import index_of, length_of
from lab.rows import read_whole
from model import decoder
from model.gpt import GPT
from runtime.row import read_row
from scripts import max_context
from tests.lab.context.machine import Machine

ATTEMPT = "probe=run", "model=tiny", "precision=fp32", "device=cpu", "memory_gib=2"


def fake_prober(monkeypatch, machine, kernels=None):
    """Let `machine` answer instead of child processes."""
    machine.first.env, machine.first.kernels = {"device": "H200"}, kernels or {"attention": "sdpa"}
    monkeypatch.setattr(max_context, "Prober", lambda command, minutes: machine)


def test_the_search_ends_when_an_attempt_is_refused(called, monkeypatch, tmp_path):
    """A prediction compiles nothing, so only an attempt refuses kernels.compile with model.checkpointing=host."""
    machine = Machine()
    fake_prober(monkeypatch, machine)
    words = "device=cpu", "memory_gib=1", "mode=train", f"out_dir={tmp_path / 'run'}"
    refusal = ProbeResult(failure=f"{REFUSED}kernels.compile=true cannot run with that: choose another")
    monkeypatch.setattr(machine, "attempt", lambda *_: refusal)
    code, out, err = called("max_context.py", max_context.main, *words)
    assert (code, out, err) == (1, "", "error: kernels.compile=true cannot run with that: choose another\n")


def test_attempts_read_the_same_configs(called, monkeypatch, tmp_path):
    """They get the flag --config-dir, and the overrides exactly as they were typed."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/own.yaml").write_text("defaults: [tiny]\n")
    machine, commands = Machine(), []
    fake_prober(monkeypatch, machine)
    monkeypatch.setattr(max_context, "Prober", lambda command, minutes: commands.append(command) or machine)
    words = "model=own", "device=cpu", "memory_gib=1", "mode=train", f'out_dir="{tmp_path}/\\${{x}}"'
    code, _, err = called("max_context.py", max_context.main, *words[:1], "--config-dir", tmp_path, *words[1:])
    assert (code, err) == (0, "")
    assert commands == [["-m", "scripts.max_context", f"--config-dir={tmp_path}", *words]]
    assert (tmp_path / "${x}/result.json").exists()


def test_each_search_of_a_sweep_has_a_folder(called, monkeypatch, tmp_path):
    machine = Machine()
    fake_prober(monkeypatch, machine)
    words = "-m", "device=cpu", "memory_gib=1", "mode=train", "attn=sdpa,eager", f"out_dir={tmp_path / 'sweep'}"
    code, _, err = called("max_context.py", max_context.main, *words)
    assert (code, err) == (0, "")
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("sweep/*/result.json"))]
    assert [row["config"]["attn"]["impl"] for row in rows] == ["sdpa", "eager"]


def test_a_stopped_sweep_continues_when_its_command_runs_again(called, monkeypatch, tmp_path):
    """A search with a complete row is not repeated."""
    machine = Machine()
    fake_prober(monkeypatch, machine)
    words = ["-m", "device=cpu", "memory_gib=1", "mode=train", "attn=sdpa,eager", f"out_dir={tmp_path / 'sweep'}"]
    assert called("max_context.py", max_context.main, *words)[0] == 0
    attempts = len(machine.attempted)  # of both searches
    shutil.rmtree(tmp_path / "sweep")
    machine.attempted, machine.stop = [], attempts - 2
    code, out, _ = called("max_context.py", max_context.main, *words)
    assert (code, out.splitlines()[-1]) == (
        130,
        f"stopped  before the end of the search; resume with: python -m scripts.max_context {' '.join(words)}",
    )
    machine.stop = None
    code, out, err = called("max_context.py", max_context.main, *words)
    assert (code, err, out.count("done     before: "), len(machine.attempted)) == (0, "", 1, attempts)
    assert called("max_context.py", max_context.main, *words)[1].count("done     before: ") == 2


def test_a_stopped_search_continues_when_it_runs_again_in_its_folder(called, monkeypatch, tmp_path):
    """It tries no length twice. Its row equals the row of a search that was not stopped."""
    rows = {}
    for name, stops in (("whole", [None]), ("parts", [3, 9, 20, 25, None])):
        machine = Machine(predicted=2**15)
        fake_prober(monkeypatch, machine)
        words = "device=cpu", "memory_gib=1", f"out_dir={tmp_path / name}"
        for machine.stop in stops:
            code, out, err = called("max_context.py", max_context.main, *words)
            assert (code, err) == ((130, "interrupted\n") if machine.stop else (0, ""))
            assert (f"out_dir={tmp_path / name}" in out.splitlines()[-1]) == bool(machine.stop)
        assert len(machine.attempted) > 25  # in both modes
        rows[name] = read_row(tmp_path / name)
        logged = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["T"] for line in logged] == machine.attempted
    own = ("name", "started", "command", "config")
    assert {key: value for key, value in rows["parts"].items() if key not in own} == {
        key: value for key, value in rows["whole"].items() if key not in own
    }
    code, out, err = called("max_context.py", max_context.main, *words)
    assert (code, err[:6]) == (1, "error:")  # the folder has a complete search


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_whole_search_on_a_cpu_finds_the_predicted_length(called, monkeypatch, tmp_path):
    """The limit is 0.1 GiB. keep=true appends the row to results/, and the table is printed last.

    The limit is on the process's data, which holds the heap's gaps too: on a busy machine they were 10% of the limit.
    """
    monkeypatch.setattr(lab_rows, "RESULTS", tmp_path / "results")
    choice = "mode=train", "model=tiny", "model.n_layer=1", "attn=eager", "precision=fp32", "device=cpu"
    output = "memory_gib=0.1", "keep=true", f"out_dir={tmp_path / 'run'}"
    code, out, err = called("max_context.py", max_context.main, *choice, *output)
    assert (code, err) == (0, "")
    row = read_row(tmp_path / "run")
    [results_file] = tmp_path.glob("results/*/context.jsonl")
    assert read_whole(results_file) == [row]
    longest, attempts = row["context/max_train"], row["context/train/tries"]
    assert (row["status"], row["context/train/limit"]) == ("ok", "oom")
    assert longest == pytest.approx(row["context/train/predicted"], rel=0.15)
    status = {attempt["T"]: attempt["status"] for attempt in attempts}
    assert (status[longest], status[length_of(index_of(longest) + 1)]) == ("ok", "oom")
    assert row["context/train/prediction"]["peak_gib"] == pytest.approx(0.1, rel=0.15)
    assert row["context/train/prediction_error"] == pytest.approx(0, abs=0.15)
    assert f"| **{longest:,}** " in out.splitlines()[-3]
    assert len([line for line in out.splitlines() if line.startswith("train    T")]) == len(attempts)


@pytest.mark.usefixtures("quick_python")
def test_an_attempt_on_a_cpu_beyond_its_limit_reads_as_full():
    """These are the README's trial and its first length, at which oneDNN crashed when its own memory was refused."""
    words = "model=tiny", "model.n_layer=4", "device=cpu", "memory_gib=0.1"
    prober = Prober(["-m", "scripts.max_context", *words], minutes=2)
    result = prober.attempt("train", length=3920, shortened=False)
    assert result.failure is None
    assert (result.row["status"], result.row["why"]) == ("oom", "T=3920 takes more than memory_gib=0.1")
    assert 0.1 < result.row["peak_gib"] < 0.2


@pytest.mark.usefixtures("quick_python")
def test_two_processes_split_the_sequence_of_an_attempt(monkeypatch):
    """torchrun starts them. If the memory of one is full, both end."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(key, value)
    words = "parallel=context", "model=tiny", "precision=fp32", "device=cpu", "memory_gib=0.15", "attn=eager"
    prober = Prober(["-m", "scripts.max_context", *words], minutes=2)
    row = prober.attempt("train", length=256, shortened=False).row
    assert (row["T"], row["status"]) == (256, "ok")
    result = prober.attempt("train", length=16384, shortened=False)
    assert result.failure == "oom"
    assert "T=16384" in result.why


@pytest.mark.parametrize("processes", [1, 2])
def test_an_attempt_that_crashes_names_the_signal(processes, monkeypatch, tmp_path):
    """torchrun's own exit code is 1, and its report names the signal."""
    script = tmp_path / "crash.py"
    crash = "import os, signal, warnings\nwarnings.warn('slow')\nos.kill(os.getpid(), signal.SIGSEGV)"
    script.write_text(crash)
    for key, value in {"RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(key, value)
    result = Prober([str(script)], minutes=1).attempt("train", length=128, shortened=False)
    assert result.failure == "failed: exit code -11 (Segmentation fault)"


def test_probe_run_makes_one_attempt_in_this_process(called):
    """A prompt of 200 tokens is prefilled, and 64 new tokens follow."""
    code, out, _ = called("max_context.py", max_context.main, *ATTEMPT, "mode=generate", "model.pos=rope", "length=200")
    assert code == 0
    row = json.loads(out.splitlines()[-1])["row"]
    assert (row["T"], row["status"]) == (200, "ok")
    assert 0 < row["prefill_s"] < row["seconds"]


def test_a_shortened_attempt_computes_the_last_chunks(called, monkeypatch):
    """A sequence has 12.5 chunks of 16 tokens. The attempt computes the last 3.5 chunks."""
    calls, forward = [], GPT.forward

    def counting_forward(model, ids, *rest, **named):
        calls.append(ids.shape[1])
        return forward(model, ids, *rest, **named)

    monkeypatch.setattr(GPT, "forward", counting_forward)
    for module in (attempt, decoder):
        monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(decoder, "SHORT_CHUNK", 1)
    words = "mode=generate", "length=200", "shortened=true"
    code, out, _ = called("max_context.py", max_context.main, *ATTEMPT, *words)
    row = json.loads(out.splitlines()[-1])["row"]
    assert (code, row["status"], row["shortened"], row["computed"]) == (0, "ok", True, 56)
    assert [length for length in calls[-67:] if length > 1] == [16, 16, 16, 8]
    code, out, _ = called("max_context.py", max_context.main, *ATTEMPT, "mode=train", "length=128", "shortened=true")
    row = json.loads(out.splitlines()[-1])["row"]
    assert (code, row["status"], row["shortened"], row["window"]) == (0, "ok", True, 4096)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode=both"], "mode=both: choose train, generate, or null for both"),
        (["probe=search"], "probe=search: choose predict or run, or null to search"),
        (["probe=predict"], "probe=predict needs mode=train or mode=generate"),
        (["probe=run", "mode=train"], "probe=run needs length=T"),
        (["shortened=true"], "shortened=true needs probe=run: a search decides by itself"),
        (["length=0"], "length=0: it must be in [1, 2^30)"),
        (["memory_gib=0"], "memory_gib=0.0: it must be above 0"),
        (["probe_minutes=0"], "probe_minutes=0.0: it must be above 0"),
        (["precision=int8"], "precision=int8: choose fp32, amp, bf16"),
        (["parallel=ddp"], "parallel=ddp: choose context, or null"),
        (["parallel=context", "mode=generate"], "parallel=context splits sequences in training only: "),
        (["generate.speculate=out/RUN"], "generate.speculate=out/RUN: no checkpoint drafts in a search: "),
        (["mode=generate", "precision=fp8"], "mode=generate cannot run: precision=fp8 cannot generate: "),
        (["train.batch_size=4"], "unknown key train.batch_size; "),
        (["attn=flash", "attn.version=fa9"], "attn.version=fa9: choose fa4, "),
        (
            ["mode=train", "probe=predict", "device=cpu", "memory_gib=inf"],
            "memory_gib=inf: this machine or container has ",
        ),
        (["mode=train", "probe=predict", "device=cpu"], "device=cpu: the search would fill the machine's memory; give"),
    ],
)
def test_a_mistake_prints_one_line(called, arguments, message):
    code, _, err = called("max_context.py", max_context.main, *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {message}")


@pytest.mark.usefixtures("quick_python")
def test_no_folder_is_left_when_the_first_prediction_fails(called, monkeypatch, tmp_path):
    """The child process finds a mistake in the config. The command prints it as its own error."""
    monkeypatch.chdir(tmp_path)
    code, _, err = called("max_context.py", max_context.main, "device=cpu")
    assert (code, err) == (1, "error: device=cpu: the search would fill the machine's memory; give memory_gib=...\n")
    assert list(tmp_path.iterdir()) == []
