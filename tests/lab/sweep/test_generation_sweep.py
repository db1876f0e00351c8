"""Sweeps of scripts.generate: the command and the prompt of a job, and the jobs of configs/sweep/generate.yaml."""

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir

from common.terminal import quote_exactly
from kernels.registry import backend, impls
from runtime.command import as_typed
from runtime.config import parse
from scripts import generate
from tests.test_train import ROOT

PROMPT = """def f(a, b=${x}): return [a, "b", 'c'] # \\"""

# Replaces scripts/generate.py. The first job with int8 interrupts the sweep once, and leaves the files of a stopped job
FAKE_GENERATE = """
import json, os, shlex, signal, sys
from pathlib import Path
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder, batch, status = Path(words["out_dir"]), int(words["batch"]), "ok"
if words["kernels.decode"] == "int8" and not Path("stopped-once").exists():
    for name in ("stopped-once", folder / "config.yaml", folder / "metrics.jsonl"):
        Path(name).write_text("proof: false")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it may come before sigwait
    os.kill(os.getppid(), signal.SIGINT)
    signal.sigwait([signal.SIGINT])
    status = "failed: KeyboardInterrupt"
seconds = {"blocks": 0.5, "int8": 0.25}[words["kernels.decode"]] / 1e3
config = {"max_new_tokens": 128, "batch": batch, "prompt": words.get("prompt")}
command = ["python", "-m", "scripts.generate", *sys.argv[1:]]
if not {"prompt", "prompt_tokens"} & words.keys():
    command.append("prompt=")
row = {"command": shlex.join(command), "status": status, "config": config}
row |= {"files": sorted(path.name for path in folder.iterdir()), "env": {}, "gen/laps_s": [seconds] * 8}
row |= {f"gen/decode_tokens_per_sec{part}": batch / seconds for part in ("", "/p20", "/p80")}
(folder / "result.json").write_text(json.dumps(row))
"""


@pytest.fixture
def sweep(called, monkeypatch, tmp_path):
    """sweep("batch=1,8") -> (exit code, stdout, stderr). FAKE_GENERATE replaces scripts/generate.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="scripts.generate"))
    Path("scripts").mkdir()
    Path("scripts/generate.py").write_text(FAKE_GENERATE)
    return lambda *words: called("scripts/generate.py", generate.main_with_exact_prompt, *words)


def read_rows(folder="sweep"):
    """Return job -> row."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/result.json"))}


WORDS = "-m", "checkpoint=random", "kernels.decode=blocks,int8", "batch=1,8", f"prompt={PROMPT}", "out_dir=sweep"


def test_jobs_are_modules_that_get_the_prompt_as_the_user_typed_it(sweep):
    """After Ctrl-C, the printed command continues the sweep, and runs the stopped generation from its start."""
    code, out, err = sweep(*WORDS)
    assert (code, err) == (75, "")
    command = shlex.split(out.splitlines()[-1].partition("resume with: ")[2])
    assert command == ["python", "-m", "scripts.generate", *WORDS]
    assert [row["status"] for row in read_rows().values()] == ["ok", "ok", "failed: KeyboardInterrupt"]

    code, out, err = sweep(*command[3:])
    assert (code, err) == (0, "")
    assert out.startswith("sweep    4 jobs, 2 of them done before")
    rows = read_rows()
    assert list(rows) == [
        f"{n}-decode.{d}-batch.{b}" for n, d, b in ((1, "blocks", 1), (2, "blocks", 8), (3, "int8", 1), (4, "int8", 8))
    ]
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["config"]["prompt"] for row in rows.values()} == {PROMPT}
    assert {tuple(row["files"]) for row in rows.values()} == {("log.txt",)}
    words = shlex.split(rows["3-decode.int8-batch.1"]["command"])
    choice = ["kernels.decode=int8", "batch=1", f"prompt={PROMPT}", "out_dir=sweep/3-decode.int8-batch.1"]
    assert words == ["python", "-m", "scripts.generate", "checkpoint=random", *choice]
    ratios = {line.split()[0]: line.split()[2] for line in out.splitlines() if " to " in line}
    assert ratios["3-decode.int8-batch.1"] == ratios["4-decode.int8-batch.8"] == "2.000x"
    assert sweep(*command[3:])[0] == 0
    assert read_rows() == rows


def test_a_sweep_of_generation_has_no_validation_loss(sweep):
    error = "error: sweep.sort=val/loss: only a training evaluates; choose sweep.sort=speed\n"
    assert sweep(*WORDS, "sweep.sort=val/loss") == (1, "", error)


def test_a_sweep_without_a_prompt_is_continued(sweep):
    words = "-m", "checkpoint=random", "kernels.decode=blocks", "batch=1,8"
    assert sweep(*words, "out_dir=sweep")[0] == 0
    code, out, err = sweep(*words, "out_dir=sweep")
    assert (code, err) == (0, "")
    assert out.startswith("sweep    2 jobs, 2 of them done before")
    assert sweep(*words, "prompt=a", "out_dir=sweep")[2].startswith("error: sweep/1-batch.1 has the row of another")


def test_a_quoted_prompt_becomes_the_text_that_was_quoted():
    random_state, characters = random.Random(0), '\\\\""\'${}\n a=,()[]~:#'
    texts = [PROMPT, "", "???", "null", "a\\", '\\"', "${oc.env:HOME}", "prompt=a", "日本 🙂", " lead and trail "]
    texts += ["".join(random_state.choices(characters, k=random_state.randint(1, 8))) for _ in range(200)]
    for text in texts:
        assert as_typed(f"prompt={quote_exactly(text)}") == f"prompt={text}"
    assert as_typed('stop="a b"') == 'stop="a b"'


@pytest.mark.exhaustive
def test_the_sweep_of_the_repo_has_every_decoder(sweep):
    """scripts.generate accepts every job. The first job runs compiled blocks; only plain PyTorch is compiled."""
    fake = FAKE_GENERATE.replace('{"blocks": 0.5, "int8": 0.25}[words["kernels.decode"]]', "1").replace("int8", "none")
    Path("scripts/generate.py").write_text(fake)
    code, _, err = sweep("+sweep=generate", "checkpoint=random", "batch=8", "prompt_tokens=1024", "out_dir=sweep")
    assert (code, err) == (0, "")
    choices = []
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for row in read_rows().values():
            cfg = parse(compose("generate", overrides=shlex.split(row["command"])[3:]), generate.Config)
            assert (cfg.checkpoint, cfg.precision, cfg.proof, cfg.model.n_layer) == ("random", "bf16", True, 12)
            assert cfg.prompt_tokens + cfg.max_new_tokens <= cfg.model.block_size
            assert not cfg.kernels.compile or backend("decode", cfg.kernels.decode).COMPILES
            kernels = "compile" if cfg.kernels.compile else cfg.kernels.norm
            assert (cfg.prompt_tokens, cfg.batch) == (1024, 8)
            choices.append((kernels, cfg.attn.impl, cfg.kernels.decode))
    decoders = [("compile", "sdpa", "blocks"), ("triton", "triton", "blocks")]
    decoders += [("eager", "sdpa", decode) for decode in impls("decode")]
    decoders += [("compile", "sdpa", decode) for decode in ("huggingface", "torchao")]
    assert choices == decoders


@pytest.mark.exhaustive
@pytest.mark.usefixtures("quick_python")
def test_a_sweep_of_real_generations(checkout):
    words = ["checkpoint=random", "model=tiny", "device=cpu", "precision=fp32", "max_new_tokens=40", "attn=eager,sdpa"]
    words += ["batch=2", f"prompt={PROMPT}", "out_dir=out/mine"]
    command = [sys.executable, "-m", "scripts.generate", "-m", *words]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    rows = read_rows(checkout / "out/mine")
    assert [(row["config"]["attn"]["impl"], row["config"]["batch"]) for row in rows.values()] == [
        ("eager", 2),
        ("sdpa", 2),
    ]
    assert all((row["status"], row["config"]["prompt"]) == ("ok", PROMPT) for row in rows.values())
    [ratio] = [line for line in done.stdout.splitlines() if line.startswith("2-")]
    assert ", 1 run)" in ratio
    again = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=280)
    assert again.stdout.startswith("sweep    2 jobs, 2 of them done before")
