"""The order in which data items are drawn, and a cursor that survives a kill.

First station of the loop: the controller asks for the next draw, admits it to the pool, and marks
its key consumed when the group has ended for good. Produces `Draw`s; waits for nothing.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nexrl.config.schema import DataConfig, SourceConfig
from nexrl.data.sources import PromptLength, Source, load_filter, open_sources
from nexrl.errors import ConfigError, InvariantError
from nexrl.types import Draw, derive_seed

MIXTURE_BLOCK = 4096
"""Uniform numbers made at once; part of the order, never to be changed."""


_Visit = tuple[int, int, int, int]
"""Order, source index, epoch and row: all it takes to make a draw again. Plain, because one is made
for every draw."""


class DataLoader:
    """Draws from one or several sources: shuffled, mixed by weight, for some epochs or endlessly.

    Invariants. The order is a pure function of (data, seed, shuffle, weights): draw k is the same
    in every run, whatever happened before. Every visit is in exactly one of three places: not yet
    issued, outstanding (issued and not consumed), or consumed. `state_dict` keeps the border of
    the first and the list of the second, so a resumed loader issues the outstanding visits again,
    in their order and with their numbers, and then goes on: no item is lost, and none is seen
    twice (FR-131).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        """`sources` must differ in name and share no item id; `epochs` None never ends."""
        _check_distinct(sources)
        self._sources = tuple(sources)
        self._fingerprint = _fingerprint(sources)
        self._seed = seed
        self._shuffle = shuffle
        self._passes = [_Pass(s, seed=seed, shuffle=shuffle, epochs=epochs) for s in sources]
        self._mixture = _Mixture([s.weight for s in sources], seed=seed)
        self._next_order = 0
        self._outstanding: dict[str, _Visit] = {}
        self._again: deque[_Visit] = deque()

    @classmethod
    def open(
        cls,
        config: DataConfig,
        *,
        recipe_dir: Path,
        seed: int,
        prompt_length: PromptLength | None = None,
        needs_prompt: bool = True,
    ) -> DataLoader:
        """Read, check and filter the sources of a configuration; blocking. As for `open_sources`."""
        sources = open_sources(
            config.sources,
            section="data",
            data=config,
            recipe_dir=recipe_dir,
            keep=load_filter(config, recipe_dir=recipe_dir),
            prompt_length=prompt_length,
            needs_prompt=needs_prompt,
        )
        return cls(sources, seed=seed, shuffle=config.shuffle, epochs=config.epochs)

    @property
    def num_items(self) -> int:
        """Items in all sources, after filters."""
        return sum(len(source.rows) for source in self._sources)

    @property
    def left_out(self) -> dict[str, int]:
        """Items left out, by reason."""
        counts: Counter[str] = Counter()
        for source in self._sources:
            counts.update({reason: len(ids) for reason, ids in source.left_out.items()})
        return dict(counts)

    @property
    def fingerprint(self) -> str:
        """blake2b-128 of the data set: contents and weights of all sources, and the kept items."""
        return self._fingerprint

    def next_draw(self) -> Draw | None:
        """The next draw; None when all epochs are used up."""
        visit = self._again.popleft() if self._again else self._issue()
        if visit is None:
            return None
        order, source_index, epoch, row = visit
        source = self._sources[source_index]
        item_id = source.item_ids[row]
        self._outstanding[f"{item_id}/{epoch}"] = visit
        return Draw(
            item_id=item_id, draw=epoch, row=source.rows[row], source=source.name, order=order
        )

    def mark_consumed(self, keys: Iterable[str]) -> None:
        """The groups of these draws (`Draw.key`) have ended for good: trained, or given up.

        Raises InvariantError for a draw that is not outstanding, because a draw consumed twice
        or never issued means that somebody lost count.
        """
        for key in keys:
            if self._outstanding.pop(key, None) is None:
                raise InvariantError(
                    f"draw {key!r} is consumed but not outstanding: it was never issued, or it was "
                    f"consumed before ({len(self._outstanding)} draws are outstanding)"
                )

    def _issue(self) -> _Visit | None:
        order = self._next_order
        index = self._mixture.choose(order)
        if index is None:
            return None
        epoch, row = self._passes[index].advance()
        if self._passes[index].ended:
            self._mixture.remove(index)
        self._next_order = order + 1
        return order, index, epoch, row

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, and what was issued and not consumed; JSON-compatible."""
        outstanding = sorted([*self._outstanding.values(), *self._again])
        return {
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "next_order": self._next_order,
            "passes": [[p.epoch, p.position] for p in self._passes],
            "outstanding": [list(visit) for visit in outstanding],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; ConfigError when data or order are not the same."""
        for key, now in (
            ("fingerprint", self._fingerprint),
            ("seed", self._seed),
            ("shuffle", self._shuffle),
        ):
            if state[key] != now:
                what = "data set" if key == "fingerprint" else f"order ({key})"
                raise ConfigError(
                    f"cannot resume: the {what} is not the one of the checkpoint: {key} was "
                    f"{state[key]}, now it is {now} ({self.num_items} items in "
                    f"{[s.name for s in self._sources]}); restore it, or start a new run"
                )
        self._mixture = _Mixture([s.weight for s in self._sources], seed=self._seed)
        for i, (source_pass, (epoch, position)) in enumerate(
            zip(self._passes, state["passes"], strict=True)
        ):
            source_pass.move_to(int(epoch), int(position))
            if source_pass.ended:
                self._mixture.remove(i)
        self._next_order = int(state["next_order"])
        self._outstanding = {}
        self._again = deque((int(o), int(s), int(e), int(r)) for o, s, e, r in state["outstanding"])


def create_validation_draws(
    sources: Sequence[SourceConfig],
    *,
    data: DataConfig,
    recipe_dir: Path,
    max_items: int | None = None,
    prompt_length: PromptLength | None = None,
    needs_prompt: bool = True,
) -> list[Draw]:
    """One draw of each held-out item, in file order, source after source; blocking.

    Columns and the length limit are those of `data`; its filter is not applied, because it shapes
    training data. `max_items` counts what the length limit leaves.
    """
    opened = open_sources(
        sources,
        section="validate",
        data=data,
        recipe_dir=recipe_dir,
        limit=max_items if data.max_prompt_tokens is None else None,
        prompt_length=prompt_length,
        needs_prompt=needs_prompt,
    )
    _check_distinct(opened)
    items = (
        (source, item_id, row)
        for source in opened
        for item_id, row in zip(source.item_ids, source.rows, strict=True)
    )
    return [
        Draw(item_id=item_id, draw=0, row=row, source=source.name, order=order)
        for order, (source, item_id, row) in enumerate(itertools.islice(items, max_items))
    ]


class _Pass:
    """Walks one source: `position` items of `epoch` are issued, in that epoch's permutation."""

    def __init__(self, source: Source, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        self._num_rows = len(source.rows)
        self._seed_of = (seed, "shuffle", source.name)
        self._shuffle = shuffle
        self._epochs = epochs
        self.move_to(0, 0)

    @property
    def ended(self) -> bool:
        """All epochs are used up."""
        return self._epochs is not None and self.epoch >= self._epochs

    def advance(self) -> tuple[int, int]:
        """Epoch and row of the next visit."""
        epoch, row = self.epoch, self._rows[self.position]
        self.position += 1
        if self.position == self._num_rows:
            self.move_to(epoch + 1, 0)
        return epoch, row

    def move_to(self, epoch: int, position: int) -> None:
        """Stand before the given visit."""
        self.epoch, self.position = epoch, position
        self._rows: Sequence[int] = range(self._num_rows)
        if self._shuffle:
            # Raw bits of a bit generator are the only numpy stream that never changes.
            bits = np.random.PCG64(derive_seed(*self._seed_of, epoch)).random_raw(self._num_rows)
            self._rows = np.argsort(bits, kind="stable").tolist()


class _Mixture:
    """Chooses a source for each place in the order, by weight, among those that have not ended.

    Invariant: the number behind a choice depends on seed and place alone, never on history.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        self._weights = dict(enumerate(weights))
        self._seed = seed
        self._start = 0
        self._choices: list[int] = []

    def choose(self, order: int) -> int | None:
        """Index of the source; None when all have ended."""
        offset = order - self._start
        if not 0 <= offset < len(self._choices):
            if not self._weights:
                return None
            block, offset = divmod(order, MIXTURE_BLOCK)
            self._start = order - offset
            self._choices = self._choose_block(block)
        return self._choices[offset]

    def remove(self, index: int) -> None:
        """A source has ended; the others share its part."""
        del self._weights[index]
        self._choices = []

    def _choose_block(self, block: int) -> list[int]:
        bits = np.random.PCG64(derive_seed(self._seed, "mixture", block)).random_raw(MIXTURE_BLOCK)
        uniforms = (bits >> np.uint64(11)) * 2.0**-53
        borders = np.cumsum(list(self._weights.values()))
        places = np.searchsorted(borders[:-1], uniforms * borders[-1], side="right")
        chosen: list[int] = np.array(list(self._weights))[places].tolist()
        return chosen


def _fingerprint(sources: Sequence[Source]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        digest.update(f"{source.name}\x1f{source.fingerprint}\x1f{source.weight}\n".encode())
        if source.left_out:
            digest.update("\x1f".join(source.item_ids).encode(errors="surrogatepass"))
    return digest.hexdigest()


def _check_distinct(sources: Sequence[Source]) -> None:
    names = Counter(source.name for source in sources)
    repeated = sorted(name for name, count in names.items() if count > 1)
    if repeated:
        raise ConfigError(f"two sources are named {repeated[0]!r}; give each a `name` of its own")
    owner: dict[str, str] = {}
    for source in sources if len(sources) > 1 else ():
        for item_id in source.item_ids:
            other = owner.setdefault(item_id, source.name)
            if other != source.name:
                raise ConfigError(
                    f"sources {other!r} and {source.name!r} both have an item {item_id!r}; "
                    "data.item_id_key must name a column that is unique over all sources"
                )
