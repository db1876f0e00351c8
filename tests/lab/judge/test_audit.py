"""The replay of a run: a right run agrees with eager PyTorch, and one wrong number does not."""

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from data import open_dataset
from data.loader import Loader, open_splits
from lab.judge import audit as audits
from lab.judge.arm import Plan, draw_plan, draw_prompts
from lab.judge.audit import Question, audit, describe_parity, draw_segments, needed_states, replay
from lab.proof.witness import flat_state, generation_logits
from lab.recipe import Recipe
from model.optim import TorchAdamW, learning_rate
from model.step import evaluate, train_step
from tests.test_train import config

CPU = torch.device("cpu")
STEPS, STATES, SHIFTS = 7, [4, 7], [(3, 5), (6, 1234)]
TINY = "model=tiny", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.block_size=16", "data=text"
TINY += "train.batch_size=2", "train.block_size=16", "train.tokens_per_step=64", f"train.max_steps={STEPS}"
TINY += "train.eval_every=7", "train.eval_batches=1", "optim.warmup_steps=2", "optim.learning_rate=1e-3"


def run_of(folder, precision):
    """Train as a worker of the judge does, here with eager PyTorch. Return the question about this run."""
    (folder / "text.txt").write_text("".join(f"{number * number} sheep, " for number in range(300)) + "\n")
    cfg = config(*TINY, f"precision={precision}", f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'tokens'}")
    cfg.data.val_fraction = 0.3
    recipe = Recipe.of(cfg)
    windows, held_out = open_splits(open_dataset(cfg.data), 16, False, evaluate=True)
    loader = Loader(windows, 2, 64, cfg.seed)
    loader.shifts = SHIFTS
    model = recipe.build(CPU)
    optimizer = TorchAdamW(model, cfg.optim)
    losses = []
    for step in range(1, STEPS + 1):
        loss, _ = train_step(model, optimizer, list(loader(step)), learning_rate(cfg.optim, step, STEPS))
        losses.append(loss.item())
        if step in STATES:
            state = {name: tensor.clone() for name, tensor in flat_state(optimizer).items()}
            save_file(state, folder / f"state-{step}")
    prompts = draw_prompts(cfg.model, random.Random(1))
    save_file({"logits": generation_logits(model, *prompts)}, folder / "logits")
    return Question(
        recipe=recipe,
        train=cfg.train,
        data=cfg.data,
        init_from=None,
        device="cpu",
        segments=Plan([STEPS], STATES, []).segments,
        shifts=SHIFTS,
        losses=losses,
        folder=folder,
        val_loss=evaluate(model, held_out, 2, cfg.train.eval_samples, CPU),
        prompts=prompts,
    )


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return run_of(tmp_path_factory.mktemp("run"), "fp32")


@pytest.fixture
def change(honest, tmp_path):
    """Change a file of the run: change("state-7", {name: function of the tensor}) -> the question about it."""

    def call(name, functions):
        for path in honest.folder.iterdir():
            if path.is_file():
                (tmp_path / path.name).symlink_to(path)
        tensors = load_file(honest.folder / name)
        for key, function in functions.items():
            tensors[key] = function(tensors[key])
        (tmp_path / name).unlink()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / name)
        return honest._replace(folder=tmp_path)

    return call


def test_a_right_run_agrees_with_its_replay(honest):
    parity = replay(honest)
    assert (parity["ok"], parity["why"]) == (True, None)
    assert (parity["steps"], parity["segments"]) == (7, [(0, 4), (4, 7)])
    assert parity["losses"] == honest.losses
    assert parity["gradient_worst"].endswith((" in step 4", " in step 7"))
    assert parity["validation"]["val_loss"] == pytest.approx(parity["validation"]["reference"], abs=1e-6)
    assert parity["generation"]["error"] <= parity["generation"]["bound"] < 1e-4
    assert "the losses of 7 steps are off by" in describe_parity(parity)


@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_a_right_run_in_a_lower_precision_agrees_within_its_rounding(tmp_path, precision):
    question = run_of(tmp_path, precision)
    parity = replay(question)
    assert (parity["ok"], parity["why"]) == (True, None)
    assert 0 < parity["loss_error"] <= parity["loss_bound"] < 0.1
    assert 0 < parity["weights"]["error"] <= parity["weights"]["bound"] < 1
    assert 0 < parity["gradient_error"] <= parity["gradient_bound"] < 0.1
    wrong = [*question.losses[:-1], question.losses[-1] + 4 * parity["loss_bound"]]
    assert not replay(question._replace(losses=wrong))["ok"]


def test_a_run_that_did_not_shift_its_batches_is_wrong(honest):
    """It could have made its steps before the windows that the judge measures."""
    for shifts in ([], SHIFTS[:1], SHIFTS[1:]):
        parity = replay(honest._replace(shifts=shifts, prompts=None))
        assert parity["ok"] is False
        assert parity["loss_error"] > parity["loss_bound"]


@pytest.mark.parametrize("step", [1, 4, 5, 7])
def test_one_wrong_loss_is_wrong(honest, step):
    losses = list(honest.losses)
    losses[step - 1] += 0.01
    parity = replay(honest._replace(losses=losses, prompts=None))
    assert parity["ok"] is False
    assert parity["why"].startswith("against eager PyTorch from the run's own states, the losses of 7 steps are off by")
    assert parity["loss_error"] > parity["loss_bound"]
    assert parity["gradient_error"] <= parity["gradient_bound"]


@pytest.mark.parametrize("state", STATES)
def test_one_wrong_moment_is_wrong_and_named(change, state):
    """The whole gradient hides an error in the moment of one bias."""
    question = change(f"state-{state}", {"exp_avg/h.0.ln_1.bias": lambda moment: 1.01 * moment})
    parity = replay(question._replace(prompts=None))
    assert parity["ok"] is False
    assert parity["gradient_worst"] == f"h.0.ln_1.bias in step {state}"
    assert parity["gradient_worst_of_bound"] > 1
    assert "the gradient of h.0.ln_1.bias in step" in parity["why"]


def test_a_moment_that_is_no_number_is_wrong(change):
    question = change("state-7", {"exp_avg/wte.weight": lambda moment: torch.full_like(moment, torch.nan)})
    assert replay(question._replace(prompts=None))["ok"] is False


def test_weights_that_the_run_did_not_have_are_wrong(change):
    """The steps after them have other losses."""
    question = change("state-4", {"model/h.0.mlp.c_fc.weight": lambda weight: weight + 0.01})
    assert replay(question._replace(prompts=None))["ok"] is False


def test_weights_that_change_between_two_segments_are_wrong(honest, change):
    """The run goes on from them, so its losses and moments agree with a replay that starts there."""
    weights = replay(honest._replace(prompts=None))["weights"]
    assert weights["error"] <= 1e-3 < weights["bound"]
    question = change("state-7", {"model/h.0.mlp.c_fc.weight": lambda weight: weight + 0.01})
    val_loss = replay(question._replace(prompts=None))["validation"]["reference"]
    parity = replay(question._replace(prompts=None, val_loss=val_loss))
    assert parity["loss_error"] <= parity["loss_bound"]
    assert parity["ok"] is False
    assert parity["why"].startswith("its weights are not those that its gradients give: they are off by ")


@pytest.mark.parametrize("factor", [0.3, 0.0, float("nan")])
def test_second_moments_that_the_gradients_do_not_give_are_wrong(honest, change, factor):
    """The next segment starts from them, so it agrees with a replay that starts there."""
    names = {name for name in load_file(honest.folder / "state-7") if name.startswith("exp_avg_sq/")}
    parity = replay(change("state-7", dict.fromkeys(names, lambda moment: factor * moment))._replace(prompts=None))
    assert parity["ok"] is False
    assert parity["why"].startswith("its second moments are not those that its gradients give: they are off by ")


@pytest.mark.parametrize(("factor", "error"), [(0.0, "[0-9.]+e\\+[0-9]+"), (0.4, "2.5"), (2.5, "2.5")])
def test_a_parameter_that_changes_too_little_or_too_much_is_named(honest, change, factor, error):
    """It may be a small part of the model, so that all weights together are right."""
    assert replay(honest._replace(prompts=None))["changes"]["error"] < 1.01
    name = "model/h.0.ln_1.weight"
    scaled = change("state-4", {name: lambda weight: 1 + factor * (weight - 1)})  # it starts at 1
    parity = replay(scaled._replace(segments=[(0, 4)], prompts=None))
    assert parity["ok"] is False
    why = rf"its change of h\.0\.ln_1\.weight in step 4 is {error} times as long, or as short, as eager PyTorch's .*"
    assert re.fullmatch(why, parity["why"])


@pytest.mark.parametrize("factor", [0.97, 1.03])
def test_steps_of_another_length_are_wrong(honest, change, factor):
    start = replay(honest._replace(prompts=None))["segments"][0][0]
    assert start == 0
    weights = {name for name in load_file(honest.folder / "state-4") if name.startswith("model/")}
    initial = {f"model/{name}": weight.detach() for name, weight in honest.recipe.build(CPU).named_parameters()}
    scale = {name: lambda weight, name=name: initial[name] + factor * (weight - initial[name]) for name in weights}
    parity = replay(change("state-4", scale)._replace(segments=[(0, 4)], prompts=None))
    assert parity["ok"] is False
    assert parity["why"].startswith("its weights are not those that its gradients give: they are off by 3.0e-02")


def test_only_the_drawn_segments_are_repeated(honest):
    """On a GPU the replay takes longer than the run. Nobody knows before the run what is drawn."""
    losses = [honest.losses[0] + 1, *honest.losses[1:]]
    question = honest._replace(losses=losses, prompts=None)
    for segments, ok in (([(4, 7)], True), ([(0, 4)], False)):
        parity = replay(question._replace(segments=segments))
        assert (parity["ok"], parity["steps"]) == (ok, segments[0][1] - segments[0][0])


@pytest.mark.parametrize("val_loss", [1.01, float("nan"), None])
def test_a_wrong_validation_loss_is_wrong(honest, val_loss):
    if val_loss == 1.01:
        val_loss *= honest.val_loss
    parity = replay(honest._replace(val_loss=val_loss, prompts=None))
    assert parity["ok"] is False
    assert parity["why"].startswith("it reports ")
    assert "validation loss" in parity["why"]


def test_a_run_that_was_not_to_evaluate_needs_no_validation_loss(honest):
    train = replace(honest.train, eval_every=0)
    assert replay(honest._replace(train=train, val_loss=None, prompts=None))["ok"] is True
    assert replay(honest._replace(train=train, val_loss=9.0, prompts=None))["ok"] is False


def test_other_last_weights_do_not_have_the_validation_loss_of_the_run(change):
    question = change("state-7", {"model/wte.weight": lambda weight: 1.5 * weight})
    parity = replay(question._replace(prompts=None))
    assert parity["ok"] is False
    assert "but with its last weights eager PyTorch has" in parity["why"]


@pytest.mark.parametrize("wrong", [lambda logits: logits + 0.01, lambda logits: logits.clone().fill_(torch.nan)])
def test_wrong_logits_of_a_generation_are_wrong(change, wrong):
    parity = replay(change("logits", {"logits": wrong}))
    assert parity["ok"] is False
    assert parity["why"].startswith("the logits of its generation are off by ")


def test_a_state_with_other_tensors_cannot_be_repeated(change):
    question = change("state-4", {"exp_avg/wpe.weight": lambda moment: moment[1:]})
    with pytest.raises(ValueError, match=r"^the state that the run sent has other tensors than this model$"):
        replay(question)


def test_the_replay_runs_in_a_process_of_its_own_and_its_failure_is_an_error(honest, monkeypatch, tmp_path):
    seen = []

    def run_in_process(work, arguments, name):
        seen.append(name)
        work(*arguments)

    monkeypatch.setattr(audits, "run_in_process", run_in_process)
    monkeypatch.setattr(audits, "replay", lambda question: {"ok": True, "steps": len(question.losses)})
    arm = SimpleNamespace(folder=tmp_path)
    assert audit(honest, arm) == {"ok": True, "steps": 7}
    assert seen == ["the replay with eager PyTorch"]


def test_all_segments_are_repeated_on_a_cpu_and_two_on_a_gpu():
    """Nobody knows before the run which two. In the first run, one of them has the steps that compile."""
    plan = draw_plan(150, random.Random(1))
    assert draw_segments(plan, CPU, random.Random(2), is_first_run=True) == plan.segments
    drawn = [draw_segments(plan, torch.device("cuda"), random.Random(seed), is_first_run=True) for seed in range(20)]
    assert {(len(segments), segments[0]) for segments in drawn} == {(2, plan.segments[0])}
    seconds = {segments[1] for segments in drawn}
    assert seconds <= set(plan.segments[1:])
    assert len(seconds) > 5
    later = [draw_segments(plan, torch.device("cuda"), random.Random(seed), is_first_run=False) for seed in range(50)]
    assert {len(segments) for segments in later} == {2}
    assert all(segments == sorted(segments) for segments in later)
    assert {segment for segments in later for segment in segments} == set(plan.segments)
    alone = Plan([5], [5], [0])
    assert draw_segments(alone, torch.device("cuda"), random.Random(1), is_first_run=True) == [(0, 5)]


def test_the_states_around_each_segment_are_kept_and_the_last_one():
    plan = Plan([3, 5, 8], [3, 8, 16], [0, 0, 0])
    assert needed_states([(0, 3)], plan) == {3, 16}
    assert needed_states([(3, 8)], plan) == {3, 8, 16}
