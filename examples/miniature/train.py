# SPDX-License-Identifier: Apache-2.0
"""Train the miniature: ``python -m examples.miniature.train --out DIR --seed N``, on one GPU.

DIR gets the tokenizer, the weights (anew at every look at the held-out questions, so that an interrupted run
leaves its latest) and ``log.json``: what ran where, the loss curve, and accuracy on held-out questions.

In the last part of the training the experts compute with their MXFP4 values, as the published model was
trained for MXFP4. Before it begins, the accuracy with plainly rounded experts is logged, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from examples.miniature import model as architecture
from examples.miniature import task, vocabulary
from kimi_k3.verify import questions

SHORT: Final = (256, 12)
"""Tokens of a sequence and the most notes in a needle question, three steps out of four."""
LONG: Final = (1024, questions.NEEDLE_NOTES)
LONG_EVERY: Final = 4
QUESTION_WEIGHT: Final = 0.1
"""Of a question's tokens in the loss: mostly chance, yet their distribution should mean something."""
CHARACTERS_A_TOKEN: Final = 4.5
"""More than the text has, so that a sequence is full."""
WARMUP_STEPS: Final = 200
BALANCE_RATE: Final = 2e-3
SHARD_BYTES: Final = 12_000_000


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """One batch a step, which depends on seed and step only: tokens ``[B, T + 1]`` and the loss's weights."""

    def __init__(self, merges: list[tuple[str, str]], *, seed: int, steps: int, tokens: int) -> None:
        self.merges, self.seed, self.steps, self.tokens = merges, seed, steps, tokens
        self.tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if self.tokenizer is None:  # each worker process builds its own
            self.tokenizer = vocabulary.build(self.merges)
        length, notes = LONG if step % LONG_EVERY == LONG_EVERY - 1 else SHORT
        rows = self.tokens // length
        ids = np.full((rows, length + 1), vocabulary.PAD, dtype=np.int64)
        weights = np.zeros((rows, length + 1), dtype=np.float32)
        for row in range(rows):
            segments, characters = [], 0.0
            for text, is_answer in task.training_text(Random(f"{self.seed}/{step}/{row}"), notes=notes):
                segments.append((text, 1.0 if is_answer else QUESTION_WEIGHT))
                characters += len(text)
                if characters > CHARACTERS_A_TOKEN * length:
                    break
            encoded = self.tokenizer.encode_batch([text for text, _ in segments])
            row_ids = [number for piece in encoded for number in piece.ids][: length + 1]
            row_weights = [
                weight for piece, (_, weight) in zip(encoded, segments, strict=True) for _ in piece.ids
            ][: length + 1]
            ids[row, : len(row_ids)] = row_ids
            weights[row, : len(row_weights)] = row_weights
        return torch.from_numpy(ids), torch.from_numpy(weights)


def loss_of(model: architecture.Miniature, tokens: Tensor, weights: Tensor) -> Tensor:
    """Weighted cross-entropy of ``tokens [B, T + 1]``, in nats a token."""
    logits = model(tokens[:, :-1])
    each = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (each * weights).sum() / weights.sum()


@torch.no_grad()
def held_out_accuracy(
    model: architecture.Miniature, tokenizer: Tokenizer, examples: list[questions.Example], rows: int
) -> dict[str, float]:
    """Share of held-out questions, by family, whose whole worked answer the model finds token by token.

    Every token of the answer must be the most probable one after those before it. Greedy decoding then
    writes exactly this answer, so nothing needs to be decoded; a right result by another way counts as wrong.
    """
    device = next(model.parameters()).device
    right: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(examples), rows):
        part = examples[start : start + rows]
        pieces = [[tokenizer.encode(text).ids for text, _ in task.chat_turn(example)] for example in part]
        length = max(len(question) + len(answer) for question, answer in pieces)
        tokens = torch.full((len(part), length), vocabulary.PAD)
        for row, (question, answer) in enumerate(pieces):
            tokens[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        best = model(tokens.to(device)).argmax(-1).cpu()
        for row, (question, answer) in enumerate(pieces):
            first, end = len(question), len(question) + len(answer)
            right[part[row].family].append(
                bool((best[row, first - 1 : end - 1] == tokens[row, first:end]).all())
            )
    by_family = {family: sum(each) / len(each) for family, each in right.items()}
    return by_family | {"all": sum(map(sum, right.values())) / len(examples)}


def save_weights(model: architecture.Miniature, directory: Path) -> None:
    """Write the weights in files of bounded size: matrices as bfloat16, experts and the rest as float32."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        kept = tensor.detach().cpu().to(torch.bfloat16 if tensor.dim() == 2 else torch.float32).contiguous()
        if size + kept.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = kept
        size += kept.nbytes
    for number, shard in enumerate(shards, start=1):
        save_file(shard, directory / f"weights-{number}.safetensors")


def optimizer_of(model: architecture.Miniature, rate: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def compile_blocks(model: architecture.Miniature) -> None:
    """Compile the blocks one by one: that takes a minute, the whole model as one graph many."""
    torch._dynamo.config.recompile_limit = 64
    blocks = (
        architecture.KdaAttention,
        architecture.LatentAttention,
        architecture.LatentMoe,
        architecture.Mlp,
    )
    for layer in model.model.layers:
        for child in layer.children():
            if isinstance(child, blocks):
                child.compile(dynamic=False)
    architecture.residual_mix = torch.compile(architecture.residual_mix, dynamic=False)


def schedule(step: int, steps: int) -> float:
    """The learning rate's factor: up in a straight line, then down to zero in another."""
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def describe(device: torch.device) -> dict[str, Any]:
    """What this runs on."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def train(arguments: argparse.Namespace) -> None:
    """Train, look at the held-out questions ten times, write everything."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(arguments.seed)
    merges = vocabulary.learn_merges()
    tokenizer = vocabulary.build(merges)
    tokenizer.save(str(out / "tokenizer.json"))
    sizes = architecture.Sizes()
    model = architecture.Miniature(sizes).to(device)
    if arguments.compile:
        compile_blocks(model)
    optimizer = optimizer_of(model, arguments.rate)
    examples = questions.held_out_examples(arguments.seed, arguments.held_out)
    steps: int = arguments.steps
    quantise_at = round(arguments.quantise_from * steps)
    data = Batches(merges, seed=arguments.seed, steps=steps, tokens=arguments.tokens)
    loader = DataLoader(
        data, batch_size=None, num_workers=arguments.workers, pin_memory=device.type == "cuda"
    )
    settings = {key: value for key, value in vars(arguments).items() if key != "out"}
    log: dict[str, Any] = {"ran": describe(device), "settings": settings, "sizes": dataclasses.asdict(sizes)}
    log |= {"loss": [], "held_out": []}
    began = time.monotonic()

    def look(step: int, *, quantised: bool) -> None:
        model.eval()
        model.quantise(quantised)
        with torch.compiler.set_stance("force_eager"):
            accuracy = held_out_accuracy(model, tokenizer, examples, rows=64)
        log["held_out"].append({"step": step, "mxfp4": quantised, "accuracy": accuracy})
        print(f"step {step}  held out{' (MXFP4)' if quantised else ''}: {accuracy}", flush=True)
        model.train()

    waiting: list[Tensor] = []
    for step, (tokens, weights) in enumerate(loader):
        if step == quantise_at:
            look(step, quantised=True)
        model.quantise(step >= quantise_at)
        factor = schedule(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * factor
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_of(model, tokens.to(device, non_blocking=True), weights.to(device, non_blocking=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        worst = [router.balance(BALANCE_RATE * factor) for router in model.routers()]
        waiting.append(loss.detach())
        if len(waiting) == arguments.log_every or step + 1 == steps:
            entry = {
                "step": step + 1,
                "loss": round(float(torch.stack(waiting).mean()), 5),
                "load": round(float(torch.stack(worst).max()), 2),
                "seconds": round(time.monotonic() - began, 1),
            }
            waiting = []
            log["loss"].append(entry)
            print(entry, flush=True)
        if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
            look(step + 1, quantised=step >= quantise_at)
            save_weights(model, out)
            log["tokens"] = (step + 1) * arguments.tokens
            (out / "log.json").write_text(json.dumps(log, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=2e-3, help="largest learning rate")
    parser.add_argument(
        "--quantise-from", type=float, default=0.7, help="share of the steps before MXFP4 experts"
    )
    parser.add_argument("--held-out", type=int, default=500, help="held-out questions to look at")
    parser.add_argument("--workers", type=int, default=12, help="processes that make batches")
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
