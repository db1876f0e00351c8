"""Write a model for other programs: `python -m scripts.export checkpoint=out/RUN format=hf path=FOLDER`.

model/export.py defines the formats.
"""

from dataclasses import dataclass

from common.terminal import printable
from data.errors import DataError
from lab.commands import command
from model.export import FILES, check_exportable, check_free, export, tokenizer_of_export
from model.pretrained import read_pretrained, read_shape
from model.sources import local_path
from runtime.config import check


@dataclass
class Config:
    checkpoint: str | None
    format: str
    path: str | None

    def __post_init__(self):
        missing = "checkpoint is missing: pass a run (out/RUN), a checkpoint, gpt2, a folder, or a ckpt.pt"
        check(bool(self.checkpoint), missing)
        check(self.format in FILES, f"format={self.format}: choose {' or '.join(FILES)}")
        check(bool(self.path), "path is missing: pass the folder to write to")


@command(Config, "export", errors=(DataError,))
def main(cfg: Config) -> None:
    folder = local_path(cfg.path)
    check_free(folder, FILES[cfg.format])  # before the source, whose reading may take a download
    shape = read_shape(cfg.checkpoint)
    check_exportable(shape, cfg.format)
    tokenizer = tokenizer_of_export(shape, cfg.format)
    check_free(folder, (*FILES[cfg.format], *tokenizer.files))
    source = read_pretrained(cfg.checkpoint)
    files = export(source, cfg.format, folder, tokenizer)
    millions = sum(weight.numel() for weight in source.weights.values()) / 1e6
    print(printable(f"{source.name}: {millions:.1f}M parameters in fp32 -> {', '.join(map(str, files))}"))


if __name__ == "__main__":
    main()
