"""`python -m scripts.generate`: its text compared with forwards without a cache, its row, its prompts, and mistakes."""

import io
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.tokenizer import Bytes
from kernels import speeds
from kernels.decode import blocks
from kernels.names import GENERATION_OPS
from kernels.registry import KernelsConfig, backend, contract
from lab.bench.new_backends import WrongKernel
from lab.report.tables import generation
from model import cost
from model.config import GPTConfig
from model.executed import call_shapes
from scripts import collect
from scripts import generate as script
from tests.model.test_generate import DECODING, greedy, varied_gpt
from tests.model.test_gpt import SMALL

CONFIG = replace(SMALL, vocab_size=264, block_size=80)
ARGUMENTS = "checkpoint=ckpt.pt", "device=cpu", "precision=fp32"
WAY = "forward/ms", "forward/ms/p20", "forward/ms/p80"
RANDOM = "checkpoint=random", "model=tiny", "model.n_layer=1", "model.n_embd=16", "model.n_head=2"


def save_model(folder, spread=1.0, nan_position=None, name="ckpt.pt", **other):
    """Write a model in nanoGPT's format, which needs no transformers. `other` are fields of its GPTConfig.

    The embeddings of the positions from `nan_position` on are NaN.
    """
    config = replace(CONFIG, **other)
    model = varied_gpt(config, spread=spread)
    if nan_position is not None:
        with torch.no_grad():
            model.wpe.weight[nan_position:] = torch.nan
    state = {f"transformer.{name}": weight for name, weight in model.state_dict().items()}
    sizes = {key: getattr(config, key) for key in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "bias")}
    contents = {"model": {**state, "lm_head.weight": model.wte.weight}, "model_args": sizes}
    torch.save(contents, folder / name)


@pytest.fixture
def command(called, monkeypatch, tmp_path):
    """Run the command in this process: command("prompt=a") -> (exit code, stdout, stderr).

    The current folder has a model in `ckpt.pt`. A constant replaces the measured bandwidth, which would take 0.3 s.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "measured_bandwidth", lambda device: 1e10)
    save_model(tmp_path)
    return lambda *arguments: called("generate.py", script.main_with_exact_prompt, *ARGUMENTS, *arguments)


def row(folder="run"):
    return json.loads(Path(folder, "result.json").read_text())


def samples(folder="run"):
    """Return the lines of samples.jsonl."""
    return [json.loads(line) for line in Path(folder, "samples.jsonl").read_text().splitlines()]


def greedy_text(prompt, new_tokens):
    """Return the prompt and its text by full forwards. The text has more than 20 different ids and no end of text."""
    ids = torch.tensor([list(prompt.encode())])
    start, model = ids.shape[1], varied_gpt(CONFIG, spread=1.0)
    for _ in range(new_tokens):  # the ids from 257 on are padding of the vocabulary
        ids = torch.cat((ids, model(ids)[:, -1, :257].argmax(-1, keepdim=True)), dim=1)
    ids = ids[0].tolist()
    assert len(set(ids[start:])) > 20
    assert 256 not in ids
    return Bytes().decode(ids)


@pytest.mark.parametrize("attn", ["sdpa", *(pytest.param(attn, marks=pytest.mark.exhaustive) for attn in ["eager"])])
def test_greedy_text_equals_that_of_forwards_without_a_cache(command, attn):
    """The row has the figures of the generation."""
    code, out, err = command("prompt=Hello (world", "max_new_tokens=40", "temperature=0", f"attn={attn}", "out_dir=run")
    assert (code, err) == (0, "")
    text = greedy_text("Hello (world", 40)
    assert f"\n\n{text}\n\ndecode   " in out
    assert Path("run/sample.txt").read_text() == text + "\n"
    assert samples() == [{"prompt": "Hello (world", "text": text.removeprefix("Hello (world"), "tokens": 40}]

    result = row()
    assert result["status"] == "ok"
    assert result["config"]["prompt"] == "Hello (world"
    assert result["kernels"]["attention"].startswith(attn)
    assert set(result["kernels"]) == {"norm", "linear", "attention", "mlp", "decode", "compile"}
    assert (result["gen/prompt_tokens"], result["gen/tokens"], result["gen/sequences"]) == (12, 40, 1)
    assert result["gen/prefill_tokens_per_sec"] == pytest.approx(12 / (1e-3 * result["gen/ttft_ms"]))
    assert len(result["gen/laps_s"]) == 2  # 39 steps have two groups of 16
    assert 0 < result["gen/token_ms/p50"] <= result["gen/token_ms/p95"] <= result["gen/token_ms/p99"]
    least = cost.decode_bytes(CONFIG, 1, 12 + 20, torch.float32)
    share = least / (1e-3 * result["gen/step_ms"]) / result["measured_bandwidth"]
    assert result["gen/bandwidth_utilisation"] == pytest.approx(share)
    assert result["mem/kv_cache_gib"] * 2**30 == cost.kv_cache_bytes(CONFIG, 1, 64, torch.float32)  # for 52 tokens
    assert result["mem/weights_gib"] * 2**30 == 4 * cost.parameters(CONFIG)
    *laps, last = map(json.loads, Path("run/metrics.jsonl").read_text().splitlines())
    assert [1 / lap["gen/lap_tokens_per_sec"] for lap in laps] == pytest.approx(result["gen/laps_s"])
    assert last["gen/ttft_ms"] == result["gen/ttft_ms"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("attn", [choice for choice in DECODING if choice not in ("sdpa", "eager")])
def test_every_attention_gives_the_same_text(command, attn):
    for choice in ("eager", attn):
        assert command("prompt=ab", "max_new_tokens=12", "temperature=0", f"attn={choice}", f"out_dir={choice}")[0] == 0
    assert samples(attn) == samples("eager")


def test_samples_are_equal_only_when_the_seed_is_equal(command):
    """Sample b has the draws of seed + b. Several samples are printed with numbers."""
    arguments = "prompt=a", "batch=3", "max_new_tokens=20", "top_p=0.9"
    outs = [command(*arguments, f"seed={seed}", f"out_dir=run{i}")[1] for i, seed in enumerate((1, 1, 2))]
    texts = [[sample["text"] for sample in samples(f"run{i}")] for i in range(3)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][1:] == texts[2][:2]
    assert [out.count("\n--- ") for out in outs] == [3, 3, 3]
    assert Path("run0/sample.txt").read_text().startswith(f"--- 1\na{texts[0][0]}\n--- 2\na{texts[0][1]}\n--- 3\n")


LINES = ["def main(", "x", "日本 🙂", "a much longer prompt, of 40 bytes in all"]


@pytest.mark.parametrize(
    "sampling", [["temperature=0"], ["temperature=0.9", "top_k=40", "top_p=0.95"]], ids=["greedy", "sampled"]
)
def test_each_prompt_of_a_file_gives_the_text_that_it_gives_alone(command, sampling):
    """Row b has the draws of seed + b."""
    Path("lines.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    assert command("prompts=lines.txt", "max_new_tokens=24", *sampling, "seed=5", "out_dir=run")[::2] == (0, "")
    for b, (line, sample) in enumerate(zip(LINES, samples(), strict=True)):
        arguments = f"prompt={line}", "max_new_tokens=24", *sampling, f"seed={5 + b}", f"out_dir=alone{b}"
        assert command(*arguments)[::2] == (0, "")
        assert samples(f"alone{b}") == [sample]
        assert sample["prompt"] == line
    assert row()["gen/sequences"] == len(LINES)
    assert len({sample["text"] for sample in samples()}) == len(LINES)


def test_prompts_come_from_stdin_and_each_has_several_samples(command, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a\\nb"}\n{"prompt": ""}\n')))
    assert command("prompts=-", "batch=2", "max_new_tokens=3", "out_dir=run")[::2] == (0, "")
    assert [sample["prompt"] for sample in samples()] == ["a\nb", "a\nb", "", ""]
    assert row()["config"]["prompts"] == "-"
    assert " prompt=" not in row()["command"]


def test_a_document_begins_when_the_prompt_is_empty_and_ends_at_a_stop(command):
    """The command of the row has prompt=, because without it a terminal starts a conversation."""
    model = varied_gpt(CONFIG, spread=1.0)
    ids = greedy(model, torch.tensor([[256]]), 6)[0, 1:].tolist()
    stop = next(i for i in range(1, 6) if ids[i] not in ids[:i])
    assert command("temperature=0", "max_new_tokens=30", f"stop=[{ids[stop]}]", "out_dir=run")[0] == 0
    assert row()["gen/tokens"] == stop + 1
    assert samples() == [{"prompt": "", "text": Bytes().decode(ids[:stop]), "tokens": stop + 1}]
    assert row()["command"].endswith(" prompt=")


@pytest.mark.parametrize("prompt", ['"Hello" she said "bye"', "it's ${x} (\n", ""])
def test_the_text_is_the_same_when_the_command_of_the_row_runs(command, prompt):
    words = [f"prompt={prompt}"] if prompt else []
    code, _, err = command(*words, "max_new_tokens=2", "stop=['(',b]", "out_dir=run")
    assert (code, err) == (0, "")
    _, _, *arguments = shlex.split(row()["command"])
    words = [word for word in arguments if word not in (*ARGUMENTS, "out_dir=run")]
    assert command(*words, "out_dir=repeated")[0] == 0
    assert row("repeated")["config"]["prompt"] == row()["config"]["prompt"] == prompt
    assert row("repeated")["config"]["stop"] == ["(", "b"]
    assert samples("repeated") == samples()


@pytest.mark.parametrize(("prompt", "new_tokens"), [("a" * 9, 71), ("", 79), ("a" * 79, 1)])
def test_new_tokens_fill_the_positions_when_no_number_is_given(command, prompt, new_tokens):
    """The model has 80 positions. An empty prompt takes one of them, for the end of text."""
    code, _, err = command(f"prompt={prompt}", "temperature=0", "tokenizer=bytes", "out_dir=run")
    assert (code, err) == (0, "")
    assert row()["config"]["max_new_tokens"] == new_tokens


@pytest.mark.parametrize("sampling", [["temperature=0"], ["temperature=0.9", "top_k=0"]], ids=["greedy", "sampled"])
def test_a_draft_does_not_change_the_texts(command, sampling):
    """The prompts differ in length, so one sequence is complete before the other."""
    Path("lines.txt").write_text("ababababab\nxyz\n")
    arguments = "prompts=lines.txt", "max_new_tokens=40", *sampling
    assert command(*arguments, "out_dir=plain")[0] == 0
    assert command(*arguments, "generate.speculate=ngram", "out_dir=drafted")[0] == 0
    assert samples("drafted") == samples("plain")


def test_a_draft_with_a_weight_that_is_nan_is_refused(command, tmp_path):
    """Its text would be right, and slow."""
    save_model(tmp_path, name="small.pt", nan_position=60, n_layer=1)
    code, _, err = command("prompt=a", "max_new_tokens=4", "generate.speculate=small.pt")
    assert (code, err) == (1, "error: generate.speculate=small.pt has a NaN or inf in a weight: choose another draft\n")


@pytest.mark.parametrize("source", ["ngram", "small.pt"])
@pytest.mark.parametrize("sampling", [["temperature=0"], ["temperature=0.9", "seed=3"]], ids=["greedy", "sampled"])
def test_the_row_of_a_draft_has_its_gain_and_counts_both_models(command, monkeypatch, tmp_path, source, sampling):
    """A step reads the weights of the model once, and those of a draft model for each of the draft's four tokens.

    On a CPU in fp32 the text is the same. The draft model has fewer positions and fewer padded ids.
    """
    monkeypatch.setattr("lab.generation.measure.copied_bytes", lambda packed, model: 2**30)  # as int8 packs its weights
    save_model(tmp_path, name="small.pt", n_layer=1, block_size=70, vocab_size=260)
    words = "prompts=lines.txt", "max_new_tokens=40", "stop=[]", *sampling
    Path("lines.txt").write_text("ababababab\nxyz\n")
    assert command(*words, "out_dir=plain")[0] == 0
    code, out, err = command(*words, "proof=true", f"generate.speculate={source}", "out_dir=run")
    assert (code, err) == (0, "")
    assert samples("run") == samples("plain")
    result, plain = row(), row("plain")
    assert result["gen/same_tokens"] == 1
    assert f"drafts   {result['gen/speedup']:.2f}x the " in out
    assert 1 <= result["gen/accepted_tokens"] <= 5
    assert result["mem/packed_gib"] == (1 if source == "ngram" else 2)
    for part in ("weights", "kv_cache"):
        assert result["memory"]["predicted"][part] == pytest.approx(result[f"mem/{part}_gib"])
    if sampling[0] != "temperature=0":  # a text may stop, and then the two runs have other steps
        return
    assert result["gen/tokens"] == plain["gen/tokens"] == 40
    least = [each["gen/bandwidth_utilisation"] * each["gen/step_ms"] * 1e7 for each in (result, plain)]
    measured = [each["mem/weights_gib"] * 2**30 for each in (result, plain)]
    if source == "ngram":
        assert (least[0], measured[0]) == pytest.approx((least[1], measured[1]))
        return
    config = replace(CONFIG, n_layer=1, block_size=70, vocab_size=260)
    cache = cost.kv_cache_bytes(config, 1, 13 + 2 * 20, torch.float32)
    assert measured[0] == pytest.approx(measured[1] + 4 * cost.parameters(config))
    assert least[0] == pytest.approx(least[1] + 4 * (cost.decode_bytes(config, 0, 0, torch.float32) + cache))
    assert result["draft"] == {"source": "small.pt", "parameters": cost.parameters(config)}
    assert "drafts by small.pt: 0.0M" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate.speculate=ngrma"],
            "generate.speculate=ngrma: choose ngram, the checkpoint of a smaller model, or ",
        ),
        (["generate.speculate=small.pt", "max_new_tokens=40"], "more than the 20 positions of small.pt: pass max_new"),
        (["generate.speculate=small.pt", "proof=true", "prompt=12345678901234567890"], "but small.pt has 20 positions"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_one_line(command, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save_model(tmp_path, name="small.pt", n_layer=1, block_size=20)
    code, _, err = command("prompt=ab", *arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert message in err


def test_a_draft_model_with_another_tokenizer_is_refused(command, monkeypatch, tmp_path):
    """The key `tokenizer` is the model's: it does not make the draft model's tokenizer the same."""
    other = Bytes()
    other.name = "other"
    save_model(tmp_path, name="other.pt", n_layer=1)
    monkeypatch.setattr(
        "model.pretrained.tokenizer_of",
        lambda source, asked: other if source.name == "other.pt" and asked is None else Bytes(),
    )
    code, _, err = command("prompt=ab", "generate.speculate=other.pt", "tokenizer=bytes")
    assert (code, err) == (
        1,
        "error: generate.speculate=other.pt has the tokenizer other, and the model bytes: choose a model with the same "
        "tokenizer\n",
    )


def test_prompt_and_answer_fit_into_the_positions_of_the_draft_model(command, tmp_path):
    """By default, a text fills the positions."""
    save_model(tmp_path, name="small.pt", n_layer=1, block_size=20)
    assert command("prompt=ab", "temperature=0", "generate.speculate=small.pt", "out_dir=run")[::2] == (0, "")
    assert row()["config"]["max_new_tokens"] == 18


def test_a_conversation_fits_into_the_positions_of_the_draft_model(command, monkeypatch, tmp_path):
    save_model(tmp_path, name="small.pt", n_layer=1, block_size=20)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    answers = iter(["ab"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers, None) or exec("raise EOFError"))
    code, out, err = command("temperature=0", "generate.speculate=small.pt")
    assert (code, err) == (0, "")
    assert "for prompt and answer of up to 20 tokens" in out


def test_an_fp8_cache_takes_a_quarter_of_fp32(command):
    sizes = []
    for kv in ("auto", "fp8"):
        assert command("prompt=abc", "max_new_tokens=8", f"generate.kv={kv}", f"out_dir={kv}")[::2] == (0, "")
        sizes.append(row(kv)["mem/kv_cache_gib"])
    assert sizes[0] == 4 * sizes[1]


@pytest.mark.parametrize("options", [[], ["generate.speculate=ngram"], ["generate.kv=fp8"]], ids=str)
def test_a_proof_compares_with_full_forwards_before_the_speed_is_printed(command, options):
    code, out, err = command("prompt=ab", "max_new_tokens=8", "proof=true", *options, "out_dir=run")
    assert (code, err) == (0, "")
    assert out.index("\nproof    78 of 78 greedy tokens match a full forward") < out.index("\ndecode   ")
    result = row()
    assert result["proof"]["ok"] is (None if "generate.kv=fp8" in options else True)
    assert result["proof"]["tokens"] == 78
    assert result["receipt"]["families"]
    assert set(result["receipt"]["lines"].values()) == {0}  # PyTorch's kernels
    assert result["memory"]["predicted"]["kv_cache"] * 2**30 == pytest.approx(result["mem/kv_cache_gib"] * 2**30)
    assert result["memory"]["measured"] is None  # on a CPU


def test_the_row_of_a_decoder_that_cannot_run_here_can_be_collected(command, monkeypatch, tmp_path):
    monkeypatch.setattr("lab.rows.RESULTS", tmp_path / "results")
    Path("run").mkdir()  # as a sweep does
    code, _, err = command("prompt=ab", "max_new_tokens=8", "kernels.decode=flashinfer", "out_dir=run")
    assert (code, err.count("\n")) == (1, 1)
    assert row()["status"].startswith("unavailable: decode=flashinfer cannot run here: ")
    assert collect.why_skipped(row()) is None
    path = collect.collect(Path("run"), row(), curves=False)
    cells = [cell.strip() for cell in generation(path.parent.name).splitlines()[-1].split("|")]
    assert {"flashinfer", row()["status"]} <= {*cells}


def test_a_new_kernel_is_checked_before_the_generation(command, monkeypatch):
    def refuse(kernels, attn, device, ops):
        assert (kernels.rms_norm, attn.impl, ops) == ("eager", "math", GENERATION_OPS)  # GPT-2 does not call rms_norm
        raise WrongKernel("mine.py is wrong")

    monkeypatch.setattr(script, "check_new_backends", refuse)
    Path("run").mkdir()
    code, out, err = command("prompt=a", "attn=math", "kernels.rms_norm=triton", "out_dir=run")
    warning, error = err.splitlines()
    assert (code, out, error) == (1, "", "error: mine.py is wrong")
    assert warning.startswith("warning: kernels.rms_norm=triton has no effect, ")
    assert row()["status"] == "wrong: mine.py is wrong"


def test_an_attention_that_reads_no_cache_is_refused_before_a_model_is_built(command, monkeypatch):
    """attn=gluon takes no `lengths`, so the model's blocks cannot decode with it. The line names what can."""
    monkeypatch.setattr(backend("attention", "gluon"), "unavailable", lambda device: None)
    monkeypatch.setattr("model.step.GPT", None)
    code, _, err = command("prompt=a", "attn=gluon", "kernels.check=false")
    what = "attention=gluon cannot run this: kernels.attention.gluon takes no lengths (kernels/attention/__init__.py)"
    assert code == 1
    assert re.fullmatch(rf"error: {re.escape(what)}: choose attn=.*\btriton\b.*\n", err)


def test_a_wrong_decoder_has_no_speed(command, monkeypatch):
    """A decoder whose logits are shifted by one id has the status `wrong`."""
    monkeypatch.setattr(blocks, "decode", lambda packed, tokens, cache: packed(tokens, cache).roll(1, -1))
    code, out, err = command("prompt=ab", "max_new_tokens=20", "proof=true", "out_dir=run")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: ")
    assert "greedy tokens are not the most likely ones of a full forward" in err
    assert row()["status"].startswith("wrong: ")
    assert row()["proof"]["ok"] is False
    assert "tok/s" not in out


def test_a_backend_that_is_slower_in_a_decoding_step_is_named(command, tables):
    """The times of a training step do not count."""
    config = GPTConfig(1, 2, 16, 128, 320, "learned", True, 0.0)
    for keys, ms in ((128, 7.29), (None, 9.0)):
        arguments = call_shapes(config, KernelsConfig(), "fp32", (1, 128), keys)["attention"]
        inputs = contract("attention").inputs(**arguments, dtype=torch.float32)
        times = {"eager": 3.42, "sdpa": ms}
        rows = [{"impl": impl, **dict.fromkeys(WAY, value)} for impl, value in times.items()]
        speeds.store_speeds("attention", inputs, rows, torch.device("cpu"))
    arguments = *RANDOM, "prompt_tokens=100", "max_new_tokens=20", "attn=sdpa", "out_dir=run"
    code, out, err = command(*arguments)
    assert (code, err) == (0, "")
    kernels = re.search("^kernels  (.*)$", out, re.MULTILINE)[1].split(" | ")
    [slower] = [text for text in kernels if "slower" in text]
    assert slower.startswith("attention sdpa (")
    assert re.search(r"\), slower than eager here: 7\.29 ms beside 3\.42( at rows=1 Tq=1 Tk=128)?$", slower)
    assert row()["slower"]["attention"]["ms"] == 7.29


def test_random_weights_of_a_shape(command):
    """Random weights may draw the end of text anywhere, so only a stop of the user ends their text."""
    arguments = *RANDOM, "prompt_tokens=100", "max_new_tokens=20", "top_k=0", "temperature=100"
    assert command(*arguments, "out_dir=run")[::2] == (0, "")
    result = row()
    assert (result["source"], result["gen/prompt_tokens"], result["gen/tokens"]) == ("random weights", 100, 20)
    assert result["config"]["model"]["n_embd"] == 16
    assert samples()[0]["prompt"] == "(100 random tokens)"
    every_id = f"stop=[{','.join(map(str, range(257)))}]"
    assert command(*arguments, every_id, "out_dir=stopped")[0] == 0
    assert samples("stopped")[0] == {"prompt": "(100 random tokens)", "text": "", "tokens": 1}


def test_random_weights_whose_ids_no_tokenizer_has(command):
    """The draws are from all ids. Only 257 of 8192 stand for a byte, so most of the 20 tokens have no text."""
    arguments = *RANDOM, "prompt_tokens=5", "max_new_tokens=20", "top_k=0", "temperature=100"
    assert command(*arguments, "model.vocab_size=8192", "out_dir=run")[::2] == (0, "")
    assert samples()[0]["tokens"] == 20
    assert len(samples()[0]["text"]) < 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=null"], "checkpoint is missing: pass a run"),
        (["checkpoint=nowhere/at/all"], "nowhere/at/all: there is no such file or folder"),
        (["max_new_tokens=0"], "max_new_tokens=0: it must be in [1, 2^31)"),
        (["prompt_tokens=0"], "prompt_tokens=0: it must be in [1, 2^31)"),
        (["prompt_tokens=2000000000"], "the prompt has 2000000000 tokens, but ckpt.pt has 80 positions: shorten it"),
        (["batch=0"], "batch=0: it must be in [1, 2^31)"),
        (["temperature=-1"], "temperature=-1.0: it must be 0"),
        (["temperature=nan"], "temperature=nan: it must be 0"),
        (["top_k=-1"], "top_k=-1: it must be at least 1, or 0 for no limit"),
        (["top_p=0"], "top_p=0.0: it must be in (0, 1]"),
        (["top_p=1.1"], "top_p=1.1: it must be in (0, 1]"),
        (["stop=[1.5]"], "stop=[1.5]: it must be a list of texts and token ids"),
        (["seed=-1"], "seed=-1: it must be in [0, 2^63)"),
        (["precision=fp16"], "precision=fp16: choose fp32, amp, bf16"),
        (["precision=fp8"], "precision=fp8 cannot generate: choose precision=bf16"),
        (["tokenizer=gpt3"], "tokenizer=gpt3: choose bytes or gpt2"),
        (["tokenizer=gpt2"], "tokenizer=gpt2 has 50257 ids, and ckpt.pt only 264: name the one it trained with"),
        (['checkpoint="~nobody-here/x"'], "~nobody-here/x: the home folder of this user is not known"),
        (["attn=none"], "attn=none: no such choice"),
        (["promts=a"], "unknown key promts; did you mean prompts?"),
        (["kernels.decode=mine"], "kernels.decode=mine: no file kernels/decode/mine.py; there are auto, blocks, "),
        (["generate.kv=int4"], "generate.kv=int4: choose auto, fp8"),
        (["model.n_layer=2"], "model.n_layer is for checkpoint=random; this model's shape is its checkpoint's"),
        (["model=gpt2_350m"], "is for checkpoint=random; this model's shape is its checkpoint's"),
        (["prompt=a", "prompts=b"], "prompt and prompts are given: choose one of them"),
        (["prompt=", "prompt_tokens=3"], "prompt and prompt_tokens are given: choose one of them"),
        (["prompt=a\udcff"], "the prompt is not UTF-8 text: character 2 is '\\udcff'"),
        ([f"prompt={'a' * 80}"], "the prompt has 80 tokens, but ckpt.pt has 80 positions: shorten it"),
        (["prompt=abc", "max_new_tokens=78"], "pass max_new_tokens=77 or a shorter prompt"),
        ([f"prompt={'a' * 79}", "proof=true"], "the prompt and a token for proof=true has 80 tokens"),
        (["prompts=missing.txt"], "prompts=missing.txt cannot be read: No such file or directory"),
        (["prompts=long.txt"], "line 3 of long.txt has 90 tokens, but ckpt.pt has 80 positions: shorten it"),
        (["prompts=fits.txt", "max_new_tokens=9"], "line 2 of fits.txt has 75 tokens, and with max_new_tokens=9"),
        (
            ["-m", "prompts=-", "attn=sdpa,eager"],
            "prompts=- cannot run in a sweep, because its jobs have no stdin",
        ),
    ],
)
def test_a_mistake_prints_one_line(command, arguments, message):
    Path("long.txt").write_text(f"a\n\n{'b' * 90}\n")
    Path("fits.txt").write_text(f"a\n{'b' * 75}\n")
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: ")
    assert message in err
    assert not Path("out").exists()


@pytest.mark.parametrize("options", [[], ["batch=2"], ["proof=true"], ["generate.speculate=ngram"]], ids=str)
def test_logits_that_are_not_finite_end_the_run_with_one_line(command, tmp_path, options):
    """The prompt has 2 tokens, and position 30 has NaN. The row is wrong, and no speed is printed."""
    save_model(tmp_path, nan_position=30)
    code, out, err = command("prompt=ab", "max_new_tokens=60", "temperature=0", "out_dir=run", *options)
    which = (
        "2[0-9]"
        if "generate.speculate=ngram" in options
        else "30 of sequence 1"
        if options[:1] == ["batch=2"]
        else "30"
    )
    assert (code, err.count("\n")) == (1, 1)
    assert re.match(f"error: the logits of new token {which} are not finite, because a weight or a result of a", err)
    assert "tok/s" not in out
    assert out.endswith("\n")
    assert re.match(f"wrong: the logits of new token {which} are not finite", row()["status"])
    assert "gen/decode_tokens_per_sec" not in row()


def test_a_conversation_ends_at_logits_that_are_not_finite(command, monkeypatch, tmp_path):
    save_model(tmp_path, nan_position=30)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda prompt: "ab")
    code, out, err = command("temperature=0")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("error: the logits of new token 30 are not finite, ")
    assert "tok/s" not in out
    assert out.endswith("\n")


@pytest.mark.parametrize("key", ["batch=2", "proof=true", "out_dir=x", "logger=wandb"])
def test_keys_of_a_run_need_a_prompt_on_a_terminal(command, monkeypatch, key):
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    code, out, err = command(key)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {key.partition('=')[0]} is for a run, but without a prompt a terminal starts a con")
