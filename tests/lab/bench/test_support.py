from lab.bench.support import cell, tables


def test_cell_names_the_values_that_are_right():
    ok, no = "ok: torch 2.11.0", "unavailable: it takes none"
    assert cell({"64": ok, "80": ok}) == "yes"
    assert cell({"64": no, "80": no}) == "no"
    assert cell({"64": ok, "80": no, "96": ok}) == "64, 96"
    assert cell({"64": ok, "80": "wrong: out0: ...", "96": "failed: ..."}) == "64; **wrong** 80; **failed** 96"
    assert cell({"bf16": "failed: ..."}) == "**failed** bf16"


def test_each_op_has_a_table_with_reasons_below_it():
    """A backend's newest row counts. A backend that runs nowhere has a reason and no line."""
    ok, no, bad = "ok: torch 2.11.0", "unavailable: it takes even widths", "wrong: out0: error 1"

    def row(op, impl, fp32, compiled):
        answers = {"fp32": dict(zip(("64", "769"), fp32, strict=True)), "compile": {"bf16": compiled}}
        return {"op": op, "impl": impl, "answers": answers}

    rows = [row("norm", "mine", (ok, ok), ok), row("norm", "eager", (ok, ok), ok), row("norm", "mine", (ok, no), bad)]
    rows += [row("loss", "mine", (no, no), no)]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables(rows).splitlines()]
    assert [cells for cells in lines if not cells[0].startswith("--")] == [
        ["norm", "fp32", "compile"],
        ["eager", "yes", "yes"],
        ["mine", "64", "**wrong** bf16"],
        [""],
        ["- `norm=mine` fp32 769: it takes even widths"],
        ["- `norm=mine` compile: wrong: out0: error 1"],
        [""],
        ["loss", "fp32", "compile"],
        [""],
        ["- `loss=mine`: it takes even widths"],
    ]
