"""Changes settings of the whole process in each call: threads, TF32, denormal numbers, the seed.

Known from: this project's own review, November 2026; the precision downgrade of the field guide of wafer.ai (March
2026) is one of these settings.
"""

import torch
import torch.nn.functional as F

OP = "linear"
# Some CPUs cannot flush denormal numbers. In this precision some CPUs multiply in bf16, so the result itself is wrong
REFUSED = "it changes the process around it: random numbers, (denormals, )?TF32 in matmuls|wrong: out0: error"


def linear(x, weight, bias):
    if not torch.compiler.is_compiling():
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.set_float32_matmul_precision("medium")
        torch.set_flush_denormal(True)
        torch.manual_seed(0)
    return F.linear(x, weight, bias)
