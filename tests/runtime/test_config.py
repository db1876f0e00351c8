"""Every mistake of a user is one line that starts with `error: `, and exit code 1."""

import importlib
import os
import pickle
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import train
from common.terminal import quote_exactly
from kernels.names import config_groups, impls
from model.config import GPTConfig
from runtime.command import command_line
from runtime.config import UserError
from runtime.keys import OTHER_NAMES, explain_key, key_names
from scripts import evaluate, generate

ROOT = Path(__file__).parents[2]
COMMANDS = [f"scripts.{path.stem}" for path in ROOT.glob("scripts/[a-z]*.py") if "@command" in path.read_text()]
CHOICES = ", ".join(sorted(config_groups()["kernels"]))

MISTAKES = [
    (["kernels=fast"], f"kernels=fast: no such choice; kernels is one of: {CHOICES}"),
    (["attn=fast"], f"attn=fast: no such choice; attn is one of: {', '.join(impls('attention'))}\n"),
    (["+experiment=fast"], "experiment=fast: no such choice; experiment is one of: curve, "),
    (["kernels.mlp=fast"], f"kernels.mlp=fast: no file kernels/mlp/fast.py; there are {', '.join(impls('mlp'))}\n"),
    (
        ["attn.impl=fast"],
        f"attn.impl=fast: no file kernels/attention/fast.py; there are {', '.join(impls('attention'))}",
    ),
    (["attn=to/mine.py"], "attn.impl=to/mine.py: no file to/mine.py in "),
    (["attn=/to/mine.py"], "attn.impl=/to/mine.py: no file /to/mine.py in "),
    (["attn=no_such_package.mine"], "attn.impl=no_such_package.mine: ModuleNotFoundError: No module named 'no_such_"),
    (["attn=größe/mine.py"], "attn=größe/mine.py: Hydra reads ( ) [ ] { } = , ~ $ and quotes as syntax, and letters"),
    (["attn=to/mine"], "attn=to/mine: no such choice; attn is one of: auto, "),
    (["kernels.norm=to/mine.py"], "kernels.norm=to/mine.py: no file to/mine.py in "),
    (["kernels=to/mine.py"], f"kernels=to/mine.py: no such choice; kernels is one of: {CHOICES}\n"),
    (["attn=flash", "attn.version=fa5"], "attn.version=fa5: choose fa4, fa3, fa2, torch, or null"),
    (["attn.version=fa4"], "attn.version=fa4: attn=sdpa has no versions"),
    (["attn=flash", "device=cpu"], "attention=flash cannot run here: it needs an NVIDIA GPU of compute capability 8.0"),
    (["train.step=5"], "unknown key train.step; did you mean train.max_steps?"),
    (["+train.step=5"], "unknown key train.step; did you mean train.max_steps?"),
    (["++model.n_layers=5"], "unknown key model.n_layers; did you mean model.n_layer?"),
    (["+flavour=red"], "unknown key flavour; the keys are: out_dir, init_from, seed, device"),
    (["kernel=eager"], "unknown key kernel; did you mean kernels?"),
    (["train.max_steps=many"], "train.max_steps: Value 'many' of type 'str' could not be converted to Integer"),
    (["train.batch_size=2.5"], "train.batch_size: Value '2.5' of type 'float' could not be converted to Integer"),
    (["model.bias=perhaps"], "model.bias: Value 'perhaps' is not a valid bool"),
    (["attn.impl=null"], "attn.impl: Incompatible value 'None'"),
    (["~train.batch_size"], "train.batch_size is missing: neither the command line nor a file in configs/ sets it"),
    (["train.batch_size=0"], "train.batch_size=0: it must be at least 1"),
    (["train.log_every=0"], "train.log_every=0: it must be at least 1"),
    (["train.max_skips=0"], "train.max_skips=0: it must be at least 1"),
    (["train.spike_factor=1"], "train.spike_factor=1.0: it must be above 1, or null"),
    (["runtime.hang_minutes=0"], "runtime.hang_minutes=0.0: it must be above 0, or null"),
    (["train.max_steps=null", "train.max_minutes=null"], "train.max_steps or train.max_minutes must be set"),
    (["train.max_steps=0"], "train.max_steps and train.max_minutes must be above 0"),
    (["optim.learning_rate=-1"], "optim.learning_rate=-1.0: it must be finite and not negative"),
    (["model.dropout=1.5"], "model.dropout=1.5: it must be in [0, 1)"),
    (["seed=-1"], "seed=-1: it must be in [0, 2^63)"),
    (["precision=int8"], "precision=int8: choose fp32, amp, bf16, fp8"),
    (["train.tokens_per_step=5000"], "train.tokens_per_step=5000 does not divide into micro-steps"),
    (["model.n_head=3"], "model.n_embd=128 is not a multiple of model.n_head=3"),
    (
        ["train.block_size=256", "train.tokens_per_step=4096"],
        "train.block_size: a sequence of 256 is beyond the model's position table of model.block_size=128",
    ),
    (["device=tpu"], "device=tpu: choose auto, cpu, cuda or cuda:N"),
    (["data=text"], "data=text needs data.path: a file"),
    (["data=text", "data.path=nowhere"], "data.path=nowhere: no such file or folder"),
    (["data.path=book.txt"], "data.path=book.txt is for your own text: add data=text"),
    (["data.tokenizer=words"], "data.tokenizer=words: choose bytes or gpt2"),
    (["model.vocab_size=200"], "data.tokenizer=bytes has 257 ids, and model.vocab_size=200 is less"),
    (["logger=paper"], "logger=paper: no such choice; logger is one of: none, tensorboard, wandb"),
    (["logger.name=paper"], "logger.name=paper: choose none, wandb, tensorboard"),
    (["logger.mode=live"], "logger.mode=live: choose offline or online"),
    (["logger=wandb", "logger.project=a/b"], "logger.project=a/b: W&B takes 1 to 128 characters"),
    (
        ["logger=wandb", f"logger.tags=[a,{65 * 'b'}]"],
        f"logger.tags={65 * 'b'}: W&B takes 1 to 64 characters, and these are 65",
    ),
    (["logger=wandb", "logger.tags=['']"], "logger.tags=: W&B takes 1 to 64 characters"),
    (["logger=wandb", f"logger.group={129 * 'g'}"], f"logger.group={129 * 'g'}: W&B takes 1 to 128 characters"),
    (["logger=wandb", f"logger.job_type={65 * 'j'}"], f"logger.job_type={65 * 'j'}: W&B takes 1 to 64 characters"),
    (["train.max_minutes=nan"], "train.max_steps and train.max_minutes must be above 0"),
    (["optim.learning_rate=inf"], "optim.learning_rate=inf: it must be finite"),
    (["seed=18446744073709551616"], "seed=18446744073709551616: it must be in [0, 2^63)"),
    (["~model"], "model.n_layer is missing"),
    (["train=null"], ""),
    (["kernels=1"], ""),
    (["--nope"], "unrecognized arguments: --nope"),
    (
        ["train.max_steps=[1"],
        "train.max_steps=[1: Hydra reads ( ) [ ] { } = , ~ $ and quotes as syntax; quote",
    ),
    (["data=text", "data.path=a(1).txt"], "data.path=a(1).txt: Hydra reads ( )"),
    (["init_from=~x/y"], "init_from=~x/y: Hydra reads ( )"),
    *(
        ([f"init_from={value}"], f"init_from={value} is not text: write init_from=./{value}")
        for value in ("3.7", "5", "True")
    ),
    (["init_from=[a]"], "init_from=['a'] is not text: write init_from=./"),
    (["init_from={a: 1}"], "init_from={'a': 1} is not text"),
    (["init_from=x\x1b[2J/y"], "init_from=x\\x1b[2J/y"),
    (['out_dir="x\x1b[2J"'], "out_dir=x\\x1b[2J has control characters; choose another folder"),
    (["init_from=???"], "init_from is missing: neither the command line nor a file in configs/ sets it"),
    (['out_dir="~nobody-here/run"'], "~nobody-here/run: the home folder of this user is not known; write ./~"),
    (["data=text", 'data.path="~gone.txt"'], "data.path=~gone.txt: no such file or folder"),
    (["data=text", "data.path=${oc.env:UNEXPANDED}"], "data.path=/home-of-test/gone.txt: no such file or folder"),
    (["init_from=${nope}"], "init_from: Interpolation key 'nope' not found"),
    (["data.path=a\nb("], "data.path=a b(: Hydra reads ( )"),
    (["sweep=kernels"], "sweep=kernels: this group has no default choice; add a choice with a plus: +sweep=kernels"),
    (["+sweep=fast"], "sweep=fast: no such choice; sweep is one of: ablation, attention, batch, course,"),
    (["+sweep=wandb"], "sweep=wandb is W&B's: run `wandb sweep configs/sweep/wandb.yaml`"),
    (["sweep.timeout=-1"], "sweep.timeout=-1.0: it must be minutes above 0, or null"),
    (["smoke"], "smoke: arguments are key=value; --help lists the keys"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_an_error_of_one_line(hotswap, monkeypatch, arguments, message):
    monkeypatch.setenv("HOME", "/home-of-test")
    monkeypatch.setenv("UNEXPANDED", "~/gone.txt")
    code, _, err = hotswap("+experiment=smoke", *arguments)
    assert code == 1
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["a(1).txt", "x~(y.txt", 'say "a".txt', "a=b, c.txt", "a\\(.txt", "${x}(.txt"])
def test_a_name_arrives_unchanged_with_the_quotes_that_the_error_suggests(hotswap, name):
    """The shell splits the suggestion, and Hydra reads the result as this name."""
    _, _, err = hotswap("+experiment=smoke", "data=text", f"data.path={name}")
    if "Hydra reads ( )" in err:
        [word] = shlex.split(err.partition("quotes for the shell: ")[2])
    else:  # Hydra reads a comma as a list, and its own error suggests nothing
        word = f"data.path={quote_exactly(name)}"
    _, _, err = hotswap("+experiment=smoke", "data=text", word)
    assert err == f"error: data.path={name}: no such file or folder, and nothing matches it as a glob\n"


MEANT = {  # what is typed -> the key that it means
    train.Config: {
        "optim.lr": "optim.learning_rate",
        "lr": "optim.learning_rate",
        "train.lr": "optim.learning_rate",
        "bs": "train.batch_size",
        "train.epochs": "train.max_steps",
        "model.ctx": "model.block_size",
        "seq_len": "model.block_size",
        "train.seq_len": "train.block_size",
        "model.d_model": "model.n_embd",
        "model.hidden_size": "model.n_embd",
        "model.heads": "model.n_head",
        "model.layers": "model.n_layer",
        "optim.wd": "optim.weight_decay",
        "optim.betas": "optim.beta1",
        "optim.warmup": "optim.warmup_steps",
        "optimizer": "optim",
        "wandb": "logger",
        "compile": "kernels.compile",
        "dtype": "precision",
        "train.learning_rate": "optim.learning_rate",
        "max_step": "train.max_steps",
        "batchsize": "train.batch_size",
        "optim.weight_dcay": "optim.weight_decay",
        "model.n_layers": "model.n_layer",
        "outdir": "out_dir",
        "train.fp8": "kernels.fp8",
        "model.rms_norm_eps": "model.norm_eps",
        "model.layer_norm_epsilon": "model.norm_eps",
        "model.rope_base": "model.rope_theta",
        "rope_base": "model.rope_theta",
        "norm_type": "model.norm",
        "model.head_size": "model.head_dim",
        "model.intermediate_size": "model.hidden",
        "model.n_inner": "model.hidden",
        "model.tie_word_embeddings": "model.tie_embeddings",
    },
    evaluate.Config: {"bs": "batch_size", "seq_len": "block_size", "dataset": "data"},
    generate.Config: {"max_length": "max_new_tokens", "temp": "temperature", "bs": "batch", "topk": "top_k"},
}
UNLIKE = {train.Config: ["model.activation", "train.foo"], evaluate.Config: ["task", "lr"]}


@pytest.mark.parametrize("schema", MEANT, ids=lambda schema: schema.__module__)
def test_an_unknown_key_is_explained_by_its_meaning(schema):
    known = list(key_names(schema))
    for key, meant in MEANT[schema].items():
        assert explain_key(key, known) == f"unknown key {key}; did you mean {meant}?"


@pytest.mark.parametrize("schema", UNLIKE, ids=lambda schema: schema.__module__)
def test_an_unknown_key_without_a_meaning_lists_the_keys_of_its_group(schema):
    known = list(key_names(schema))
    for key in UNLIKE[schema]:
        group = key.rpartition(".")[0]
        keys = [name for name in known if name.rpartition(".")[0] == group]
        assert explain_key(key, known) == f"unknown key {key}; the keys are: {', '.join(keys)}"


def test_the_other_names_are_of_keys_that_exist():
    schemas = [importlib.import_module(name).Config for name in ("train", *COMMANDS)]
    keys = [set(key_names(schema)) for schema in schemas]
    ends = {end for names in keys for name in names for end in (name, name.rpartition(".")[2])}
    assert ends >= OTHER_NAMES.keys()


def test_an_unknown_key_in_a_group_file_is_an_error(hotswap, tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "odd.yaml").write_text("{norm: eager, mlp: eager, loss: eager, compile: false, nrm: eager}")
    code, _, err = hotswap("--config-dir", str(tmp_path), "+experiment=smoke", "kernels=odd")
    assert (code, err) == (1, "error: unknown key kernels.nrm; did you mean kernels.norm?\n")


def test_a_gpu_that_is_missing_is_an_error(hotswap, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, _, err = hotswap("+experiment=smoke", "device=cuda")
    assert code == 1
    assert err.startswith("error: device=cuda: ")
    assert "use device=cpu" in err


@pytest.mark.usefixtures("quick_python")
def test_the_program_prints_the_error_only(tmp_path):
    """As a process: exit code 1, the error on stderr, no stdout, and no new file."""
    command = [sys.executable, str(ROOT / "train.py"), "+train.step=5"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "error: unknown key train.step; did you mean train.max_steps?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_may_be_asked_for_after_the_overrides(hotswap):
    code, out, _ = hotswap("+experiment=smoke", "train.max_steps=nothing,else", "-m")
    assert code == 1
    assert out.startswith("sweep    2 jobs")


def test_help_shows_groups_backends_and_keys(hotswap):
    code, out, _ = hotswap("--help")
    assert code == 0
    assert f"kernels: {CHOICES}\n" in out
    assert f" attention {', '.join(impls('attention'))} " in " ".join(out.split())  # wrapped, because it is long
    assert "tokens_per_step: 65536" in out
    assert "+experiment=smoke" in out


@pytest.mark.parametrize(
    ("program", "shown"),
    [("/repo/train.py", "train.py"), ("train.py", "train.py"), ("/other/train.py", "/other/train.py")],
)
def test_a_command_names_no_folder_above_the_current_one(monkeypatch, program, shown):
    """scripts.judge starts train.py by its whole path."""
    monkeypatch.setattr(sys, "argv", [program, "seed=1"])
    monkeypatch.setattr(HydraConfig, "initialized", lambda: False)  # a test before may have composed a config
    monkeypatch.setattr("runtime.command.config_flags", [])
    monkeypatch.setattr(Path, "cwd", lambda: Path("/repo"))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert command_line(out_dir="a") == f"python {shown} seed=1 out_dir=a"


@pytest.mark.parametrize("words", [["pickles_its_task.py"], ["-m", "pickles_its_task"]], ids=" ".join)
def test_a_pickled_task_imports_its_program_in_another_process(tmp_path, monkeypatch, capsys, words):
    """As with hydra/launcher=submitit_slurm. There a mistake must reach the launcher, so it is no printed line."""
    program = tmp_path / "pickles_its_task.py"
    program.write_text(
        "import pathlib, pickle\n"
        "from dataclasses import dataclass\n"
        "from runtime.config import check, cli\n"
        "@dataclass\n"
        "class Config:\n"
        "    x: int\n"
        "    def __post_init__(self): check(self.x > 0, f'x={self.x}: it must be above 0')\n"
        "@cli(Config, pathlib.Path('configs').resolve(), 'config')\n"
        "def main(cfg): print('x is', cfg.x)\n"
        "if __name__ == '__main__': pathlib.Path('task').write_bytes(pickle.dumps(main.new_task()))\n"
    )
    monkeypatch.setattr("runtime.command._program", [])
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, check=True)
    monkeypatch.syspath_prepend(tmp_path)
    task = pickle.loads((tmp_path / "task").read_bytes())
    task(OmegaConf.create({"x": 3}))
    assert capsys.readouterr().out == "x is 3\n"
    monkeypatch.setattr(sys, "argv", ["submitit.py", "x=3"])
    monkeypatch.setattr(HydraConfig, "initialized", lambda: False)
    monkeypatch.setattr("runtime.command.config_flags", [])
    assert command_line() == "python pickles_its_task.py x=3"
    with pytest.raises(UserError, match=r"^x=0: it must be above 0$"):
        task(OmegaConf.create({"x": 0}))


@pytest.mark.parametrize("command", ["config", "doctor", "generate", "max_context"])
def test_every_command_that_builds_a_model_has_all_fields_of_its_config(command):
    """The files in configs/model have the three sizes."""
    group = OmegaConf.load(Path(train.__file__).parent / f"configs/{command}.yaml").model
    assert {*group, "n_layer", "n_head", "n_embd"} == {field.name for field in fields(GPTConfig)}
