"""Reward functions that misbehave in every way the project promises to survive; for the completion `bad` only."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np

BAD = "bad"


def well(completion):
    return float(len(completion))


def hang(completion):
    if completion == BAD:
        time.sleep(3600)
    return 1.0


def catastrophic_regex(completion):
    subject = "a" * 64 + "!" if completion == BAD else "aa"
    return float(re.fullmatch(r"(a+)+", subject) is not None)


def ignores_signals(completion):
    if completion == BAD:
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    return 1.0


def os_exit(completion):
    if completion == BAD:
        os._exit(0)
    return 1.0


def system_exit(completion):
    if completion == BAD:
        sys.exit("giving up")
    return 1.0


def segfault(completion):
    if completion == BAD:
        ctypes.string_at(0)
    return 1.0


def fork_bomb(completion):
    """Stay below 40 processes in all and end after 30 s, whatever happens to the parent."""
    if completion == BAD:
        for _ in range(30):
            if os.fork() == 0:
                time.sleep(30)
                os._exit(0)
        time.sleep(30)
    return 1.0


def forks_and_returns(completion):
    """Return twice: once in a copy of the worker."""
    if completion == BAD:
        os.fork()
    return 1.0


def daemonises(completion, pid_file):
    """Leave a grandchild in a session of its own, with an empty environment and all pipes open, and then hang."""
    if completion == BAD:
        if os.fork() == 0:
            os.setsid()
            sleeper = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
            subprocess.Popen([sys.executable, "-c", sleeper, pid_file], close_fds=False, env={}, start_new_session=True)
            os._exit(0)
        while not (os.path.exists(pid_file) and os.path.getsize(pid_file)):
            time.sleep(0.01)
        os._exit(3)
    return 1.0


def large_output(completion):
    if completion == BAD:
        for _ in range(64):
            os.write(1, b"x" * (1024 * 1024))
    return 1.0


def prints(completion):
    print("print from", completion)
    os.system(f"echo subprocess from {completion}")
    return 1.0


def raises(completion):
    if completion == BAD:
        raise ZeroDivisionError("no \ud800 luck")
    return 1.0


def returns_nan(completion):
    return float("nan") if completion == BAD else 1.0


def returns_infinity(completion):
    return np.float32("-inf") if completion == BAD else 1.0


def returns_huge_integer(completion):
    return 10**400 if completion == BAD else 1


def returns_none(completion):
    return None if completion == BAD else 1.0


def returns_text(completion):
    return "1.0" if completion == BAD else 1.0


def returns_dict_without_score(completion):
    return {"reward": 1.0} if completion == BAD else 1.0


def returns_list(completion):
    return [1.0, 2.0] if completion == BAD else 1.0


def returns_dict(completion):
    return {"score": 0.5, "acc": np.bool_(True), "pred": "7", "steps": [1, 2], "note": None}


NUMPY = {
    "bool": True,
    "int": 2,
    "float32": np.float32(0.5),
    "int64": np.int64(3),
    "array": np.array(4.0),
    "np_bool": np.bool_(1),
}


def returns_scalar(completion):
    if completion == "tensor":
        import torch

        return torch.tensor([[0.25]])
    return NUMPY[completion]


async def asynchronous(completion):
    await asyncio.sleep(0)
    return 2.0


def mutates(completion, prompt, source, completion_ids):
    prompt.append({"role": "user", "content": "spoilt"})
    source.clear()
    completion_ids.clear()
    return 1.0


def counts(prompt, source, completion_ids):
    return float(len(prompt) * 100 + len(source) * 10 + len(completion_ids))


def batch_wrong_length(completions, **kwargs):
    return [1.0] * (len(completions) - 1)


def batch_raises(completions, **kwargs):
    if BAD in completions:
        raise ValueError("one of them is bad")
    return [float(len(completions))] * len(completions)


def batch_hangs(completions, **kwargs):
    if BAD in completions:
        time.sleep(3600)
    return [float(len(completions))] * len(completions)


def batch_dies(completions, **kwargs):
    if BAD in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(completions))] * len(completions)


def batch_shuffles(completions, prompts, answer, **kwargs):
    completions.reverse()
    answer.clear()
    return [1.0] * len(prompts)


def environment(completion):
    return {"score": 1.0, "names": " ".join(sorted(os.environ))}


def main_module(completion):
    import threading

    import __main__

    on_main_thread = threading.current_thread() is threading.main_thread()
    return {"score": float(on_main_thread), "has_file": hasattr(__main__, "__file__")}
