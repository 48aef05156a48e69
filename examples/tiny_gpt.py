"""A small GPT that survives a power failure: the whole of what a training script needs, in one file.

    python examples/tiny_gpt.py --dir /tmp/run                                  # alone
    torchrun --nproc-per-node 2 examples/tiny_gpt.py --dir /tmp/run             # two ranks, DDP

The four lines that matter are marked (1) to (4). Without a powerguard daemon the script trains as it always did;
with one it snapshots, stops and parks when the daemon says so. Run it again with the same --dir and it goes on from
the newest whole checkpoint, bit for bit as if nothing had happened: parameters, optimizer, schedule, dropout, data.

`powerguard drill` trains this same file, and compares its --trace with that of a run that nobody interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# Bit-exact on a GPU needs this before CUDA starts; on a CPU it means nothing.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import powerguard

VOCABULARY = 96


class Text:
    """Endless synthetic text with a position: what a stateful data loader is to a real run."""

    def __init__(self, rank: int, batch: int, length: int) -> None:
        self.rank, self.batch, self.length, self.position = rank, batch, length, 0

    def __next__(self) -> Tensor:
        """The batch at the position; a noisy arithmetic progression, so that there is something to learn."""
        source = torch.Generator().manual_seed(1_000_003 * self.rank + self.position)
        start = torch.randint(VOCABULARY, (self.batch, 1), generator=source)
        stride = torch.randint(1, 5, (self.batch, 1), generator=source)
        noise = torch.randint(0, 2, (self.batch, self.length + 1), generator=source)
        self.position += 1
        return (start + stride * torch.arange(self.length + 1) + noise) % VOCABULARY

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = int(state["position"])


class Block(nn.Module):
    """Attention and a feed-forward part, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = self.dropout(weights.masked_fill(future, float("-inf")).softmax(-1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(rows, length, width)))
        return x + self.dropout(self.mlp(self.before_mlp(x)))


class TinyGPT(nn.Module):
    """Tokens in, logits of the next token out."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))


class Trace:
    """One JSON line a step, in a file of this rank: losses as hex floats, so that equal means equal in every bit."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.rank = rank
        self.file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / f"rank-{rank:05}.jsonl").open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        if self.file is not None:
            at = time.clock_gettime(time.CLOCK_BOOTTIME)
            self.file.write(json.dumps({"at": round(at, 3), "rank": self.rank, "pid": os.getpid(), **facts}) + "\n")


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def join(seed: int) -> tuple[int, torch.device]:
    """Join the other ranks, if torchrun started any; the rank of this process and its device."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed + rank)  # dropout differs between ranks; DDP makes the parameters those of rank 0
    return rank, device


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of the whole run")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="file for the trained parameters")
    parser.add_argument("--trace", type=Path, help="folder for one line a step, to compare runs bit for bit")
    parser.add_argument("--pace", type=float, default=0.0, help="a step lasts at least so many seconds (for drills)")
    return parser.parse_args()


def main() -> int:
    args = options()
    rank, device = join(args.seed)
    trace = Trace(args.trace, rank)

    model: nn.Module = TinyGPT(args.width, args.layers, args.length).to(device)
    if dist.is_initialized():
        # DDP rearranges its buckets after the first step. A sum of three or more then has another order, so the first
        # step of a resumed run would differ in the last bit; with find_unused_parameters the buckets stay.
        model = DistributedDataParallel(model, find_unused_parameters=dist.get_world_size() > 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    text = Text(rank, args.batch, args.length)

    # (1) What a checkpoint holds: whatever has state_dict(). The random states of torch come by themselves.
    guard = powerguard.attach({"model": model, "optimizer": optimizer, "scheduler": scheduler, "text": text}, args.dir)
    # (2) The newest whole checkpoint is loaded; the first step to run, 0 if there is none.
    first = guard.resume()
    trace.write(event="start", step=first)

    for step in range(first, args.steps):
        began = time.monotonic()
        batch = next(text).to(device)
        logits = model(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        trace.write(event="step", step=step, loss=float(loss.item()).hex())
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
        time.sleep(max(0.0, args.pace - (time.monotonic() - began)))
        # (3) Once a step, after everything that the step changes: true when this node is about to lose its power.
        if guard.boundary(step):
            break

    if not guard.stopped:
        trace.write(event="end", step=args.steps - 1, parameters=fingerprint(model))
        if args.save is not None and rank == 0:
            torch.save(model.state_dict(), args.save)
        if dist.is_initialized():
            dist.destroy_process_group()
    # (4) 75 when stopped by a power failure, so that a scheduler queues the run again; 0 when done.
    return guard.exit_code


if __name__ == "__main__":
    sys.exit(main())
