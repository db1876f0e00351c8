"""narrow_products.py finds what may wrap around in int32 in Triton's IR, and nothing else."""

import pytest

from tests.kernels.narrow_products import narrow_products
from tests.kernels.spills import spills_in_loops

BEGIN = "%row = tt.get_program_id x : i32\n%t = tt.make_range {end = 128 : i32, start = 0 : i32} : tensor<128xi32>\n"
WRAPS = {
    "a row and a stride": "%o = arith.muli %row, %stride : i32\n%p = tt.addptr %x_ptr, %o : !tt.ptr<bf16>, i32",
    "extended too late": """%o = arith.muli %row, %C : i32
        %wide = arith.extsi %o : i32 to i64
        %p = tt.addptr %x_ptr, %wide : !tt.ptr<bf16>, i64""",
    "a stride and a range": """%s = tt.splat %stride : i32 -> tensor<128xi32>
        %o = arith.muli %t, %s : tensor<128xi32>
        %sum = arith.addi %o, %t : tensor<128xi32>
        %p = tt.addptr %x_ptr, %sum : tensor<128x!tt.ptr<bf16>>, tensor<128xi32>""",
    "out of a loop": """%r:2 = scf.for %i = %c0 to %N step %c1 iter_args(%a = %row, %b = %row) -> (i32, i32)  : i32 {
          %o = arith.muli %a, %C : i32
          scf.yield %a, %o : i32, i32
        }
        %p = tt.addptr %x_ptr, %r#1 : !tt.ptr<bf16>, i32""",
    "into a loop": """%o = arith.muli %row, %C : i32
        %r = scf.for %i = %c0 to %N step %c1 iter_args(%a = %o) -> (i32)  : i32 {
          %p = tt.addptr %x_ptr, %a : !tt.ptr<bf16>, i32
          scf.yield %a : i32
        }""",
    "out of a while": """%r = scf.while (%a = %row) : (i32) -> (i32) {
          scf.condition(%is) %a : i32
        } do {
        ^bb0(%b: i32):
          %o = arith.muli %b, %C : i32
          scf.yield %o : i32
        }
        %p = tt.addptr %x_ptr, %r : !tt.ptr<bf16>, i32""",
    "out of a branch": """%r = scf.if %is -> (i32) {
          scf.yield %row : i32
        } else {
          %o = arith.muli %row, %C : i32
          scf.yield %o : i32
        }
        %p = tt.addptr %x_ptr, %r : !tt.ptr<bf16>, i32""",
    "into other warps": """%o = arith.muli %row, %C : i32
        ttg.warp_specialize(%x_ptr, %o) attributes {requestedRegisters = array<i32: 24>}
        default {
          ttg.warp_yield
        }
        partition0(%arg0: !tt.ptr<bf16>, %arg1: i32) num_warps(1) {
          %p = tt.addptr %arg0, %arg1 : !tt.ptr<bf16>, i32
          ttg.warp_return
        } : (!tt.ptr<bf16>, i32) -> ()""",
    "a counter": """%n = tt.get_num_programs x : i32
        %c8 = arith.constant 8 : i32
        %step = arith.muli %n, %c8 : i32
        scf.for %i = %row to %N step %step  : i32 {
          %wide = arith.extsi %i : i32 to i64
          %o = arith.muli %wide, %C : i64
        }""",
}
FITS = {
    "a row in int64": """%wide = arith.extsi %row : i32 to i64
        %o = arith.muli %wide, %C : i64
        %p = tt.addptr %x_ptr, %o : !tt.ptr<bf16>, i64""",
    "constants": """%c = arith.constant dense<768> : tensor<128xi32>
        %o = arith.muli %t, %c : tensor<128xi32>
        %p = tt.addptr %x_ptr, %o : tensor<128x!tt.ptr<bf16>>, tensor<128xi32>""",
    "few programs": """%y = tt.get_program_id y : i32
        %c = arith.constant 768 : i32
        %o = arith.muli %y, %c : i32
        %p = tt.addptr %x_ptr, %o : !tt.ptr<bf16>, i32""",
    "a row that is compared": """%c = arith.constant 128 : i32
        %first = arith.muli %row, %c : i32
        %all = tt.splat %first : i32 -> tensor<128xi32>
        %n = arith.addi %all, %t : tensor<128xi32>
        %is = arith.cmpi slt, %n, %N : tensor<128xi32>
        %p = tt.addptr %x_ptr, %n : tensor<128x!tt.ptr<bf16>>, tensor<128xi32>""",
    "no offset": "%o = arith.muli %row, %C : i32",
}


@pytest.mark.parametrize("ir", WRAPS.values(), ids=WRAPS)
def test_a_product_that_may_wrap_around(ir):
    assert len(narrow_products(BEGIN + ir)) == 1


@pytest.mark.parametrize("ir", FITS.values(), ids=FITS)
def test_a_product_that_fits(ir):
    assert narrow_products(BEGIN + ir) == []


def test_a_spill_counts_only_in_an_innermost_loop():
    """The loop from 0x20 to 0x40 is in the loop from 0x10 to 0x60."""
    lines = ["STL [R1], R2", "NOP", "{}", "NOP", "@P0 BRA 0x20", "LDL R3, [R1]", "@P0 BRA 0x10", "LDL R2, [R1]"]
    for text, spills in (("MOV R3, R4", []), ("LDL.LU R9, [R1+0x4]", ["LDL.LU R9, [R1+0x4]"])):
        sass = [f"/*{16 * number:04x}*/    {line.format(text)} ;" for number, line in enumerate(lines)]
        assert [line.strip() for line in spills_in_loops("\n".join(sass))] == spills
