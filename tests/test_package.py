"""What surrounds the code: the package that pip installs, the lock file, the container, the workflow, `make smoke`."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from torch._library.custom_ops import OPDEFS

import hotswap
from hotswap.rooms import ROOMS, is_room
from lab.bench.machine import compare_versions, read_tested_versions
from tests.test_readmes import check

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# A user's program, beside modules of its own that have the names of rooms
PROGRAM = """
import data, kernels, model, runtime
import hotswap
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
shape = {"vocab_size": 256, "n_layer": 1, "n_embd": 32, "n_head": 2, "block_size": 32}
options = {"device": device, "precision": "fp32"}
idx = torch.randint(256, (2, 16), device=device)

gpt = hotswap.build("tiny", kernels={"norm": "triton"}, attn={"impl": "sdpa"}, **shape, **options)
other = hotswap.build("tiny", kernels="eager", attn="math", **shape, **options)
assert isinstance(gpt, hotswap.GPT)
assert gpt.ln_f.norm.__module__ == "hotswap.kernels.norm.triton"
loss, other_loss = gpt(idx, idx), other(idx, idx)
loss.backward()
other_loss.backward()
torch.testing.assert_close(loss, other_loss, rtol=1e-4, atol=1e-5)
torch.testing.assert_close(gpt.wte.weight.grad, other.wte.weight.grad, rtol=1e-3, atol=1e-5)

torch.save({"model": gpt.state_dict(), "model_args": {**shape, "bias": True}}, "ckpt.pt")
loaded = hotswap.load("ckpt.pt", attn="math", **options)
torch.testing.assert_close(loaded(idx), gpt(idx), rtol=1e-4, atol=1e-5)
assert hotswap.generate(loaded, idx, 3, n_vocab=256).shape == (2, 19)

norm = hotswap.op("norm", "triton", device)
x = torch.randn(2, 4, 8, device=device)
y, residual = norm(x, None, torch.ones(8, device=device), torch.zeros(8, device=device))
torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (8,)), rtol=1e-4, atol=1e-5)

for room in data, kernels, model, runtime:
    assert room.MINE
print(hotswap.__file__)
"""


def build_wheel(folder, kind):
    """Return the wheel that pip builds; `kind` is wheel:standard, or wheel:editable for `pip install -e`."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    [path] = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(params=["checkout", "wheel"])
def installed(request, tmp_path):
    """The folder in which Python finds the package: the repo, or the contents of the wheel that pip builds."""
    if request.param == "checkout":
        return ROOT
    build_wheel(tmp_path, "wheel:standard").extractall(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.usefixtures("quick_python")
def test_a_program_uses_the_package_beside_modules_with_the_names_of_rooms(installed, tmp_path):
    """It builds, trains and loads a GPT, and calls an op. `import data` stays the program's own."""
    folder = tmp_path / "program"
    folder.mkdir()
    for room in ROOMS:
        (folder / f"{room}.py").write_text("MINE = True")
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(installed / "hotswap/__init__.py")


def test_rooms_under_both_names_share_no_operator():
    """A second operator of the same name would free the first, and the next call of the first would crash."""
    pytest.importorskip("triton")
    for path in (ROOT / "kernels").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for operator in re.findall(r'custom_op\(\s*"hotswap::(\w+)"', path.read_text(encoding="utf-8")):
            import_module(module)
            import_module(f"hotswap.{module}")
            assert OPDEFS[f"hotswap::{operator}"]._init_fn.__module__.startswith("kernels.")
            assert OPDEFS[f"hotswap_package::{operator}"]._init_fn.__module__.startswith("hotswap.kernels.")


# For macOS and Windows, for which pip finds no Triton
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from kernels.registry import unavailable
plain = {"norm": ["eager"], "linear": ["eager"], "mlp": ["eager"], "loss": ["eager", "torch_chunked"]}
for op, impls in {**plain, "attention": ["eager", "math", "sdpa"]}.items():
    for impl in impls:
        assert unavailable(op, impl, torch.device("cpu")) is None
"""


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="torch_chunked needs torch 2.13")
def test_the_backends_in_plain_pytorch_need_no_triton():
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, check=True)


def test_the_wheel_holds_one_package_with_every_file_of_the_rooms(tmp_path):
    names = set(build_wheel(tmp_path, "wheel:standard").namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"hotswap"}
    files = subprocess.run(["git", "ls-files", *ROOMS, "configs"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert {f"hotswap/{file}" for file in files.stdout.split() if file not in ROOMS} <= names
    assert {"hotswap/common/files.py", "hotswap/common/terminal.py"} <= names


@pytest.mark.parametrize("has_git", [True, False])
def test_the_wheel_and_the_source_archive_hold_no_file_that_git_does_not_track(checkout, tmp_path, has_git):
    """Without git, as in an unpacked archive, they hold the files with known suffixes, and no hidden ones."""
    pytest.importorskip("hatchling")
    if has_git:
        subprocess.run(["git", "add", "-A"], cwd=checkout, check=True)
    else:
        shutil.rmtree(checkout / ".git")
    secrets = [
        "data/.env",
        ".env",
        "kernels/secret.txt",
        "hotswap/secret.pem",
        "model/weights.safetensors",
        "data/book",
    ]
    secrets += ["data/.hidden.py", "configs/.git-credentials", "out/run/result.json"]
    secrets += ["dist/x.py", "runtime/.x/y.py"]
    for name in secrets:
        path = checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"secret" * 1000)
    (checkout / "configs/mine.yaml").touch()
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel:standard",
        "-t",
        "sdist",
        "-d",
        tmp_path / "new",
    ]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    [wheel], [archive] = (tmp_path / "new").glob("*.whl"), (tmp_path / "new").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as parts, tarfile.open(archive) as members:
        shipped = {name.removeprefix("hotswap/") for name in parts.namelist()}
        packed = {name.partition("/")[2] for name in members.getnames()}
    for names in (shipped, packed):
        assert not set(secrets) & names
        assert {"kernels/registry.py", "configs/config.yaml", "data/README.md"} <= names
        assert ("configs/mine.yaml" in names) != has_git
    assert {"train.py", "tests/conftest.py", "pyproject.toml", "LICENSE", "Makefile", "PKG-INFO"} <= packed


def test_the_wheel_has_type_hints_and_the_version_of_the_module(tmp_path):
    wheel = build_wheel(tmp_path, "wheel:standard")
    assert "hotswap/py.typed" in wheel.namelist()
    metadata = wheel.read(f"hotswap-{hotswap.__version__}.dist-info/METADATA").decode()
    assert f"\nVersion: {hotswap.__version__}\n" in metadata


def test_an_editable_install_copies_no_file_of_the_package(tmp_path):
    """A folder hotswap/ in site-packages would hide the checkout."""
    names = build_wheel(tmp_path, "wheel:editable").namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "_editable_impl_hotswap.pth",
        "_editable_impl_hotswap.py",
        "hotswap",
    }
    assert not [name for name in names if name.startswith("hotswap/")]


def test_a_backend_may_be_a_file(monkeypatch, tmp_path):
    """By its path, as on the command line."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("twice.py").write_text(
        "from hotswap.kernels.attention import reference\n\n\n"
        "def attention(q, k, v, *, causal=True, scale=None):\n    return 2 * reference(q, k, v, causal=causal)\n"
    )
    options = {"device": "cpu", "precision": "fp32", "n_layer": 1, "seed": 1}
    idx = torch.arange(8).view(1, 8)
    model, same = (hotswap.build("tiny", attn=attn, **options) for attn in ("./twice.py", {"impl": "twice.py"}))
    assert torch.equal(model(idx, idx), same(idx, idx))
    assert not torch.equal(model(idx, idx), hotswap.build("tiny", attn="eager", **options)(idx, idx))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hotswap.build("tinny"), "model=tinny: choose gpt2_124m"),
        (lambda: hotswap.build("tiny", n_layers=3), "unknown key model.n_layers; did you mean model.n_layer?"),
        (lambda: hotswap.build("tiny", kernels="tritn"), "kernels=tritn: choose auto"),
        (lambda: hotswap.build("tiny", attn="mine.py"), "attn.impl=mine.py: no file mine.py in "),
        (lambda: hotswap.build("tiny", attn="*"), "attn=*: choose auto, cudnn"),
        (
            lambda: hotswap.build("tiny", kernels={"nrm": "eager"}),
            "unknown key kernels.nrm; did you mean kernels.norm?",
        ),
        (lambda: hotswap.build("tiny", precision="fp23"), "precision=fp23: choose fp32"),
        (lambda: hotswap.load("no/such/model", device="cpu", n_layer=3), "no/such/model"),
        (lambda: hotswap.op("norms", "eager"), "op=norms: choose norm"),
        (lambda: hotswap.op("norm", "mine"), "no file kernels/norm/mine.py"),
    ],
)
def test_a_wrong_choice_raises_one_line(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_loader_renames_every_import_of_a_room():
    """It renames `from kernels import ...`, so no file of a room says `import kernels`."""
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import)]
            assert not [alias.name for node in nodes for alias in node.names if is_room(alias.name)], path


def test_the_lock_file_pins_every_dependency_to_a_version_that_the_project_allows():
    """`make lock` writes it. A line is NAME==VERSION, without hosts and paths, and may have a marker."""
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    assert all(len(pin.specifier) == 1 and next(iter(pin.specifier)).operator == "==" for pin in pins)
    assert not [pin for pin in pins if pin.url]
    versions = {}
    for pin in pins:
        versions.setdefault(canonicalize_name(pin.name), []).append(next(iter(pin.specifier)).version)
    project = PROJECT["project"]
    needed = [*project["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    for extra in project["optional-dependencies"].values():
        needed += extra
    for requirement in map(Requirement, needed):
        for version in versions[canonicalize_name(requirement.name)]:
            assert requirement.specifier.contains(version, prereleases=True), requirement


def test_the_bound_of_torch_is_the_version_after_the_tested_ones():
    """The lock file has a tested version, too, and so do the comments on private parts of PyTorch and Triton."""
    tested = read_tested_versions()
    [torch_bound] = [Requirement(line).specifier for line in PROJECT["project"]["dependencies"] if "torch" in line]
    first, last = tested["torch"][0], tested["torch"][-1]
    major, minor = map(int, last.split("."))
    assert torch_bound == SpecifierSet(f">={first},<{major}.{minor + 1}")
    assert PROJECT["project"]["requires-python"] == f">={tested['python'][0]}"
    for name in ("torch", "triton"):
        assert tested[name] == sorted(tested[name], key=Version)
        [locked] = re.findall(rf"^{name}==(\d+\.\d+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
        assert locked in tested[name]


def test_the_doctor_names_a_version_outside_of_the_tested_ones():
    """A patch release is like its minor version, and 2.1 is not 2.11."""
    tested = {"python": ["3.11", "3.12"], "torch": ["2.11", "2.13"], "triton": ["3.6", "3.9"]}
    for torch_version, triton, line in (
        ("2.11.0+cu130", "3.9.7", "yes: python 3.12.3, torch 2.11.0+cu130, triton 3.9.7"),
        ("2.13.3", None, "yes: python 3.12.3, torch 2.13.3"),
        ("2.14.0.dev1+git1", "3.6.0", "torch 2.14.0.dev1+git1 is not; tested are 2.11, 2.13"),
        ("2.12.0", "3.6.0", "torch 2.12.0 is not; tested are 2.11, 2.13"),
        ("2.1.1", "3.6.0", "torch 2.1.1 is not; tested are 2.11, 2.13"),
        ("2.13.0", "4.0.0", "triton 4.0.0 is not; tested are 3.6, 3.9"),
    ):
        assert compare_versions({"python": "3.12.3", "torch": torch_version, "triton": triton}, tested) == line


def test_the_container_is_made_from_files_and_targets_that_exist():
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    assert [name for name, _ in instructions] == ["FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"]
    values = dict(instructions)
    python = re.fullmatch(r"python:(3\.\d+)-\w+", values["FROM"])[1]
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(python)
    *sources, _ = values["COPY"].split()
    assert all((ROOT / source).exists() for source in sources)
    constraint, *install = shlex.split(values["RUN"])
    assert (ROOT / constraint.removeprefix("PIP_CONSTRAINT=")).exists()
    for program, target in (install, json.loads(values["CMD"])):
        assert program == "make"
        assert re.search(f"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {f"{name}/" for name in ignored} <= set((ROOT / ".gitignore").read_text().split())
    assert ".venv" in ignored  # the image makes its own


def test_the_container_of_an_editor_is_made_from_files_and_targets_that_exist():
    """Its .venv is a volume, because the .venv of the host has other paths."""
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert re.fullmatch(r"python:(3\.\d+)-\w+", container["image"])[1] in PROJECT["tool"]["hotswap"]["tested"]["python"]
    assert container["hostRequirements"] == {"gpu": "optional"}
    constraint, program, target = shlex.split(container["postCreateCommand"])
    assert (ROOT / constraint.removeprefix("PIP_CONSTRAINT=")).exists()
    assert program == "make"
    assert re.search(f"^{re.escape(target)}:", MAKEFILE, re.MULTILINE)
    python = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    venv = str(Path(target).parent)
    assert python == f"${{containerWorkspaceFolder}}/{venv}/bin/python"
    [mount] = container["mounts"]
    assert f"target=${{containerWorkspaceFolder}}/{venv},type=volume" in mount


def test_the_public_workflow_runs_what_ci_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    [job] = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    [lock] = re.findall(r"^PIP_CONSTRAINT=(\S+) make \.venv/installed", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert (ROOT / lock).exists()


def test_the_pages_of_all_devices_are_an_artifact_of_the_public_workflow():
    """A device is a folder of results/ without a dash. Its page needs no rows from elsewhere, except its ladder's."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/pages.yml").read_text())
    steps = workflow["jobs"]["build"]["steps"]
    [command] = [step["run"] for step in steps if "run" in step]
    assert command.endswith(" make pages")
    uploads = [step["with"]["path"] for step in steps if "upload" in step.get("uses", "")]
    assert uploads == ["out/pages"] * 2
    [devices] = re.findall(r"^DEVICES := (.*)$", MAKEFILE, re.MULTILINE)
    folders = {path.parent.name for path in (ROOT / "results").glob("*/train.jsonl")}
    assert set(devices.split()) == {name for name in folders if "-" not in name}
    make = ["make", "--dry-run", "--old-file=.venv/installed", "pages"]
    recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "cp -R results out/pages\ncp lab/report/pages.html out/pages/index.html\n" in recipe


def test_the_list_of_pages_has_each_device_with_its_full_name():
    """The name is that of the rows, after the number of GPUs at the end of the folder's name."""
    text = (ROOT / "lab/report/pages.html").read_text()
    [devices] = re.findall(r"^DEVICES := (.*)$", MAKEFILE, re.MULTILINE)
    names = []
    for device in devices.split():
        row = json.loads((ROOT / f"results/{device}/train.jsonl").read_text().splitlines()[0])
        count = device.partition("x")[2]
        names.append((device, f"{count} x {row['env']['device']}" if count else row["env"]["device"]))
    assert re.findall(r'<a href="(\w+)/report.html">(.*?)</a>', text) == names
    assert '<a href="README.md">' in text
    assert "<title>hotswap: what was measured</title>" in text
    assert "<h1>hotswap: what was measured</h1>" in text


def test_make_smoke_ends_with_three_valid_commands():
    make = ["make", "--dry-run", "--old-file=.venv/installed", "smoke"]
    recipe = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"'  python ([^'#]*?) *#", recipe)
    assert len(commands) == 3
    for command in commands:
        check(shlex.split(command))


def test_make_says_what_it_installs_before_it_does():
    make = ["make", "--dry-run", "--assume-new=pyproject.toml", ".venv/installed"]
    lines = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    said = next(number for number, line in enumerate(lines) if "about 3 GB" in line)
    assert said < next(number for number, line in enumerate(lines) if "pip install" in line)
