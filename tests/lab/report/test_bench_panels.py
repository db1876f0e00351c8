"""The pictures of the benchmarks tell ops and backends apart."""

import pytest

from lab.report.bench_panels import OP_COLOURS, attention_figure, roofline_figure
from lab.report.colours import choice_colours
from lab.report.plot import Point, Series, figure, octave_ticks
from tests.lab.report.sample_rows import make_attention_row, make_kernel_row


def test_the_roofline_has_a_colour_an_op_and_the_line_of_sdpa_is_not_that_of_cudnn():
    """On an H200 sdpa runs cuDNN, so both lines have the same places."""
    rows = [make_kernel_row(op, impl, "124m", 0.4, 3.4, 3.8) for op in ("norm", "mlp") for impl in ("eager", "triton")]
    _, *ops = roofline_figure(rows).series
    assert [(series.name, series.colour) for series in ops] == [(op, OP_COLOURS[op]) for op in ("norm", "mlp")]
    assert [point.symbol for point in ops[0].points] == ["circle", "triangle-up"]
    rows = [make_attention_row(impl, T) for T in (1024, 2048) for impl in ("sdpa", "cudnn")]
    cudnn, sdpa = attention_figure(rows, choice_colours([], ["sdpa", "cudnn"])).series
    assert (cudnn.name, sdpa.name) == ("cudnn", "sdpa")  # the last is on top
    assert [point.x for point in cudnn.points] == [point.x for point in sdpa.points]
    assert cudnn.colour != sdpa.colour
    assert cudnn.dash != sdpa.dash


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.45, 9.0], ["0.5", "1", "2", "4", "8"]),
        ([0.45, 17.8], ["1", "4", "16"]),
        ([64, 2**20], ["64", "512", "4K", "32K", "256K"]),
        ([10, 12], ["10", "12"]),
    ],
)
def test_the_ticks_of_a_logarithmic_axis_are_powers_of_two(values, texts):
    shown = figure("x", "y", [Series("", "markers", [Point(value, 1.0) for value in values])], octaves=0.2)
    ticks, found, (low, high) = octave_ticks(shown)
    assert found == texts
    assert all(low < tick < high for tick in ticks)
