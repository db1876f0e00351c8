"""QuACK's RMSNorm in CuTe DSL (https://github.com/Dao-AILab/quack), with the addition fused forward and backward.

kernels/norm/quack.py calls its operators, with is_layernorm=True for a LayerNorm.
"""

from kernels.norm.quack import FAMILY, RUNS, detail, rms_norm, unavailable  # noqa: F401
