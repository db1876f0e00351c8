"""RMSNorm in Helion (https://github.com/pytorch/helion): the kernels of kernels/norm/helion.py without the mean."""

from kernels.norm.helion import FAMILY, RUNS, detail, rms_norm, unavailable  # noqa: F401
