"""Run the rungs of course/: `python -m scripts.course`, or `make course`.

Each rung runs in a process of its own. On a GPU the last lines are a table of times, beside PyTorch, torch.compile and
the floor of this GPU.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.terminal import outlive_output
from lab.bench.op import as_list
from lab.bench.rung import COURSE, rungs
from lab.commands import command
from lab.proof import Wrong
from lab.report.course import shares
from lab.rows import write_rows
from runtime.config import check
from runtime.folders import make_folder


@dataclass
class Config:
    rung: Any
    solutions: str | None
    keep: bool
    out_dir: str | None

    def __post_init__(self):
        self.rung = as_list(self.rung) or [path.stem for path in rungs()]
        for name in self.rung:
            check((COURSE / f"{name}.py").is_file(), f"rung={name}: choose {', '.join(path.stem for path in rungs())}")
        check(
            self.solutions is None or Path(self.solutions).is_dir(),
            f"solutions={self.solutions}: no such folder; it has a file for each rung, such as 01_vector_add.py",
        )
        found = not self.solutions or any(Path(self.solutions, f"{name}.py").is_file() for name in self.rung)
        check(found, f"solutions={self.solutions}: this folder has no {self.rung[0]}.py, or any other rung's file")
        check(not (self.keep and self.solutions), "keep=true is for the rungs: leave out solutions=FOLDER")


@command(Config, "course")
def main(cfg: Config) -> None:
    outlive_output()
    folder, measured, files, failed = make_folder(cfg.out_dir, "course"), [], [], []
    for name in cfg.rung:
        words = [str(COURSE / f"{name}.py")]
        if cfg.solutions:
            solution = Path(cfg.solutions, f"{name}.py")
            if not solution.is_file():
                print(f"\n{name}: no solution in {cfg.solutions}")
                continue
            words.append(str(solution))
        print(f"\n{name}", flush=True)
        process = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True, encoding="utf-8")
        *output, last = process.stdout.splitlines() or [""]
        has_rows = last.startswith("{")
        print("\n".join(output if has_rows else [*output, last]), flush=True)
        if process.returncode:
            failed.append(name)
        elif (line := json.loads(last))["rows"]:
            measured.append(line)
            files = write_rows([line], "course.jsonl", folder, cfg.keep)
    if measured:
        if not cfg.solutions and (text := shares(measured)):
            print(f"\n{text}")
        print(f"\ndone     {', '.join(map(str, files))}")
    if failed:
        raise Wrong(f"wrong or failed: {', '.join(failed)}; the lines above say why")


if __name__ == "__main__":
    main()
