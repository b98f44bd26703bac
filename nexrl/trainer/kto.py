"""KTO's reference point: how far the policy has moved from the reference on average.

z0 = max(0, mean of log policy(y'|x) - log reference(y'|x)) over mismatched pairs: each row's prompt
x with the response y' of the next row of the optimizer step that answers another prompt, the last
ones with the first (Ethayarajh et al. 2024, section 4.2). It needs forward passes only and carries
no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from nexrl.algorithms.groups import IndexArray
from nexrl.trainer.batching import RowTable, flatten
from nexrl.types import TokenRow, Trajectory


def mismatched_rows(table: RowTable, rows: IndexArray, *, max_tokens: int) -> RowTable:
    """Prompt of each row and response of the next with another prompt, cut to what the model takes.

    Responses are what follows the first trained token. Rows whose prompt leaves no room are left
    out; the table is empty when all rows have one prompt.
    """
    made = [
        _joined(table, prompt, response, max_tokens) for prompt, response in _pairs(table, rows)
    ]
    mismatched = flatten([Trajectory(rows=(row,)) for row in made])
    return replace(mismatched, temperatures=np.ones(mismatched.num_rows))


def _pairs(table: RowTable, rows: IndexArray) -> Iterator[tuple[int, int]]:
    numbers = rows.tolist()
    prompts = [table.token_ids[table.starts[r] : _border(table, r)].tobytes() for r in numbers]
    for place, row in enumerate(numbers):
        others = (*range(place + 1, len(numbers)), *range(place))
        found = next((other for other in others if prompts[other] != prompts[place]), None)
        if found is not None:
            yield row, numbers[found]


def _joined(table: RowTable, prompt: int, response: int, max_tokens: int) -> TokenRow:
    own, other = _border(table, prompt), _border(table, response)
    before = table.token_ids[table.starts[prompt] : own]
    after = table.token_ids[other : table.starts[response] + table.lengths[response]]
    token_ids = np.concatenate([before, after])[:max_tokens]
    return TokenRow(token_ids=token_ids, loss_mask=np.arange(len(token_ids)) >= len(before))


def _border(table: RowTable, row: int) -> int:
    """Position in the table of a row's first trained token."""
    start = int(table.starts[row])
    return start + int(np.argmax(table.mask[start : start + int(table.lengths[row])]))
