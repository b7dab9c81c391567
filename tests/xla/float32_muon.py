"""Runs a script with Muon's products in float32: python float32_muon.py SCRIPT ARGUMENTS...

In bfloat16 the smallest singular values of a gradient are rounding, which Muon makes as large as all others: no two programs
that round in another order take the same step. In float32 they do.
"""

import runpy
import sys

import torch

torch.Tensor.bfloat16 = torch.Tensor.float
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
