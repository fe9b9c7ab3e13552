"""Start SGLang's server on a CPU build of torch: PyPI's torchvision has no operators there, so two schemas are declared."""

import runpy
import sys

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    sys.argv = ["sglang", *sys.argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__")
