"""`python -m paceline_lab.bench.gpu MODULE DEVICE`: one step. Each line of its output is a JSON object of figures."""

import importlib
import json
import sys

import torch

if __name__ == "__main__":  # a step may start processes, which import this module
    _, module, device = sys.argv
    for figures in importlib.import_module(f"paceline_lab.bench.gpu.{module}").measure(torch.device(device)):
        sys.stdout.write(json.dumps(figures) + "\n")
        sys.stdout.flush()
