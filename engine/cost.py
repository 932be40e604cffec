"""What a step costs at least: the arithmetic and the bytes no implementation can do without."""

from engine.config import ModelConfig
from engine.gguf import GGUFFile


def multiply_adds(config: ModelConfig, num_rows: int, num_logits: int) -> int:
    """Multiply-adds of the weight products when `num_rows` go through the layers and `num_logits` through the head.

    Attention's own products, which grow with the context, are not among them.
    """
    q_width, kv_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    attention = config.d_model * (q_width + 2 * kv_width) + q_width * config.d_model
    feed_forward = 3 * config.d_model * config.d_ff
    per_row = config.n_layers * (attention + feed_forward)
    return num_rows * per_row + num_logits * config.d_model * config.vocab_size


def weight_bytes(file: GGUFFile) -> int:
    """Bytes of the matrices in `file` that every step with logits reads whole: the layers' and the output head's.

    A token embedding that is not also the head is looked up by the row and not among them.
    """
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    return sum(
        info.n_bytes
        for name, info in file.tensors.items()
        if len(info.shape) == 2 and (name.startswith("blk.") or name == head)
    )
