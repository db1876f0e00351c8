"""A Llama and a Qwen3 with their own tokenizers, through the commands: train, generate, evaluate, export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train
from data.tokenizer_json import TokenizerJson
from scripts import evaluate, export
from scripts import generate as generate_command
from tests.data.test_tokenizer_json import write_tokenizer
from tests.model.test_llama import theirs
from tests.model.test_today import CONFIGS

TRAIN = "+experiment=smoke", "data=text", "data.path=book.txt", "data.cache=tokens", "train.max_steps=2"
TRAIN += "train.block_size=32", "train.batch_size=2", "train.tokens_per_step=64", "train.eval_every=0"
GENERATE = "device=cpu", "precision=fp32", "temperature=0", "max_new_tokens=16"


@pytest.fixture
def run(called, monkeypatch, tmp_path):
    """run(main, "key=value") -> (exit code, stdout, stderr), in an empty folder with a text."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("".join(f"line {i} of the book\n" for i in range(400)))
    return lambda main, *arguments: called(f"{main.__module__.split('.')[-1]}.py", main, *arguments)


def write_model(folder, name):
    """transformers' model with a tokenizer of its own."""
    config = replace(CONFIGS[name], vocab_size=448, block_size=64)
    model = theirs(config)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.save_pretrained(folder)
    bos = {} if config.qk_norm else {"bos_token": "<|begin|>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", **bos}
    write_tokenizer(Path(folder), "qwen3" if config.qk_norm else "llama3", settings)
    return model


@pytest.mark.parametrize("name", ["llama_untied", "qwen3"])
def test_a_model_and_its_tokenizer_go_through_the_commands(run, name):
    """The run needs no other folder afterwards, and transformers continues a prompt as our export does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = write_model("theirs", name)
    code, _, err = run(
        generate_command.main, "checkpoint=theirs", "prompt='line <|im_end|>'", *GENERATE, "out_dir=text"
    )
    assert (code, err) == (0, "")
    tokenizer = AutoTokenizer.from_pretrained("theirs")
    prompt = tokenizer("line <|im_end|>", return_tensors="pt").input_ids
    ours = TokenizerJson(Path("theirs"))
    options = {"suppress_tokens": list(range(ours.n_vocab, 448)), "pad_token_id": 0}  # ids without a text
    ids = reference.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=0, **options)
    new = ids[0, prompt.shape[1] :].tolist()
    row = json.loads(Path("text/samples.jsonl").read_text().splitlines()[0])
    assert row["text"] == ours.decode(new)

    assert run(train.main, *TRAIN, "init_from=theirs", "out_dir=mine")[0] == 1  # with the tokenizer bytes
    arguments = *TRAIN, "init_from=theirs", "data.tokenizer=theirs", "out_dir=mine", "device=cpu"
    assert run(train.main, *arguments)[::2] == (0, "")
    Path("theirs").rename("gone")
    for main, *words in (
        (generate_command.main, "prompt=line", *GENERATE, "out_dir=text2"),
        (evaluate.main, "device=cpu", "out_dir=score"),
        (export.main, "path=exported"),
    ):
        code, _, err = run(main, "checkpoint=mine", *words)
        assert (code, err) == (0, ""), main
    model = AutoModelForCausalLM.from_pretrained("exported").eval()
    tokenizer = AutoTokenizer.from_pretrained("exported")
    assert (model.config.bos_token_id, model.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None if name == "qwen3" else 2, 0)
    prompt = tokenizer("line", return_tensors="pt").input_ids
    with torch.no_grad():
        ids = model.generate(prompt, max_new_tokens=16, do_sample=False, **options)
    text = json.loads(Path("text2/samples.jsonl").read_text().splitlines()[0])["text"]
    assert text == TokenizerJson(Path("exported")).decode(ids[0, prompt.shape[1] :].tolist())

    # a refused resume leaves the copy as it is
    write_tokenizer(Path("other"), "qwen3", settings={"eos_token": "<|begin|>"})
    before = TokenizerJson(Path("mine")).files
    asked = [word for word in arguments if not word.startswith("data.tokenizer")]
    code, _, err = run(train.main, *asked, "data.tokenizer=other", "train.max_steps=3", "train.resume=auto")
    assert (code, err.count("\n")) == (1, 1)
    assert "is of another run: data.tokenizer=" in err
    assert {name: Path("mine", name).read_bytes() for name in before} == before

    # a resumed run finds its tokenizer in its own folder
    code, _, err = run(train.main, *arguments, "train.max_steps=3", "train.resume=auto")
    assert (code, err.count("\n")) == (1, 1)
    code, _, err = run(train.main, *asked, "data.tokenizer=mine", "train.max_steps=3", "train.resume=auto")
    assert (code, err) == (0, "")


def test_mistakes_are_one_line(run):
    write_model("theirs", "llama")
    code, _, err = run(train.main, *TRAIN, "init_from=theirs")
    assert (code, err) == (
        1,
        "error: init_from=theirs has the vocabulary of the tokenizer theirs, and data.tokenizer is bytes: pass "
        "data.tokenizer=theirs\n",
    )
    assert run(train.main, *TRAIN, "init_from=theirs", "data.tokenizer=theirs", "out_dir=mine")[0] == 0
    Path("mine/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    code, _, err = run(generate_command.main, "checkpoint=mine", "prompt=a", *GENERATE)
    assert (code, err.count("\n")) == (1, 1)
    assert "trained with another tokenizer than that of mine: its file has changed since" in err
    Path("mine/tokenizer.json").unlink()
    Path("theirs").rename("elsewhere")
    code, _, err = run(generate_command.main, "checkpoint=mine", "prompt=a", *GENERATE)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: tokenizer=theirs: choose bytes or gpt2, or name a folder with tokenizer.json")
    assert run(generate_command.main, "checkpoint=mine", "prompt=a", *GENERATE, "tokenizer=elsewhere")[0] == 0
    code, _, err = run(export.main, "checkpoint=mine", "path=exported")
    assert (code, err.count("\n")) == (0, 1)
    assert "warning: the export has no tokenizer: " in err
    assert not Path("exported/tokenizer.json").exists()
