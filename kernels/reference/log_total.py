"""The logarithm of a row's total weight: what turns a logit into a log-probability."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 4  # on the CPU: as many as the second-level cache holds with a usual vocabulary


def log_total(logits: Tensor) -> Tensor:
    """Return ln sum_i exp(l_i) of each row of `logits` [R, V] of any float dtype, float32 [R].

    `logits` is left as it is. A row of -inf alone, or with NaN or +inf in it, gives NaN.
    """
    if logits.device.type != "cpu":
        return torch.logsumexp(logits.float(), 1)
    # Through log_softmax, which makes one pass where torch's logsumexp makes four.
    parts = []
    for start in range(0, len(logits), ROWS_AT_ONCE):
        rows = logits[start : start + ROWS_AT_ONCE].float()
        best = torch.from_numpy(rows.numpy().argmax(1))[:, None]
        shifted = torch.log_softmax(rows, 1).gather(1, best)
        parts.append((rows.gather(1, best) - shifted)[:, 0])
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float32)
