"""The learning rate of an optimizer step: a pure function of its number."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    schedule: Schedule,
    min_ratio: float = 0.0,
) -> float:
    """Learning rate of optimizer step `step`, counted from 0 within a stage.

    Warm-up rises linearly and reaches the peak at its last step. Afterwards linear and cosine fall
    from the peak towards `min_ratio` x peak, which a step numbered `total_steps` would have.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    done, decay_steps = step - warmup_steps, total_steps - warmup_steps
    progress = done / decay_steps if step < total_steps else 1.0
    share = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1.0 - min_ratio) * share)
