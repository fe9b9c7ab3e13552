"""What never changes a result: devices, processes, memory, patience. The `runtime` section of jobs and pipeline files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpoctl.settings.fields import Flag, Positive, Section, Words


class DeepSpeedConfig(Section):
    """How DeepSpeed spreads the update over processes; changes memory and speed, and results by rounding only."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """What is split over the processes: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in host memory: optimizer states (stage 1 and up), or weights too (stage 3)."""
    optimizer: Literal["torch", "deepspeed"] = "torch"
    """Whose AdamW steps: torch's, or DeepSpeed's kernel of the same formula (DeepSpeedCPUAdam where optimizer states are
    offloaded or on a CPU, FusedAdam on a GPU), which is compiled on first use: it needs ninja and a compiler."""
    config_file: str | None = None
    """A ds_config.json with more of DeepSpeed's own settings; one that contradicts ours is refused by its key."""


class MegatronConfig(Section):
    """How Megatron-LM spreads a model over processes; changes memory and speed, and results by rounding only."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Processes that share every matrix; the others hold copies and work on other rows."""


class ServeConfig(Section):
    """Servers that `run` starts, keeps between iterations and stops, for rollout.engine: server."""

    command: Words = ()
    """Command line of one server, as a list of words; {policy} is the policy's folder, {port} a free port, {index} the
    server's number. Empty: none is started."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables for the servers, with the same names filled in, as {CUDA_VISIBLE_DEVICES: "{index}"}; the rest, secrets too,
    comes from the environment of `run`."""
    replicas: Positive = 1
    """Servers to start, each with the whole model."""
    start_seconds: Annotated[float, Field(gt=0.0)] = 900.0
    """How long a server may take until it answers."""


class RuntimeConfig(Section):
    """What never changes a result: devices, memory, speed."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where models run; `auto` takes a GPU when there is one."""
    num_threads: Annotated[int | None, Field(ge=1)] = None
    """CPU threads of the math library; by default its own choice."""
    rollout_batch_size: Positive = 256
    """Completions sampled at once by the hf engine."""
    micro_batch_tokens: Annotated[int, Field(ge=1), Flag("--micro-batch-tokens")] = 16384
    """Tokens, padding included, of one forward of the training framework or a reward model; a longer single row still
    runs alone."""
    tensor_parallel_size: Positive = 1
    """vllm: GPUs that share one copy of the model."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """vllm: share of a GPU's memory for weights and key-value cache."""
    cpu_cache_gib: Positive = 1
    """vllm on a CPU: key-value cache, GiB."""
    max_context_tokens: Annotated[int | None, Field(ge=2)] = None
    """vllm: prompt and completion together that the engine makes room for; by default the model's whole context, for one
    sequence of which the cache must be large enough."""
    enforce_eager: bool = False
    """vllm: no compilation and no CUDA graphs; slower, but starts at once."""
    server_concurrency: Positive = 256
    """server: completions asked of one server at once."""
    server_timeout_seconds: Annotated[float, Field(gt=0.0)] = 1800.0
    """server: a server that finishes nothing for this long is dropped and its prompts are asked elsewhere; choose more than
    one completion takes."""
    vllm_adapters: bool = False
    """vllm: where a policy has its adapters beside it (sync.adapters), keep their base in the engine and load only them;
    the samples come from base and adapters, which answer like the merged weights but for rounding."""
    engine_timeout_seconds: Annotated[float, Field(gt=0.0)] = 1800.0
    """vllm: an engine that takes no step (a token for each running completion) for this long hangs, and the stage ends with
    exit 75."""
    serve: ServeConfig = ServeConfig()
    """`run`: servers to start and stop, besides those of `servers`."""
    python: dict[str, str] = Field(default_factory=dict)
    """`run`: interpreter for a stage that needs an environment of its own, as {rollout: .venv-vllm/bin/python}."""
    num_processes: Positive = 1
    """Processes that `logprob` and `update` start on this machine, one a GPU; the model is sharded over them. Leave it at 1
    under torchrun or the deepspeed launcher, which start the processes themselves."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again: less memory, a third more time."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """DeepSpeed's layout, for update.engine: deepspeed."""
    megatron: MegatronConfig = MegatronConfig()
    """Megatron-LM's layout, for update.engine and logprob.engine: megatron."""
    reward_workers: Positive = 1
    """Processes that call reward functions."""
    reward_environment: Words = ()
    """Environment variables handed to reward functions although their names look like secrets, as OPENAI_API_KEY; all
    others of that kind are kept from them."""
    keep_states: Annotated[int | None, Field(ge=1)] = 2
    """Iterations whose optimizer state `run` keeps; older ones are dropped, published policies stay. null keeps all."""
