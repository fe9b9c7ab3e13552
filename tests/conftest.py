"""What every test relies on: one thread, so numbers and times don't depend on the machine's load."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch at import, here and in the processes that tests start

import torch

torch.set_num_threads(1)
