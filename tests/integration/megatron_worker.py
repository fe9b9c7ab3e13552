"""Load a policy folder into Megatron and export it again: megatron_worker.py FOLDER TENSOR_PARALLEL OUT."""

import sys
from pathlib import Path

import torch

from grpoctl.engines.megatron.model import load_megatron
from grpoctl.engines.registry import training_engine
from grpoctl.processes.ranks import join
from grpoctl.settings.fields import UpdateConfig
from grpoctl.settings.runtime import MegatronConfig, RuntimeConfig

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, size, out = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    ranks = join("cpu")
    policy = load_megatron(
        folder, ref="tiny", vocab_size=320, device="cpu", dtype="float32", tensor_parallel_size=size, ranks=ranks
    )
    runtime = RuntimeConfig(megatron=MegatronConfig(tensor_parallel_size=size))
    training_engine("megatron").trainer(policy, UpdateConfig(engine="megatron"), runtime, ranks).export(out)
