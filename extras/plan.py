"""Compute what a training run will need: memory, traffic, checkpoint and floating-point operations.

    sizes = {"embeddings": [65 * 128] * 2, "matrices": [128 * 384, 128 * 128, 2 * 4 * 128 * 128]}
    job = Job("modern", 65, 1, 128, 256, sizes, "adamw", "float32", rows=8)
    for kind, count in memory(job, "ddp").items():
        print(f"{kind}: {count / 1e9:.2f} GB")

Formulas only, for a GPT of gpt.py that is not compiled; torch.compile keeps fewer activations. The
bytes per token were measured on a CPU, as what autograd keeps for the backward pass, and their sum
with torch's profiler. On CUDA, autocast computes LayerNorm in float32, so gpt2 needs somewhat more,
and CUDA, NCCL and the allocator need one or two GB more. Needs Python alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

STRATEGIES = ("ddp", "zero", "fsdp")
# For each architecture, what the backward pass of a layer needs in float32, in bytes per token and
# width. bfloat16 halves it.
LAYER = {"gpt2": 64, "modern": 72, "modern2": 72}
# cross_entropy of gpt.py computes at most so many logits at once.
MAX_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 25}


class Job(NamedTuple):
    """What memory and traffic depend on."""

    arch: str
    vocab: int
    layers: int
    embd: int
    block_size: int
    # number of elements of each parameter, by the group that parameter_groups of gpt.py gives it
    sizes: Mapping[str, Sequence[int]]
    optimizer: str  # "adamw", "muon" or "fast-muon"
    dtype: str  # of the computation: "float32", "bfloat16" or "float16"
    rows: int  # windows in the largest micro-batch of a rank
    micro_batches: int = 1  # per step and rank
    ranks: int = 1
    heads: int = 1
    checkpoint_activations: bool = False
    device: str = "cuda"


def parameters(job: Job) -> int:
    """Return the number of parameters. Weights that two layers share count once."""
    return sum(map(sum, job.sizes.values()))


def matrices(job: Job) -> int:
    """Return the number of parameters that Muon could train."""
    return sum(job.sizes.get("matrices", []))


def moments(job: Job) -> int:
    """Return the bytes of the optimizers' state: two numbers per parameter of AdamW, one of Muon.

    AdamW also has a counter of 4 bytes for each parameter tensor.
    """
    muon = 0 if job.optimizer == "adamw" else matrices(job)
    counters = sum(
        len(group) for kind, group in job.sizes.items() if kind != "matrices" or not muon
    )
    return 8 * (parameters(job) - muon) + 4 * counters + 4 * muon


def checkpoint(job: Job) -> int:
    """Return the bytes of all tensors of a checkpoint. The file is larger by 1 KB per tensor."""
    return 4 * parameters(job) + moments(job)


def activations(job: Job) -> int:
    """Return the bytes that exist at the beginning of the backward pass, without the logits."""
    tokens, numbers = job.rows * job.block_size, 4 if job.dtype == "float32" else 2
    layer = LAYER[job.arch] * job.embd * numbers // 4
    if job.device == "cpu" and job.dtype == "bfloat16" and job.block_size <= 512:
        layer += 2 * job.heads * job.block_size  # gpt.attention keeps the scores
    kept = layer * job.layers
    if job.checkpoint_activations:  # the input of each layer, and one whole layer at a time
        kept = numbers * job.embd * job.layers + layer
    # The norm and the embedding, the inputs and targets, the gradient of the widest activation.
    rest = 2 * numbers + (4 if job.arch == "modern2" else 0)
    return tokens * (kept + rest * job.embd + 16 + 4 * numbers * job.embd)


def logits(job: Job) -> int:
    """Return the bytes of the logits, their softmax and their gradient, for all rows or a part.

    If a part is enough, the gradients of the output layer are added up: 8 bytes per weight. (In
    float32, torch before 2.13 needs 12 bytes per logit of the part, not 4.)
    """
    count, limit = job.rows * job.block_size * job.vocab, MAX_LOGITS.get(job.device, 1 << 25)
    if count <= limit:
        return 12 * count
    return limit * (4 if job.dtype == "float32" else 14) + 8 * job.vocab * job.embd


def memory(job: Job, strategy: str) -> dict[str, int]:
    """Return the bytes of one rank by kind, then their sums between the steps and during a step.

    strategy: one of STRATEGIES. With one rank, all are "ddp".
    """
    if job.ranks == 1:
        strategy = "ddp"
    whole, blocks = 4 * parameters(job), 4 * matrices(job)
    share = 1 if strategy == "ddp" else job.ranks
    # The parts whose weights are gathered: two blocks, because the next one is fetched early, and
    # what is not in a block.
    part = 2 * blocks // job.layers + whole - blocks
    gathered = {"ddp": 0, "zero": whole, "fsdp": min(part, whole)}[strategy]
    gradients = whole // share
    if strategy != "ddp":
        # zero adds up whole gradients over several micro-batches.
        several = strategy == "zero" and job.micro_batches > 1
        gradients += whole if several else min(part, whole)
    copies = 0 if job.dtype == "float32" else blocks // 2 + 2 * job.vocab * job.embd
    if strategy == "fsdp" and job.checkpoint_activations:
        copies = min(copies, part // 2)
    # fast-muon updates many matrices at a time: the momentum, its copy, and the products.
    update = 0
    if job.optimizer == "fast-muon":
        update = blocks * 3 if job.dtype == "float32" else blocks * 2
    kinds = {
        "weights": whole // share,
        "gathered weights": gathered,
        "gradients": gradients,
        "moments": moments(job) // share,
        "16-bit copies": copies,
        "activations": activations(job),
        "logits": logits(job),
        "optimizer step": update,
    }
    held = kinds["weights"] + kinds["moments"]
    # DDP keeps its buckets between the steps.
    buckets = whole if strategy == "ddp" and job.ranks > 1 else 0
    # The gradients at the beginning of the last backward pass. Later ones replace activations.
    early = buckets
    if job.micro_batches > 1:
        early = whole // share if strategy == "fsdp" else whole
    passes = gathered + early + copies + kinds["activations"] + kinds["logits"]
    kinds["between steps"] = held + buckets
    kinds["during a step"] = held + max(passes, gradients + update)
    return kinds


def sent(job: Job, strategy: str) -> int:
    """Return the bytes that each rank sends per step, in rings.

    ddp and zero send gradients and sums, or gradients and weights. fsdp sends the weights twice, in
    each micro-batch. fast-muon sends its results.
    """
    times = 2 if strategy != "fsdp" else 3 * job.micro_batches
    count = times * 4 * parameters(job)
    if job.optimizer == "fast-muon":
        count += matrices(job) * (4 if job.dtype == "float32" else 2)
    return count * (job.ranks - 1) // job.ranks


def table(job: Job) -> Iterator[str]:
    """Yield the lines of a table: the memory of a rank by kind and strategy, and what it sends."""
    yield f"{'each rank':18}" + "".join(f"{strategy:>12}" for strategy in STRATEGIES)
    columns = [memory(job, s) | {"sent per step": sent(job, s)} for s in STRATEGIES]
    for kind in columns[0]:
        if any(column[kind] for column in columns):
            yield f"{kind:18}" + "".join(f"{size(column[kind]):>12}" for column in columns)


def size(count: float) -> str:
    """Return a number of bytes as text, in MB or GB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"
