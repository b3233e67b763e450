"""How alike the blocks of a stack are in their weights (arXiv 2512.08819, section 4.4), and why they can be."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ..growth import Ancestry, ancestry
from .measurement import Measurement, heatmap
from .probe import Probe


@dataclass(frozen=True)
class BlockSimilarity(Measurement):
    """
    Args:
        similarity: (blocks, blocks), the cosine of two blocks' MLP weights, each block's as one long vector.
        block: Unique layers of a block.
    """

    title = "Blocks alike in their weights"
    reading = (
        "Cosine between the MLP weights of two blocks: blocks that were one before growth stay alike, and LIDAS has them "
        "alike on both sides of the centre."
    )
    overlay = False

    similarity: np.ndarray
    block: int

    @property
    def asymmetry(self) -> float:
        """Mean absolute difference between the matrix and itself with the blocks in reverse; 0 is symmetric about the centre."""
        return float(np.abs(self.similarity - self.similarity[::-1, ::-1]).mean())

    @property
    def mean(self) -> float:
        """Mean cosine of two different blocks."""
        return float(self.similarity[~np.eye(len(self.similarity), dtype=bool)].mean())

    def to_frame(self):
        import pandas as pd

        pairs = [(i, j) for i in range(len(self.similarity)) for j in range(len(self.similarity))]
        columns = {"block": [i for i, _ in pairs], "other": [j for _, j in pairs]}
        return pd.DataFrame({**columns, "similarity": [self.similarity[pair] for pair in pairs]})

    def plot(self, ax, label=None, color="#1f5fa8"):
        heatmap(ax, self.similarity, f"block of {self.block} layers", "block", low=min(0.0, self.similarity.min()))
        if label:
            ax.set_title(label, fontsize="small")

    def headline(self):
        return (
            f"Two of {len(self.similarity)} blocks have a mean cosine of {self.mean:.3f}; mirrored about the centre it "
            f"differs by {self.asymmetry:.3f}."
        )


def block_similarity(model, block: int | None = None) -> BlockSimilarity:
    """
    Unique layers are compared, in their order: a loop's passes share their weights, and would say nothing. The weights
    are the matrices of a layer's module `mlp`, where it has one; `Anatomy.mlp` is another module where a norm stands
    between the sublayer and the stream.

    Args:
        model: A causal language model, or a `Probe` of one.
        block: Unique layers of a block. By default the block that a grown model grew by, or the core of a loop, where
            the prelude and the coda are whole blocks of that size.

    Raises:
        `ValueError`: where there is no such default, or the layers are not two blocks of `block` or more.
    """
    probe = Probe.of(model)
    layers = probe.layers
    block = _default_block(probe) if block is None else block
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or len(layers) % block:
        raise ValueError(f"block={block!r} must be a divisor of the {len(layers)} unique layers.")
    if len(layers) < 2 * block:
        raise ValueError(f"block={block} leaves one block of the {len(layers)} unique layers: use a smaller one.")
    count = len(layers) // block
    products = np.zeros((count, count))
    for phase in range(block):
        stacks = [_mlp(layer, probe.anatomy.mlp) for layer in layers[phase::block]]
        for matrices in zip(*stacks, strict=True):
            vectors = torch.stack([matrix.detach().flatten().float() for matrix in matrices])
            products += (vectors @ vectors.T).double().cpu().numpy()
    norms = np.sqrt(np.diag(products))
    return BlockSimilarity(products / np.outer(norms, norms), block)


def _default_block(probe: Probe) -> int:
    block, grown = probe.block, bool(getattr(probe.model.config, "history", None))
    if block is not None and (grown or all(end % block == 0 for end in probe.boundaries)):
        return block
    raise ValueError(
        f"block is missing: {type(probe.model).__name__} of {len(probe.layers)} unique layers neither grew nor is a loop "
        "whose prelude and coda are as long as its core, or a multiple. Say how many layers a block has."
    )


def _mlp(layer: nn.Module, path: str) -> list[torch.Tensor]:
    module = getattr(layer, "mlp", None) or layer.get_submodule(path)
    return [parameter for parameter in module.parameters() if parameter.dim() > 1]


@dataclass(frozen=True)
class GrowthAncestry(Measurement):
    """
    Args:
        ancestry: Where each layer comes from.
        block: Layers that each growth added.
    """

    title = "When layers parted"
    reading = (
        "The growth at which two layers last shared their weights: the later they parted, the more alike they can be. "
        "Blank: they never did."
    )
    overlay = False

    ancestry: Ancestry
    block: int

    @property
    def splits(self) -> np.ndarray:
        """(layers, layers), the number of the growth (from 1), 0 where two layers never were one."""
        return np.array(self.ancestry.splits)

    @property
    def is_symmetric(self) -> bool:
        """Whether the stack's two halves mirror each other, as LIDAS has it and MIDAS has not."""
        return bool((self.splits == self.splits[::-1, ::-1]).all())

    def to_frame(self):
        import pandas as pd

        created, origin, splits = self.ancestry.created, self.ancestry.origin, self.splits
        rows = [(i, j, origin[i], created[i], splits[i, j]) for i in range(len(origin)) for j in range(len(origin))]
        return pd.DataFrame(rows, columns=["layer", "other", "origin", "created", "split"])

    def plot(self, ax, label=None, color="#1f5fa8"):
        values = np.where(self.splits > 0, self.splits, np.nan)
        boundaries = range(self.block, len(values), self.block)
        heatmap(ax, values, "layer", "layer", boundaries, low=0.0, high=max(1, self.splits.max()))
        if label:
            ax.set_title(label, fontsize="small")

    def headline(self):
        depth, growths = len(self.ancestry.origin), self.splits.max()
        mirrored = "mirrors itself about its centre" if self.is_symmetric else "is no mirror image of itself"
        return (
            f"{depth} layers descend from {len(set(self.ancestry.origin))} in {growths} growths; the stack {mirrored}."
        )


def growth_ancestry(model) -> GrowthAncestry:
    """
    Args:
        model: A grown model, or a `Probe` of one: its configuration's `history` is replayed, and no weight looked at.

    Raises:
        `ValueError`: for a model without a history of growth.
    """
    config = model.model.config if isinstance(model, Probe) else model.config
    found = ancestry(config)
    return GrowthAncestry(found, config.history[-1]["block_size"])
