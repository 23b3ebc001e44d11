# SPDX-License-Identifier: Apache-2.0
"""The miniature's tokenizer: byte-level BPE whose merges come from the task's own text.

One token per byte with the byte's number first, the merges after them, the special tokens of the published
vocabulary last. Digits and line ends never merge: a number reads digit by digit, and text cut at the end of a
line has the same tokens as in one piece.
"""

from __future__ import annotations

import json
from itertools import islice
from random import Random
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.miniature import task

VOCAB_SIZE: Final = 704
"""A multiple of 64; the task has about 200 words, each of which becomes one token with or without a space."""
BYTES: Final = 256
SPECIAL_TOKENS: Final = (
    "[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "<|media_pad|>", "[PAD]",
)  # fmt: skip
PAD: Final = VOCAB_SIZE - 1
TEXTS: Final = 20_000
"""Pieces of text that the merges are learnt from."""


def byte_alphabet() -> list[str]:
    """The character byte-level BPE writes for each byte: itself if visible, else from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (chr(0x100 + number) for number in range(BYTES))
    return [chr(byte) if byte in visible else next(hidden) for byte in range(BYTES)]


def _plain(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def learn_merges(seed: int = 0) -> list[tuple[str, str]]:
    """The merges that the task's text calls for; the same seed gives the same ones."""
    tokenizer = _plain(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS), initial_alphabet=byte_alphabet(), show_progress=False
    )
    random = Random(f"vocabulary/{seed}")
    texts = (text for _ in range(TEXTS // 20) for text, _ in islice(task.training_text(random, notes=8), 20))
    # Special tokens are never merged with their neighbours; to the trainer they are borders of texts.
    pieces = (piece for text in texts for piece in _between_special_tokens(text))
    tokenizer.train_from_iterator(pieces, trainer)
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def _between_special_tokens(text: str) -> list[str]:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]


def special_tokens(merges: int) -> dict[str, int]:
    """Ids of the special tokens behind ``merges`` merges; reserved ones fill what is left."""
    first = BYTES + merges
    named = SPECIAL_TOKENS[:-1]
    ids = {content: first + number for number, content in enumerate(named)}
    ids |= {f"<|reserved_token_{token}|>": token for token in range(first + len(named), PAD)}
    return ids | {SPECIAL_TOKENS[-1]: PAD}


def build(merges: list[tuple[str, str]]) -> Tokenizer:
    """The tokenizer of these merges."""
    pieces = [*byte_alphabet(), *("".join(pair) for pair in merges)]
    tokenizer = _plain(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=merges))
    special = special_tokens(len(merges))
    tokenizer.add_special_tokens(list(special))
    ids: Any = tokenizer.get_vocab()
    if any(ids[content] != number for content, number in special.items()):
        raise ValueError("the special tokens are not where the vocabulary ends")
    return tokenizer
