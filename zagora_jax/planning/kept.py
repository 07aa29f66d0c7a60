"""How much the forward pass keeps of a layer for the backward pass; what it keeps is `models.remat`'s to say."""

from models.config import ModelConfig
from models.remat import KEPT, group_count


def kept_elements(remat: str, model: ModelConfig, layers: int, parts: int = 1) -> int:
    """Return the elements kept of a token, all layers together, of 16 bits each.

    Args:
        remat: one of `models.remat.REMATS`.
        model: gives widths.
        layers: how many a device runs.
        parts: devices that compute a layer together.
    """
    hidden = model.hidden_size
    if remat == "nested":
        groups = group_count(layers)
        return (groups + layers // groups) * hidden
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    widths = {
        "attention_output": queries,
        "attention_statistics": 2 * model.num_heads,  # float32
        "query": queries,
        "key": keys,
        "value": keys,
        "residual": hidden * parts,  # whole on each device
        "gate": model.intermediate_size,
        "up": model.intermediate_size,
    }
    return (hidden + sum(widths[name] for name in KEPT[remat]) // parts) * layers


def keeps_attention(remat: str) -> bool:
    """Whether attention is not computed again."""
    return "attention_output" in KEPT.get(remat, ())
