"""Every known cheat is refused, for the right reason, and honest kernels are not.

Each file in cheats/ is a backend, and says in REFUSED what the judge must say about it. HARMLESS instead of it says why
its trick has no effect on the judge: the kernel is right, and its speed is measured as it is. A cheat first meets some
cases of the contract, and then trains, as in a verdict, but without the baseline.
"""

import ast
import random
import re
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import torch

from data import open_dataset
from kernels.names import backend_names, config_groups
from lab import commands
from lab.judge import audit, cases, sandbox
from lab.judge.arm import draw_plan, draw_prompts, run_arm
from lab.judge.audit import needed_states
from lab.judge.cases import judge_cases
from lab.judge.claim import Claim, choose_backends, make_probes, training_words
from lab.judge.trial import FIXED_WORDS, judge_run, make_question
from runtime import config as runtime_config
from scripts.judge import read_training

HERE = Path(__file__).parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# A step has two micro-steps of 2,048 tokens. A run has 9 steps, or the file's STEPS. Some cheats wait for so many calls
SMALL = ["model=tiny", "data.tokenizer=bytes", "train.batch_size=16", "train.block_size=128"]
SMALL += ["train.tokens_per_step=4096", "model.n_embd=64", "model.n_head=2", "model.n_layer=1"]
SMALL += ["train.cuda_graph=false"]  # in a captured step, the Python of a cheat would not run
SOME_CASES = 2  # of the contract in each precision; the calls of the training come on top


def constants(path: Path) -> dict:
    """Return the constants of a backend's file. It is not imported, because this process is the judge."""
    values = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                values[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return values


def backends(folder: str) -> list:
    files = sorted((HERE / folder).glob("*.py"))
    return [pytest.param(path, id=path.stem) for path in files if DEVICE.type == "cuda" or "GPU" not in constants(path)]


@pytest.fixture(autouse=True)
def replay_here(monkeypatch, quick_python):
    """The replay imports no backend, so it may run in this process, which saves 4 s of each test.

    The workers are forks, which saves 5 s. Their server is in no namespace, so a cheat can do more here than elsewhere.
    """
    monkeypatch.setattr(sandbox, "isolation", lambda: sandbox.PROCESSES)
    monkeypatch.setattr(audit, "run_in_process", lambda work, arguments, name: work(*arguments))
    monkeypatch.setattr(cases, "SEARCH_SECONDS", 2)
    allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32  # the replay changes it


@pytest.fixture(scope="module", autouse=True)
def composed():
    """Let read_training() compose train.py's config, as in scripts.judge."""
    runtime_config.register(commands.CONFIGS, config_groups(), backend_names())
    with hydra.initialize_config_dir(str(commands.CONFIGS), version_base=None):
        yield


def judge(path: Path, folder: Path) -> str:
    """Return what the judge says about a backend: ok, or why it is refused."""
    claim = Claim(constants(path)["OP"], str(path), "eager")
    values = constants(path)
    precision = [f"precision={values['PRECISION']}"] if "PRECISION" in values else []
    words = [
        *training_words(claim, DEVICE, []),
        *SMALL,
        *precision,
        f"train.max_steps={values.get('STEPS', 9)}",
    ]
    config, recipe = read_training([*words, choose_backends(claim, "eager")])
    probes = make_probes(claim, recipe, (config.train.batch_size, config.train.block_size))
    probes = {case: probe for case, probe in probes.items() if not probe.compiled}
    own = [case for case in probes if case.endswith((" training", " batch"))]
    chosen = [
        case for precision in ("fp32", "bf16") for case in probes if case.startswith(precision) and case not in own
    ]
    count = len(chosen) // 2
    some = SOME_CASES if path.parent.name == "cheats" else 1  # torch.compile compiles each case, for 5 to 10 s
    chosen = [*chosen[:some], *chosen[count : count + some], *own]
    [statuses] = judge_cases([{case: probes[case] for case in chosen}], DEVICE, 60, folder)
    for case, status in statuses.items():
        if not status.startswith(("ok", "unavailable")):
            return f"{case}: {status}"
    for case in own:
        if not statuses[case].startswith("ok"):
            return f"{case}: {statuses[case]}"
    open_dataset(config.data)  # prepares the shards, because no worker may write them
    source = random.SystemRandom()
    plan = draw_plan(config.train.max_steps, source)
    segments = plan.segments  # on a GPU a verdict repeats some of them
    prompts = None if claim.op == "loss" else draw_prompts(config.model, source)
    words += [choose_backends(claim, str(path)), *FIXED_WORDS, "seed=3", f"train.eval_every={config.train.max_steps}"]
    arm = run_arm(words, folder / "run", folder / "worker", plan, needed_states(segments, plan), prompts)
    if arm.status != "ok":
        return arm.status
    config = replace(config, train=replace(config.train, eval_batches=1))
    return judge_run(make_question(config, replace(recipe, seed=3), arm, DEVICE, plan, segments, prompts), arm)[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", backends("cheats"))
def test_a_cheat_is_refused_for_the_right_reason(path, tmp_path):
    values = constants(path)
    answer = judge(path, tmp_path)
    if "HARMLESS" in values:
        assert answer == "ok"
    else:
        assert re.search(values["REFUSED"], answer), answer


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", backends("honest"))
def test_an_honest_kernel_is_right(path, tmp_path):
    assert judge(path, tmp_path) == "ok"


def test_every_cheat_says_what_it_is():
    files = sorted((HERE / "cheats").glob("*.py"))
    assert len(files) >= 30
    for path in files:
        values = constants(path)
        assert values["OP"] in ("norm", "linear", "mlp", "loss", "attention"), path
        assert ("REFUSED" in values) != ("HARMLESS" in values), path
        assert "Known from: " in ast.get_docstring(ast.parse(path.read_text())), path
