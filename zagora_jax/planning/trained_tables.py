"""What embedding and head take where they are trained in full: far more than adapters, once a step and not a layer.

A table has float32 parameters, moments and gradient, and a copy in the type of computation. The parameters and moments
are among a step's arguments, and exact; the rest was read from compiled programs (jax 0.10.2) of Llama shapes from 1B
to 8B, which tests/zagora_jax/planning/test_analytic.py holds it to.
"""

import math
from dataclasses import dataclass

from models.cross_entropy import CHUNK_TOKENS
from models.llama import Llama
from models.modules import HEAD
from models.parameters import by_path, split
from zagora_jax.checkpoints.load import is_stacked, trained_in_full

WIDTH = 4  # bytes of a parameter, and of its gradient
COPY = 0.5  # of a table in float32: its copy in 16 bits
LOGITS = 4 + 2  # bytes of one, and of its gradient


@dataclass(frozen=True)
class TrainedTables:
    """Elements of each table that is trained in full, 0 where it is not.

    Attributes:
        embedding: of the embedding, where it is not the head.
        head: of the head.
        others: of what else is trained and belongs to no layer: adapters of the tables, the last norm.
        shared: whether the head is the embedding.
        rows: words.
    """

    embedding: int
    head: int
    others: int
    shared: bool
    rows: int

    @classmethod
    def of(cls, model: Llama) -> "TrainedTables":
        """Measure a declared model."""
        sizes = {path[-2]: variable.get_value().size for path, variable in trained_in_full(model).items()}
        trained = by_path(split(model)[2]).items()
        every = sum(variable.get_value().size for path, variable in trained if not is_stacked(path))
        shared = model.config.tie_embeddings
        embedding, head = sizes.get("embed_tokens", 0), sizes.get(HEAD, 0)
        others = every - embedding - head
        if shared:
            embedding, head = 0, embedding
        return cls(embedding, head, others, shared, model.config.vocab_size)

    @property
    def elements(self) -> int:
        """Of all that is trained and belongs to no layer."""
        return self.embedding + self.head + self.others

    def parameter_bytes(self, shards: int) -> int:
        """Of the tables on a device, where each of `shards` holds a range of the words."""
        return WIDTH * (self.embedding + self.head) // shards

    @property
    def looked_up(self) -> int:
        """Elements of the table in which words are looked up, where it is trained."""
        return self.head if self.shared else self.embedding

    def traffic(self, shards: int, tokens: int) -> float:
        """Return the bytes of device memory that a micro-batch reads and writes for the tables' gradients and copies.

        The head's gradient is added to for every piece of the tokens; that of the embedding is begun, filled and added.
        """
        pieces = math.ceil(tokens / CHUNK_TOKENS)
        head = self.head * (2 * WIDTH * pieces + (1 + COPY) * WIDTH)
        return (head + 3 * WIDTH * self.looked_up) / shards

    def workspace(self, of_layers: int, kept: int, shards: int, tokens: int, *, summed: bool) -> int:
        """Return a step's workspace, the gradients of tables among it.

        It is the largest of three: in the loss, where the head's gradient and copy stand beside the logits; in the
        backward pass, which the head's gradient waits for; and at the update, when all gradients are there.

        Args:
            of_layers: bytes of the workspace without them.
            kept: bytes of what the forward pass keeps.
            shards: how many devices share the words.
            tokens: of a micro-batch.
            summed: whether micro-batches come one after the other, and their gradients are summed.
        """
        head, embedding = WIDTH * self.head / shards, WIDTH * self.embedding / shards
        alone = shards == 1
        # XLA makes room for the embedding's gradient ahead of the loss, unless it goes to a sum of micro-batches; but
        # not where it is a shared table's on one device, or another table's on one of several.
        early = 0.0 if summed or self.shared == alone else head if self.shared else embedding
        in_loss = (1 + COPY) * head + early + LOGITS * min(CHUNK_TOKENS, tokens) * self.rows
        in_backward = of_layers + head + alone * early + self.shared * COPY * head
        at_update = head + WIDTH * self.looked_up / shards - kept
        return round(max(in_loss, in_backward, at_update) + summed * self.parameter_bytes(shards))
