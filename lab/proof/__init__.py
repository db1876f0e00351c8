"""The proof that the row of a run has with proof=true: parity, a receipt, and the parts of the memory."""

from data.loader import Batch
from kernels.registry import called_backends
from lab.proof.memory import measure_step, predict_step, suggest_batch_size  # noqa: F401
from lab.proof.parity import FirstSteps, Recorder, judge, why_parity_fails
from lab.proof.receipt import make_receipt, optimizer_ms, receipt_lines
from lab.proof.references import make_references  # noqa: F401
from lab.proof.trace import write_memory_snapshot, write_trace  # noqa: F401
from lab.proof.witness import Witness
from lab.recipe import Recipe
from model.capture import StepRunner
from runtime.config import UserError
from runtime.schedule import TrainConfig


class Wrong(UserError):
    """The run is complete, but did not do what its row says."""

    status = "wrong"


def prove(
    row: dict,
    recipe: Recipe,
    train: TrainConfig,
    step: StepRunner,
    batches: list[Batch],
    recorder: Recorder | Witness | None,
    references: list[FirstSteps],
) -> None:
    """Put the proof of a finished run into its row. It frees the CUDA graph of `step`.

    `batches` are the batches of one more step, on the model's device. `recorder` has the first steps of the run; as a
    Witness it only answers the judge, which proves the run itself.
    `references` are the first steps of eager PyTorch in fp32 and in the run's precision, or empty. Raises Wrong if the
    run did not do what its row says.
    """
    device = step.device
    if isinstance(recorder, Witness):
        step.release()
        recorder.testify(step.model, row)
        return
    if references:
        row["parity"] = judge(recorder.steps, *references)
    if step.graph is None:
        step.release()  # a capture cannot be profiled
    impls = called_backends(recipe.kernels, recipe.attn, row["kernels"])
    receipt = make_receipt(lambda: step(batches, 0.0), device, impls, row["kernels"])
    row["receipt"] = {"step_ms": row.get("perf/step_ms"), **receipt}
    row["memory"] = {"predicted": None, "measured": None}
    if step.optimizer.ranks.single:
        micro_steps = train.tokens_per_step // (train.batch_size * train.block_size)
        if not recipe.kernels.compile:  # the prediction is for a step without torch.compile
            row["memory"]["predicted"] = predict_step(recipe, train.batch_size, train.block_size, micro_steps, device)
        step.release()
        row["receipt"]["optimizer_ms"] = optimizer_ms(step.model, step.optimizer, batches[0])
        if device.type == "cuda":
            peak = row["mem/peak_allocated_gib"]
            row["memory"]["measured"] = measure_step(step.model, step.optimizer, batches, peak)
    print(proof_lines(row))
    if reason := why_parity_fails(row["parity"]) or row["receipt"]["wrong"]:
        raise Wrong(reason)


def proof_lines(row: dict) -> str:
    """Return the proof in a few lines, for the terminal."""
    parity = row["parity"]
    if parity["ok"] is None:
        compared = f"not compared: {parity['why']}"
    else:
        compared = (
            f"the first {parity['steps']} losses are {parity['loss_error']:.1e} from eager fp32's (bound "
            f"{parity['loss_bound']:.1e}), the first gradient {parity['gradient_error']:.1e} "
            f"({parity['gradient_bound']:.1e})"
        )
    return "\n".join([f"parity   {compared}", *receipt_lines(row)])
