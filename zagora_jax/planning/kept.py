"""What the forward pass keeps of a layer for the backward pass, and what that computes again; see `models.remat`."""

from models.config import ModelConfig
from models.remat import group_count


def kept_elements(remat: str, model: ModelConfig, layers: int, parts: int = 1) -> int:
    """Return the elements kept of a token, all layers together.

    Args:
        remat: one of `models.remat.REMATS`.
        model: gives widths.
        layers: how many a device runs.
        parts: devices that compute a layer together.
    """
    if remat == "nested":
        groups = group_count(layers)
        return (groups + layers // groups) * model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    of_layer = model.hidden_size
    if remat != "full":
        of_layer += (queries + 2 * model.num_heads) // parts  # the softmax's statistics are float32
    if remat in ("mlp", "none"):
        of_layer += model.hidden_size + (queries + 2 * keys) // parts
    if remat == "none":
        of_layer += 2 * model.intermediate_size // parts
    return of_layer * layers


def keeps_attention(remat: str) -> bool:
    """Whether attention is not computed again."""
    return remat in ("attention", "mlp", "none")
