"""Write a new kernel's file: `python -m scripts.new_kernel op=attention name=mine`.

The file is the op's template, kernels/OP/_template.py: plain PyTorch that runs and is right, what the arguments mean,
and the place of the Triton kernel. The command then prints how to test it.
"""

from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path

from common.files import read_text
from common.terminal import override, printable, shell_command
from kernels.names import ALL_OPS, OPS, TRAINING_OPS, override_key, read_constant
from lab.commands import command
from runtime.config import UserError, check

ROOT = Path(__file__).resolve().parent.parent
NOT_FREE = "compile"  # means torch.compile, where the name of a backend is expected


@dataclass
class Config:
    op: str
    name: str
    path: str | None

    def __post_init__(self):
        check(self.op in ALL_OPS, f"op={self.op}: choose {', '.join(ALL_OPS)}")
        is_free = self.name.isidentifier() and not iskeyword(self.name) and self.name != NOT_FREE
        is_free = is_free and not self.name.startswith("_")
        check(is_free, f"name={self.name}: it must be a name in Python without _ at its start, and not {NOT_FREE}")
        check(self.template.exists(), f"op={self.op} has no template {self.template}: copy kernels/{self.op}/eager.py")

    @property
    def template(self) -> Path:
        return ROOT / "kernels" / self.op / "_template.py"


def write_file(file: Path, text: str) -> None:
    """Write a new file, with its folders. Raises UserError if it exists or cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as target:
            target.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists: choose another name, or edit it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}; choose another path") from None


def commands(op: str, name: str, path: str | None) -> dict[str, str]:
    """Return {command: what it does} for the new backend. With a path, it is not in the repo."""
    impl = path or name
    choice = override(override_key(op), impl)
    added = ["--backend", f"{op}={path}"] if path else []
    lines = {
        ("-m", "scripts.doctor", f"op={op}", override("impl", impl)): "does it run here, and is it right?",
        ("-m", "pytest", "tests/kernels", *added, "-k", name): "every test of a backend",
    }
    if op in TRAINING_OPS:
        bf16 = () if op in OPS else ("precision=bf16",)  # PyTorch updates fp32 weights: see kernels/adamw/__init__.py
        model = (f"model.{key}={value}" for key, value in read_constant(op, "MODEL", {}).items())
        lines["train.py", "+experiment=smoke", choice, *bf16, *model] = "train with it, on a CPU"
        bench = "-m", "scripts.bench_kernels", f"op={op}", override("impl", ["eager", impl])
        lines[bench] = "its time beside eager's and the floor, on a GPU"
    if op in ("attention", "decode"):
        random = "checkpoint=random", "model=tiny", "prompt_tokens=8"
        lines["-m", "scripts.generate", *random, choice] = "generate with it"
    return {shell_command("python", *words): purpose for words, purpose in lines.items()}


@command(Config, "new_kernel")
def main(cfg: Config) -> None:
    folder = Path(cfg.path) if cfg.path else cfg.template.parent
    file = folder / f"{cfg.name}.py"
    write_file(file, read_text(cfg.template))
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    print(printable(f"wrote    {shown}: plain PyTorch that runs as it is; the place of your kernel is marked in it"))
    for line, purpose in commands(cfg.op, cfg.name, str(file) if cfg.path else None).items():
        print(printable(f"\n# {purpose}\n{line}"))


if __name__ == "__main__":
    main()
