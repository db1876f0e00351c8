"""What a run in a worker answers to the judge, from the judge's end of the channel."""

import os
import pickle
import threading
from dataclasses import replace
from socket import socketpair

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kernels.registry import Unavailable
from kernels.sampling import Sampling
from lab import channel
from lab.channel import CHANNEL, FOLDER, Channel, is_worker, read_answer
from lab.proof import witness as witnesses
from lab.proof.generation import compared_rows, step_logits
from lab.proof.witness import Witness, flat_state, generation_logits
from lab.tampering import process_settings
from model.decoder import Decoder
from model.optim import OptimConfig, TorchAdamW
from tests.model.test_generate import varied_gpt
from tests.model.test_gpt import SMALL

OPTIM = OptimConfig(
    learning_rate=1e-3, min_lr=1e-4, warmup_steps=2, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=1.0
)


@pytest.fixture
def judge(monkeypatch, tmp_path):
    """The judge's end of the channel: judge(message) sends one, and judge() returns the next answer."""
    mine, theirs = socketpair()
    monkeypatch.setenv(CHANNEL, str(theirs.detach()))
    monkeypatch.setenv(FOLDER, str(tmp_path))

    def call(*message):
        if not message:
            return read_answer(mine, 20)
        return channel.send_message(mine, pickle.dumps(message), 20)

    with mine:
        yield call


class Batches:
    """In place of a Loader: notes its shifts."""

    def __init__(self):
        self.shifts = []

    def shift(self, *shift):
        self.shifts.append(shift)


def model_and_optimizer():
    model = varied_gpt(replace(SMALL, n_layer=1))
    return model, TorchAdamW(model, OPTIM)


def test_a_worker_takes_its_channel_out_of_the_environment(judge, tmp_path):
    """A process that the run starts is no worker."""
    assert is_worker()
    started = Channel()
    assert not is_worker()
    assert not {CHANNEL, FOLDER} & os.environ.keys()
    started.answer(ready=True)
    assert judge() == {"ready": True}
    judge("run", 3)
    assert started.receive() == ("run", 3)
    tensor = torch.arange(6.0).view(2, 3).t()
    started.write("file", {"a": tensor})
    assert torch.equal(load_file(tmp_path / "file")["a"], tensor)
    started.connection.close()


def test_a_run_sends_its_losses_after_each_window_and_its_state_if_asked(judge, tmp_path):
    """A step from a CUDA graph writes each loss to the same tensor."""
    (model, optimizer), batches = model_and_optimizer(), Batches()
    judge("run", 2, 10)
    witness, loss = Witness(optimizer, batches), torch.tensor(0.0)
    assert judge() == {"ready": True}
    witness.add_loss(loss.fill_(5.0))
    for message in (("state", "state-2"), ("state", "again"), ("run", 1, 20)):
        judge(*message)
    witness.add_loss(loss.fill_(4.0))
    weights = [weight.detach().numpy().view(np.int32) for weight in model.parameters()]
    weights = str(sum(int(weight.sum(dtype=np.int64)) for weight in weights))
    assert judge() == {"losses": [5.0, 4.0], "weights": weights, "allocated": None, "refused": 0}
    assert [judge(), judge()] == [{"written": True}] * 2
    state = load_file(tmp_path / "state-2")
    assert {name.partition("/")[0] for name in state} == {"model", "exp_avg", "exp_avg_sq"}
    for name, parameter in model.named_parameters():
        assert torch.equal(state[f"model/{name}"], parameter)
    optimizer.refused += 1
    judge("run", None)
    witness.add_loss(loss.fill_(3.0))
    assert judge() == {"losses": [3.0], "weights": weights, "allocated": None, "refused": 1}
    witness.add_loss(loss)  # a step after the last window has no number
    assert batches.shifts == [(1, 10), (3, 20)]
    witness.channel.connection.close()


@pytest.mark.parametrize("refuses", [False, True])
def test_a_finished_run_sends_its_figures_and_the_logits_of_a_generation(judge, monkeypatch, tmp_path, refuses):
    functions = {"time.time": None}  # not what time.time is
    monkeypatch.setattr(Witness, "functions", functions)
    monkeypatch.setattr(Witness, "settings", process_settings() | {"threads": 0})
    (model, optimizer), batches = model_and_optimizer(), Batches()
    judge("run", None)
    witness = Witness(optimizer, batches)
    judge()
    if refuses:
        monkeypatch.setattr(witnesses, "why_no_generation", lambda model: "it has no cache")
    idx, lengths, new = torch.randint(97, (4, 6)), torch.tensor([6, 3, 4, 5]), torch.randint(97, (4, 5))
    judge("logits", "logits", idx, lengths, new)
    judge("end")
    row = {"val/loss": 4.5, "mem/peak_rss_gib": 1.5, "perf/tokens_per_sec": 1e9, "kernels": {"norm": "eager"}}
    witness.testify(model, row)
    figures = {"mem/peak_rss_gib": 1.5, "kernels": {"norm": "eager"}}
    changed = {"replaced": ["time.time"], "changed": ["threads"]}
    assert judge() == {**changed, "val_loss": 4.5, "figures": figures}
    if refuses:
        assert judge() == {"unavailable": "it has no cache"}
        assert not (tmp_path / "logits").exists()
    else:
        assert judge() == {"written": True}
        assert load_file(tmp_path / "logits")["logits"].shape == (len(compared_rows(4)), 4, 97)
    witness.channel.connection.close()


def test_the_logits_are_those_of_the_steps_after_the_prompts():
    """The model is in training mode, as after a step, and stays in it."""
    model = varied_gpt(replace(SMALL, n_layer=1)).train()
    idx, lengths, new = torch.randint(97, (4, 6)), torch.tensor([6, 3, 4, 5]), torch.randint(97, (4, 5))
    logits = generation_logits(model, idx, lengths, new)
    assert model.training
    with torch.no_grad():
        decoder = Decoder(model.eval(), 4, 11, Sampling(97, temperature=0))
        assert torch.equal(logits, step_logits(decoder, idx, lengths, new))
        for row, length in enumerate(lengths):
            ids = torch.cat((idx[row, :length], new[row, :-1]))[None]
            torch.testing.assert_close(logits[row], model(ids)[0, length:].double(), atol=1e-4, rtol=1e-4)


def test_a_model_that_cannot_generate_says_why(monkeypatch):
    monkeypatch.setattr(witnesses, "why_no_generation", lambda model: "it has no cache")
    with pytest.raises(Unavailable, match=r"^it has no cache$"):
        generation_logits(varied_gpt(replace(SMALL, n_layer=1)), None, None, None)


def test_the_state_has_one_name_for_each_tensor():
    model, optimizer = model_and_optimizer()
    state = flat_state(optimizer)
    assert len(state) == 3 * len(list(model.parameters()))
    assert state["exp_avg/wte.weight"].shape == model.wte.weight.shape


def test_a_message_that_nobody_reads_is_an_error():
    """The socket's memory is full, and the worker does not read."""
    mine, theirs = socketpair()
    with mine, theirs, pytest.raises(TimeoutError):
        channel.send_message(mine, bytes(2**24), limit=0.1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[[[[[[[0]]]]]]]", [[[[[[[0]]]]]]]),
        ("-12", -12),
        ("9" * 400, int("9" * 18)),
        (r'["a\n\n# norm: right", {"b\t": "\u2028c"}]', ["a # norm: right", {"b": "c"}]),
    ],
)
def test_an_answer_has_strings_of_one_line_and_no_number_that_is_too_large_for_a_float(text, value):
    mine, theirs = socketpair()
    content = b'{"a": %s}' % text.encode()
    with mine, theirs:
        theirs.sendall(len(content).to_bytes(4) + content)
        assert read_answer(mine, 20) == {"a": value}


def test_an_answer_that_comes_in_parts_is_read_as_a_whole():
    mine, theirs = socketpair()
    text = b'{"a": "%s"}' % (b"x" * 100_000)
    message = len(text).to_bytes(4) + text
    with mine, theirs:
        writer = threading.Thread(target=lambda: [theirs.sendall(message[i : i + 7919]) for i in range(0, 10**5, 7919)])
        writer.start()
        assert len(read_answer(mine, 20)["a"]) == 100_000
        writer.join()
