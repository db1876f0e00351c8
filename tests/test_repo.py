"""The rooms are layers: imports go down only, without cycles, and no room hands a function to a lower room.

A room gets its own group of the config and not the whole config, and the files that a newcomer opens first stay short.
"""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("common",), ("kernels", "data", "runtime"), ("model",), ("lab",), ("train",), ("course", "scripts")
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


def read_modules(root: Path) -> dict[str, ast.Module]:
    """Return the name of each module in a room -> its syntax tree."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in FLOOR:
            modules[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return modules


def room(module: str) -> str:
    return module.partition(".")[0]


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name in the file, full name) of each import, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or room(alias.name), alias.name if alias.asname else room(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def imported_modules(tree: ast.AST, modules: dict[str, ast.Module]) -> set[str]:
    """Return which of `modules` this file imports, inside functions too.

    `from a import b` imports a.b if that is a module, and a otherwise.
    """
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {name if name in modules else name.rpartition(".")[0] for _, name in imported_names(tree)}
    return found & modules.keys()


def climbing_imports(modules: dict[str, ast.Module]) -> list[str]:
    """Return the imports of a higher room, or of another room on the same floor."""
    return [
        f"{module} imports {other}"
        for module, tree in modules.items()
        for other in sorted(imported_modules(tree, modules))
        if room(other) != room(module) and FLOOR[room(other)] >= FLOOR[room(module)]
    ]


def import_cycles(modules: dict[str, ast.Module]) -> list[str]:
    """Return the modules that import themselves, directly or through others."""
    reachable = {module: imported_modules(tree, modules) for module, tree in modules.items()}
    for middle in modules:  # Warshall's transitive closure
        for module in modules:
            if middle in reachable[module]:
                reachable[module] |= reachable[middle]
    return [module for module in modules if module in reachable[module]]


def dotted(node: ast.expr) -> str:
    """Return "a.b.c" for the expression a.b.c, "a.b" for partial(a.b, ...), and "" for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    if isinstance(node, ast.Call) and dotted(node.func) in ("partial", "functools.partial"):
        return dotted(node.args[0])
    return ""


def definitions(modules: dict[str, ast.Module], *kinds: type) -> set[str]:
    """Return the full names of the functions or classes at the top level of each file."""
    return {f"{name}.{node.name}" for name, tree in modules.items() for node in tree.body if isinstance(node, kinds)}


def functions_handed_down(modules: dict[str, ast.Module]) -> list[str]:
    """Return the calls that pass a function to a function or a class of a lower room, which may not import it.

    Decorators (train.py's `cli`) and lambdas may pass functions, and are left out.
    """
    functions, classes = definitions(modules, *FUNCTIONS), definitions(modules, ast.ClassDef)
    found = []
    for module, tree in modules.items():
        imports = dict(imported_names(tree))
        decorators = {id(node) for item in ast.walk(tree) for node in getattr(item, "decorator_list", [])}
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or id(call) in decorators:
                continue
            names = []
            for node in (call.func, *call.args, *(keyword.value for keyword in call.keywords)):
                first, dot, rest = dotted(node).partition(".")
                names.append(f"{imports[first]}{dot}{rest}" if first in imports else f"{module}.{first}{dot}{rest}")
            callee, *arguments = names
            for argument in arguments:
                is_function_argument = callee in functions | classes and argument in functions
                if is_function_argument and FLOOR[room(argument)] > FLOOR[room(callee)]:
                    found.append(f"{module} hands {argument} to {callee}")
    return found


def parameters_of_higher_functions(modules: dict[str, ast.Module]) -> list[str]:
    """Return the parameters that a function calls, and that have the name of a function of a higher room."""
    highest: dict[str, int] = {}
    for full_name in definitions(modules, *FUNCTIONS):
        if room(full_name) == "course":  # nothing imports a rung, and its functions have short names such as backward
            continue
        name = full_name.rpartition(".")[2]
        highest[name] = max(highest.get(name, 0), FLOOR[room(full_name)])
    highest.pop("main", None)  # runtime's `cli` decorator calls its parameter `main`
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                calls = {dotted(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
                for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                    if argument.arg in calls and highest.get(argument.arg, 0) > FLOOR[room(module)]:
                        found.append(f"{module}.{node.name} calls its argument {argument.arg}")
    return found


def whole_configs(modules: dict[str, ast.Module]) -> list[str]:
    """Return the functions besides `main` that take the whole config, or a `cfg` of any type, instead of its group."""
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.name != "main":
                for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                    kind = ast.unparse(argument.annotation) if argument.annotation else "Any"
                    whole = kind.split(".")[-1] == "Config"
                    if whole or (argument.arg in ("cfg", "config") and kind in ("Any", "SimpleNamespace")):
                        found.append(f"{module}.{node.name}({argument.arg}: {kind})")
    return found


MODULES = read_modules(ROOT)


def test_imports_never_climb():
    """The rooms of FLOORS, from the ground; inside functions too."""
    assert climbing_imports(MODULES) == []


def test_no_files_import_each_other():
    """There is no import cycle, through any number of files."""
    assert import_cycles(MODULES) == []


def test_no_function_is_handed_to_a_lower_room():
    """Neither as an argument of a call, nor as a parameter with the name of a higher room's function."""
    assert functions_handed_down(MODULES) == []
    assert parameters_of_higher_functions(MODULES) == []


# What may take the whole config of train.py: it makes or repeats a whole training
REPEATS_A_TRAINING = ("train.run_recipe", "lab.recipe.of", "lab.judge.supervise.", "lab.judge.trial.")


def test_only_main_takes_the_whole_config():
    found = whole_configs(MODULES)
    assert [place for place in found if not place.startswith(REPEATS_A_TRAINING)] == []
    assert all(any(place.startswith(prefix) for place in found) for prefix in REPEATS_A_TRAINING)


def test_the_first_files_stay_short():
    """README.md has at most 150 lines. train.py has at most 250 lines, 40 imported names and 50 lines a function."""
    train = MODULES["train"]
    imports = [name for node in train.body for name in imported_names(node)]
    lengths = [node.end_lineno - node.lineno + 1 for node in ast.walk(train) if isinstance(node, FUNCTIONS)]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((ROOT / "train.py").read_text().splitlines()) <= 250
    assert len(imports) <= 40
    assert max(lengths) <= 50


def test_the_path_of_a_newcomer_stays_short():
    """At most 2,500 lines lead from README.md through the course to the model and its training."""
    path = ["README.md", "course/README.md", "train.py", "model/gpt.py", "model/step.py"]
    files = [*(ROOT / name for name in path), *ROOT.glob("course/*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 2500


def test_commit_subjects_are_short():
    """At most 72 characters, from the day of this rule on. The hook of .pre-commit-config.yaml says it earlier."""
    words = ["git", "log", "--no-merges", "--since=2026-11-27T19:00:00Z", "--format=%s"]
    log = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if log.returncode:
        pytest.skip("no git history here")
    assert [subject for subject in log.stdout.splitlines() if len(subject) > 72] == []


def parse_repo(**files: str) -> dict[str, ast.Module]:
    """Return the modules of a made-up repo; `model_step="..."` is model/step.py."""
    return {name.replace("_", "."): ast.parse(text) for name, text in files.items()}


def test_the_check_finds_a_climbing_import():
    repo = parse_repo(
        model_gpt="def f():\n    from lab import proof", data_text="import runtime.log", lab_proof="", runtime_log=""
    )
    assert climbing_imports(repo) == ["model.gpt imports lab.proof", "data.text imports runtime.log"]
    assert climbing_imports(parse_repo(lab_proof="from model import gpt", model_gpt="")) == []


def test_the_check_finds_a_cycle():
    repo = parse_repo(lab_proof="from model import gpt", model_gpt="import lab.proof", model_step="import model.gpt")
    assert import_cycles(repo) == ["lab.proof", "model.gpt"]
    package = parse_repo(
        lab="from lab import rows", lab_rows="from lab import RESULTS", lab_proof="from lab import rows"
    )
    assert import_cycles(package) == ["lab", "lab.rows"]


@pytest.mark.parametrize("call", ["measure(build)", "measure(work=build)", "measure(partial(build, 1))"])
def test_the_check_finds_a_function_that_is_handed_down(call):
    measure = "def measure(work):\n    work()"
    above = f"from functools import partial\nfrom model.step import measure\ndef build(): pass\n{call}"
    assert functions_handed_down(parse_repo(model_step=measure, train=above)) == [
        "train hands train.build to model.step.measure"
    ]
    assert functions_handed_down(parse_repo(lab_step=measure, model_gpt=above)) == []


def test_the_check_finds_a_parameter_with_the_name_of_a_higher_function():
    repo = parse_repo(model_proof="def prove(cfg, build):\n    build(cfg)", train="def build(cfg): pass")
    assert parameters_of_higher_functions(repo) == ["model.proof.prove calls its argument build"]
    lower = parse_repo(lab_proof="def prove(norm):\n    norm()", kernels_norm="def norm(): pass")
    assert parameters_of_higher_functions(lower) == []


def test_the_check_finds_a_whole_config():
    repo = parse_repo(
        lab_proof="def prove(cfg: Any): pass", train="def report(c: Config): pass\ndef main(cfg: Config): pass"
    )
    assert whole_configs(repo) == ["lab.proof.prove(cfg: Any)", "train.report(c: Config)"]
    assert whole_configs(parse_repo(data_text="def prepare(config: DataConfig): pass")) == []


def test_warnings_hide_control_characters():
    """terminal.warn() is the only place that prints a warning."""
    paths = (path for room in FLOOR for path in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/**/*.py")])
    assert [path.name for path in paths if 'print(f"warning: ' in path.read_text()] == ["terminal.py"]


# Functions and classes that may run what a file says
MAY_RUN_FILES = {f"{module}.{name}" for module in ("pickle", "dill", "marshal") for name in ("load", "loads")}
MAY_RUN_FILES |= {"pickle.Unpickler", "pickle._Unpickler", "shelve.open", "joblib.load", "pandas.read_pickle"}
MAY_RUN_FILES |= {f"yaml.{name}" for name in ("load", "load_all", "full_load", "unsafe_load")}
MAY_RUN_FILES |= {"torch.jit.load", "torch.hub.load", "torch.export.load", "eval", "exec"}
SAFE_OPTIONS = {"weights_only": "True", "allow_pickle": "False", "trust_remote_code": "False"}
EXCEPTIONS = {
    "runtime.torch_compat": "PyTorch returns the record of this process's collectives as a pickle",
    "runtime.sharded": "an empty class takes the place of each name in DCP's pickle",
}


def uses_that_run_files(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return module -> its uses of MAY_RUN_FILES, of torch.load without weights_only=True, and of unsafe options."""
    found: dict[str, list[str]] = {}
    for module, tree in modules.items():
        imports = dict(imported_names(tree))
        for node in ast.walk(tree):
            names = node.bases if isinstance(node, ast.ClassDef) else [getattr(node, "func", None)]
            options = {}
            if isinstance(node, ast.Call):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            elif not isinstance(node, ast.ClassDef):
                continue
            for name in map(dotted, names):
                first, dot, rest = name.partition(".")
                full = f"{imports.get(first, first)}{dot}{rest}"
                unsafe = full in MAY_RUN_FILES or (full == "torch.load" and "weights_only" not in options)
                if unsafe or any(options.get(key, safe) != safe for key, safe in SAFE_OPTIONS.items()):
                    found.setdefault(module, []).append(f"{node.lineno} {full}")
    return found


def test_no_room_runs_what_a_file_says():
    """A pickle, some YAML, and a model of a hub may hold any program. EXCEPTIONS has the reasons of the others."""
    packaging = {name: ast.parse((ROOT / name).read_text()) for name in ("hatch_build.py", "hotswap/rooms.py")}
    found = uses_that_run_files(MODULES | packaging)
    assert {module: uses for module, uses in found.items() if module not in EXCEPTIONS} == {}
    assert found.keys() == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.loads(b)",
        "from pickle import loads as read\nread(b)",
        "import pickle as p\nclass Mine(p.Unpickler): pass",
        "import torch\ntorch.load(p)",
        "import torch\ntorch.load(p, weights_only=False)",
        "import numpy as np\nnp.load(p, allow_pickle=True)",
        "import yaml\nyaml.load(p, Loader)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "def f():\n    return eval(text)",
    ],
)
def test_the_check_finds_what_runs_files(text):
    assert len(uses_that_run_files(parse_repo(lab_x=text))["lab.x"]) == 1


def test_the_check_passes_what_runs_no_file():
    text = "import torch, yaml\ntorch.load(p, weights_only=True)\nyaml.safe_load(p)\nmodel.eval()\nnp.load(p)"
    assert uses_that_run_files(parse_repo(lab_x=text)) == {}


def calls_without_encoding(modules: dict[str, ast.Module]) -> list[str]:
    """Return the calls that read or write text in the locale's encoding. It may be ASCII, and a file is always UTF-8.

    They are open(), a TemporaryFile, read_text() and write_text() with neither a binary mode nor `encoding`, and
    subprocesses with `text` but without `encoding`.
    """
    found = []
    for module, tree in modules.items():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
            owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            is_text = name in ("run", "Popen", "check_output") and "text" in keywords
            if (name == "open" and owner != "os" and module != "common.files") or name.endswith("TemporaryFile"):
                mode = [value.value for value in (*call.args, keywords.get("mode")) if isinstance(value, ast.Constant)]
                is_text = not any(re.fullmatch("[rwax+]*b[rwax+]*", str(value)) for value in mode)
                is_text &= name != "NamedTemporaryFile" or bool(mode)  # by default its mode is binary
            is_text |= bool(owner) and name in ("read_text", "write_text")
            if is_text and "encoding" not in keywords:
                found.append(f"{module}:{call.lineno} {name}")
    return found


def test_files_are_read_and_written_as_utf8():
    packaging = {name: ast.parse((ROOT / name).read_text()) for name in ("hatch_build.py", "hotswap/rooms.py")}
    assert calls_without_encoding(MODULES | packaging) == []


@pytest.mark.parametrize(
    "call", ["open(p)", "p.open('a')", "(p / 'x').read_text(errors='e')", "p.write_text('x')", "run(c, text=True)"]
)
def test_the_check_finds_a_file_in_the_encoding_of_the_locale(call):
    assert len(calls_without_encoding(parse_repo(lab=call))) == 1
    assert calls_without_encoding(parse_repo(lab=f"{call[:-1]}, encoding='utf-8')")) == []


def test_the_check_passes_binary_files():
    text = "open(p, 'rb')\np.open('r+b')\nos.open(p, os.O_RDONLY)\nNamedTemporaryFile()\np.read_bytes()\nrun(c)"
    assert calls_without_encoding(parse_repo(lab=text)) == []


# Calls that open a file by its path, besides open() and the methods of Path
OPENERS = {"memmap", "fromfile", "np.load", "torch.load", "load_file", "safe_open", "OmegaConf.load", "ParquetFile"}
OPENERS |= {"gzip.open", "os.open"}
# Reads that need no common/files.py: (module, call) -> why
OTHER_READS = {
    ("common.files", "open"): "open_regular() itself",
    ("lab.start", "open"): "hotswap/__init__.py, before the imports",
    ("hotswap", "OmegaConf.load"): "the configs of the package",
    ("data", "OmegaConf.load"): "the configs of this repo",
    ("runtime.manifest", "os.open"): "fsync() opens folders, too, and reads nothing",
    ("common.terminal", "os.open"): "/dev/null",
    ("common.terminal", "open"): "/dev/null",
    ("runtime.signals", "open"): "the descriptor of a pipe that signals write to",
}


def reads_of_any_file(modules: dict[str, ast.Module]) -> list[tuple[str, str, int]]:
    """Return (module, call, line) of what reads or appends to a path and is not in common/files.py.

    It would wait forever for a FIFO, and read /dev/zero without an end. An opener of a library may stay if its function
    calls check_regular() or open_regular().
    """
    found = []
    for module, tree in modules.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
        checked = [f for f in functions if {"check_regular", "open_regular"} & set(map(called_name, ast.walk(f)))]
        in_checked = {id(node) for function in checked for node in ast.walk(function)}
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            last, name = called_name(node), dotted(node.func) if isinstance(node, ast.Call) else dotted(node)
            if last in ("read_bytes", "read_text"):
                is_found = isinstance(node.func, ast.Attribute)
            elif last == "open" and name not in OPENERS:
                is_found = reads_or_appends(node)
            elif last:
                is_found = bool({name, last} & OPENERS) and id(node) not in in_checked
            else:  # under another name
                is_found = name in ("open", "gzip.open") and id(node) not in called
            if is_found:
                found.append((module, name if {name, last} & OPENERS else last or name, node.lineno))
    return found


def called_name(node: ast.AST) -> str:
    """Return "c" for the call a.b.c(...) or c(...), and "" for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else dotted(node.func)


def reads_or_appends(call: ast.Call) -> bool:
    """Return whether a call of open() or Path.open() may read or append. The null device may be opened in any mode."""
    if any(ast.unparse(argument) == "os.devnull" for argument in call.args):
        return False
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [value.value for value in values if isinstance(value, ast.Constant)]
    modes = [mode for mode in modes if re.fullmatch("[rwaxbt+]{1,3}", str(mode))]
    return not modes or not {"r", "a", "+"}.isdisjoint(modes[0])


def test_every_file_is_opened_as_a_regular_file():
    """Through common/files.py; whatever lies in its place, the program does not hang."""
    package = {path.stem: ast.parse(path.read_text()) for path in ROOT.glob("hotswap/*.py")}
    package["hotswap"] = package.pop("__init__")
    found = reads_of_any_file(MODULES | package)
    assert [place for place in found if place[:2] not in OTHER_READS] == []
    assert OTHER_READS.keys() == {place[:2] for place in found} & OTHER_READS.keys()


@pytest.mark.parametrize(
    "call",
    [
        "open(p)",
        "open(p, 'a')",
        "p.open()",
        "p.open('r+b')",
        "p.open(mode)",
        "(p / 'x').read_text(encoding='utf-8')",
        "p.read_bytes()",
        "np.memmap(p)",
        "torch.load(p)",
        "load_file(p)",
        "OmegaConf.load(p)",
        "pq.ParquetFile(p)",
        "f = gzip.open if x else y",
        "f = open",
        "os.open(p, os.O_RDONLY)",
    ],
)
def test_the_check_finds_a_read_of_any_file(call):
    assert len(reads_of_any_file(parse_repo(lab=call))) == 1
    assert len(reads_of_any_file(parse_repo(lab=f"def f(p):\n    def g():\n        {call}"))) == 1


def test_the_check_passes_reads_of_regular_files():
    text = "read_bytes(p)\nread_text(p)\nopen_regular(p)\nopen(p, 'wb')\np.open('x')\nopen(os.devnull, mode)"
    checked = (
        "def f():\n    check_regular(p)\n    return torch.load(p)\ndef g():\n    with open_regular(p) as f: np.load(f)"
    )
    assert reads_of_any_file(parse_repo(lab=f"{text}\n{checked}\njson.load(f)")) == []


def test_every_file_in_git_is_text():
    """A core dump of 8 MB was committed once."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.split(b"\0")
    binary = [name for name in names if name and b"\0" in (ROOT / os.fsdecode(name)).read_bytes()[:4096]]
    assert [name for name in binary if not name.endswith((b".png", b".gz"))] == []
