"""What a run was asked for, and where it runs, as every experiment receives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .store import PUBLISHED, Row

if TYPE_CHECKING:
    from .recorder import Recorder

REPOSITORY = Path(__file__).resolve().parents[3]
FIGURES = REPOSITORY / "figures"
# Where runs and figures of fewer or other sizes go, so that FIGURES has complete ones alone.
QUICK, FILTERED = FIGURES / "quick", FIGURES / "filtered"

# Fields of `Options` by which a part of an experiment is asked for.
CHOICES = ("seqlens", "head_dims", "causal", "tiles")

T = TypeVar("T")


class Refused(Exception):
    """Why something is not measured, said in a line."""


@dataclass(frozen=True)
class Options:
    """Choices from the command line, None where nothing was chosen; `tiles` are (Br, Bc). `quick`
    shrinks an experiment to seconds, `recount` counts what was counted from the same sources too,
    `replace` records without what `review` finds lacking. Data go to `out`/data.
    """

    quick: bool = False
    seqlens: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    causal: tuple[bool, ...] | None = None
    tiles: tuple[tuple[int, int], ...] | None = None
    out: Path = FIGURES
    recount: bool = False
    replace: bool = False

    @property
    def complete(self) -> bool:
        """Whether a run with these options measures everything that an experiment has."""
        return not self.quick and not any(getattr(self, name) for name in CHOICES)

    def grid(
        self, make: Callable[[int, int, bool], T], seqlens: Sequence[int], head_dims: Sequence[int],
        masks: Sequence[bool] = (False,),
    ) -> list[T]:  # fmt: skip
        """make(N, d, mask) of what was asked for, else of these: by head dimension, mask, N."""
        return [
            make(N, d, mask)
            for d in self.head_dims or head_dims
            for mask in self.causal or masks
            for N in self.seqlens or seqlens
        ]

    def admits(self, row: Any) -> bool:
        """Whether a row, or a problem, is among what was asked for: of a length by Q or by K."""
        return getattr(row, "source", "") == PUBLISHED or (
            (self.seqlens is None or not {row.seqlen_q, row.seqlen_k}.isdisjoint(self.seqlens))
            and (self.head_dims is None or row.head_dim in self.head_dims)
            and (self.causal is None or row.causal in self.causal)
            and (self.tiles is None or (row.Br, row.Bc) in self.tiles)
        )


@dataclass
class Bench:
    """Where an experiment runs: `machine` is this GPU as a file name, None without one, `describe`
    what `device.describe` says of it, `kept` the rows counted before from the same sources. What
    the `recorder` has of an interrupted run is not measured again.
    """

    machine: Any = None
    describe: Any = None
    progress: Callable[[Sequence[Any], str], Iterable[Any]] | None = None
    say: Callable[[str], None] = print
    kept: Sequence[Row] = ()
    recorder: Recorder | None = None

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        yield from self.progress(items, label) if self.progress and items else items

    def each(self, items: Sequence[T], label: str) -> Iterator[T]:
        """As `track`, each item's rows given in the loop; what was done before is left out."""
        if self.recorder is None:
            yield from self.track(items, label)
            return
        left = self.recorder.left(items, label)
        if len(left) < len(items):
            self.say(f"  {label}: {len(items) - len(left)} of {len(items)} done before")
        yield from self.recorder.each(self.track(left, label))

    def counted(
        self, work: Sequence[tuple[Any, ...]], label: str,
        count: Callable[..., Iterable[Row | Sequence[Row]]],
    ) -> Iterator[Row | Sequence[Row]]:  # fmt: skip
        """The rows of `count(*item)`, all that the emulator counts, or those kept instead."""
        if self.kept:
            self.say(f"  counted before from the same sources: {len(self.kept)} rows")
            yield self.kept
            return
        for item in self.each(work, label):
            yield from count(*item)
