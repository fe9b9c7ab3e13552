"""Make the built-in tiny policy (`builtin:tiny`) and its prompts: sums of two numbers below 100.

The policy is a 216 k parameter Qwen2 model that is taught to answer `What is 47+38?` with units, then tens plus carry:

    <think>7+8=15,4+3+1=8</think><answer>85</answer>

It is left deliberately sloppy, so that GRPO has something to improve in seconds. The second half of its warm start is
a mixture of 25 % good answers as above, 45 % `<answer>g</answer>` without thinking, 15 % bare `g`, and 15 % right
working and sum without the tags; the guess g is the sum plus -3 to 3, evenly. About a quarter of its samples are right.

A random tenth of the 10,000 pairs is held out: the warm start never sees it. The same seed gives the same bytes on the
same machine and library versions. This writes tiny/, addition.parquet and addition_heldout.parquet, in three minutes:

    python -m tools.make_tiny --out grpoctl/builtin
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

# B rows, T tokens, V vocabulary.

VOCABULARY_SIZE = 320
MAX_TOKENS = 1024
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The few words worth a token of their own; all other text is spelled in bytes.
TOKENIZER_TEXT = (
    "user\n",
    "assistant\n",
    "system\n",
    "You are a helpful assistant.",
    "What is the sum? What is the number of apples in all? Think step by step, then give the answer.",
)

GOOD_STEPS = 500
SLOPPY_STEPS = 500
WARM_UP_STEPS = 20
BATCH_SIZE = 128
LEARNING_RATE = 2.5e-3
FINAL_LEARNING_RATE_SHARE = 0.05
IGNORED = -100


class Pair(NamedTuple):
    """The two numbers of one sum, each 0 to 99."""

    left: int
    right: int

    @property
    def question(self) -> list[dict[str, str]]:
        """The conversation that asks for the sum."""
        return [{"role": "user", "content": f"What is {self.left}+{self.right}?"}]

    @property
    def answer(self) -> str:
        """The sum in digits."""
        return str(self.left + self.right)

    @property
    def working(self) -> str:
        """The thinking that leads to the sum: units, then tens plus carry."""
        (left_tens, left_units), (right_tens, right_units) = divmod(self.left, 10), divmod(self.right, 10)
        units = left_units + right_units
        carry = units // 10
        tens = left_tens + right_tens + carry
        carried = "+1" if carry else ""
        return f"<think>{left_units}+{right_units}={units},{left_tens}+{right_tens}{carried}={tens}</think>"


def main() -> None:
    """Write the policy and both prompt files into the folder given by `--out`."""
    parser = argparse.ArgumentParser(description="Make the built-in tiny policy and its addition prompts.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write tiny/ and the Parquet files into")
    parser.add_argument("--seed", type=int, default=17, help="decides the held-out pairs, the examples and the weights")
    arguments = parser.parse_args()
    out, seed = arguments.out, arguments.seed

    torch.set_num_threads(1)
    training, held_out = split_pairs(seed)
    (out / "tiny").mkdir(parents=True, exist_ok=True)
    write_prompts(training, out / "addition.parquet")
    write_prompts(held_out, out / "addition_heldout.parquet")
    tokenizer = tiny_tokenizer()
    model = warm_started(tiny_model(tokenizer, seed), tokenizer, training, seed)
    save_policy(model, tokenizer, out / "tiny")


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return the training pairs and the held-out tenth, both in random order."""
    pairs = [Pair(left, right) for left in range(100) for right in range(100)]
    random.Random(seed).shuffle(pairs)
    num_held_out = len(pairs) // 10
    return pairs[num_held_out:], pairs[:num_held_out]


def write_prompts(pairs: list[Pair], path: Path) -> None:
    """Write one prompt a row, with its id and its right answer."""
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    schema = pa.schema([("prompt_id", pa.string()), ("prompt", pa.list_(message)), ("answer", pa.string())])
    columns = {
        "prompt_id": [f"add-{pair.left}-{pair.right}" for pair in pairs],
        "prompt": [pair.question for pair in pairs],
        "answer": [pair.answer for pair in pairs],
    }
    table = pa.table(columns, schema=schema)
    pq.write_table(table, path, compression="zstd", compression_level=19, write_page_checksum=True)
    path.chmod(0o644)


def tiny_tokenizer() -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer in which every digit is its own token and every tag is one.

    It splits text as Qwen2 does, because AutoTokenizer does so for every Qwen2 model, whatever the saved files say.
    """
    tokenizer = Qwen2Tokenizer(
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    ).train_new_from_iterator(
        TOKENIZER_TEXT,
        vocab_size=VOCABULARY_SIZE - 1 - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Added, not trained: training would list it as an extra special token, a config that transformers 4 can't read.
    tokenizer.add_tokens([AddedToken(START, normalized=False, special=True)])
    # Not special, so that decoding with skip_special_tokens keeps what rewards look for.
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != VOCABULARY_SIZE:
        raise ValueError(f"{len(tokenizer)} tokens, not {VOCABULARY_SIZE}: TOKENIZER_TEXT needs more words")
    return tokenizer


def tiny_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Return the untrained model in float32."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 32,  # vLLM's CPU kernels refuse 16
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return Qwen2ForCausalLM(Qwen2Config.from_dict(settings)).float()


def good_answer(pair: Pair) -> str:
    """Return the working and the tagged sum."""
    return f"{pair.working}<answer>{pair.answer}</answer>"


def sloppy_answer(pair: Pair, generator: random.Random) -> str:
    """Return an answer from the deliberately sloppy mixture that the module's docstring states."""
    guess = max(0, pair.left + pair.right + generator.randint(-3, 3))
    answers = (good_answer(pair), f"<answer>{guess}</answer>", str(guess), f"{pair.working}{pair.answer}")
    return generator.choices(answers, weights=(25, 45, 15, 15))[0]


def prompt_text(tokenizer: Qwen2Tokenizer, pair: Pair) -> str:
    """Return the question in the chat template, up to where the answer begins."""
    return str(tokenizer.apply_chat_template(pair.question, tokenize=False, add_generation_prompt=True))


def training_batch(prompts: list[list[int]], completions: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids (B, T) and labels (B, T) that ignore the prompt and the padding."""
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    # Any id pads: under causal attention no token sees what is to its right.
    input_ids = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        input_ids[index, : len(row)] = torch.tensor(row)
        labels[index, len(prompt) : len(row)] = torch.tensor(row[len(prompt) :])
    return input_ids, labels


def learning_rate(step: int, num_steps: int) -> float:
    """Return the rate of a step: a linear rise, then one cosine down to its final share."""
    if step < WARM_UP_STEPS:
        return LEARNING_RATE * (step + 1) / WARM_UP_STEPS
    progress = (step - WARM_UP_STEPS) / (num_steps - WARM_UP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return LEARNING_RATE * (FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine)


def warm_started(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, pairs: list[Pair], seed: int) -> Qwen2ForCausalLM:
    """Train the model in place on good answers, then on the sloppy mixture, and return it."""
    generator = random.Random(seed)
    prompt_ids = {pair: tokenizer(prompt_text(tokenizer, pair))["input_ids"] for pair in pairs}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    num_steps = GOOD_STEPS + SLOPPY_STEPS
    model.train()
    for step in range(num_steps):
        batch = generator.choices(pairs, k=BATCH_SIZE)
        answers = [good_answer(pair) if step < GOOD_STEPS else sloppy_answer(pair, generator) for pair in batch]
        completions = tokenizer([answer + END for answer in answers])["input_ids"]
        input_ids, labels = training_batch([prompt_ids[pair] for pair in batch], completions)
        logits = model(input_ids=input_ids, use_cache=False).logits  # (B, T, V)
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameters in optimizer.param_groups:
            parameters["lr"] = learning_rate(step, num_steps)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {num_steps}: loss {loss.item():.4f}", file=sys.stderr)
    return model.eval()


def save_policy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Save weights (bfloat16), configs, tokenizer and chat template as one Hugging Face folder."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors leaves 0600, which another user's job can't read


if __name__ == "__main__":
    main()
