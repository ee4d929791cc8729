"""The two arguments of every `measure`: the user's options, and the bench.

`Options` contains the choices of the command line. `Bench` describes the GPU, and contains the
functions that show progress.
"""

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
# Folders for runs and figures of fewer or other sizes. FIGURES contains only complete ones.
QUICK, FILTERED = FIGURES / "quick", FIGURES / "filtered"

# Fields of `Options` with which a user chooses a part of an experiment.
CHOICES = ("seqlens", "head_dims", "causal", "tiles")
# Options that not every experiment takes: these fields, and the time limit of a run.
LIMITED = (*CHOICES, "seconds")

T = TypeVar("T")


class Refused(Exception):
    """Raised if an experiment is not measured. The message, one line of text, is the reason."""


@dataclass(frozen=True)
class Options:
    """The user's choices on the command line.

    Parameters
    ----------
    quick : bool, default False
        Whether to measure a few small sizes only, in seconds.
    seqlens : tuple of int, optional
        Sequence lengths. None: the lengths that the experiment defines.
    head_dims : tuple of int, optional
        Head dimensions. None: the head dimensions that the experiment defines.
    causal : tuple of bool, optional
        Masks: True is causal, False is no mask. None: the masks that the experiment defines.
    tiles : tuple of (int, int), optional
        Tile sizes (Br, Bc). None: the tile sizes that the experiment defines.
    out : Path, default FIGURES
        Folder to which figures are written. Data are written to the folder "data" inside.
    recount : bool, default False
        Whether to count on the emulator even if stored counts are still valid.
    replace : bool, default False
        Whether to replace a recording even if it has numbers that this machine cannot measure.
        These numbers are then lost.
    seconds : float, optional
        Time limit of the run. With a limit, rows are added to the recording as they are measured,
        and rows that are stored already are not measured again. None: there is no limit.
    """

    quick: bool = False
    seqlens: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    causal: tuple[bool, ...] | None = None
    tiles: tuple[tuple[int, int], ...] | None = None
    out: Path = FIGURES
    recount: bool = False
    replace: bool = False
    seconds: float | None = None

    @property
    def complete(self) -> bool:
        """Return whether a run with these options measures the complete experiment."""
        return not self.quick and not any(getattr(self, name) for name in CHOICES)

    def grid(
        self, make: Callable[[int, int, bool], T], seqlens: Sequence[int], head_dims: Sequence[int],
        masks: Sequence[bool] = (False,),
    ) -> list[T]:  # fmt: skip
        """Call `make` for each head dimension, mask and sequence length, and return the results.

        If the user chose head dimensions, masks or sequence lengths on the command line, these
        replace the experiment's values.

        Parameters
        ----------
        make : callable
            Takes a sequence length, a head dimension and whether the mask is causal.
        seqlens : sequence of int
            The experiment's sequence lengths.
        head_dims : sequence of int
            The experiment's head dimensions.
        masks : sequence of bool, default (False,)
            The experiment's masks.

        Returns
        -------
        list
            Results of `make`: the length changes fastest, then the mask, then the head dimension.

        Examples
        --------
        >>> Options(seqlens=(64,)).grid(lambda N, d, causal: (N, d, causal), (512, 1024), (64, 128))
        [(64, 64, False), (64, 128, False)]
        """
        return [
            make(N, d, mask)
            for d in self.head_dims or head_dims
            for mask in self.causal or masks
            for N in self.seqlens or seqlens
        ]

    def admits(self, row: Any) -> bool:
        """Return whether a row, or a problem, matches the user's choices.

        Parameters
        ----------
        row : Row or Problem
            Anything with `seqlen_q`, `seqlen_k`, `head_dim` and `causal`; with Br and Bc if the
            user chose tiles.

        Returns
        -------
        bool
            Whether every choice of the user matches. Always True for published rows. For the
            sequence lengths it is enough that `seqlen_q` or `seqlen_k` is among the chosen lengths.

        Examples
        --------
        >>> from fa_numba.problem import Problem
        >>> problem = Problem(1, 1, 1, 1, 512, 64)
        >>> Options(seqlens=(512,)).admits(problem), Options(head_dims=(128,)).admits(problem)
        (True, False)
        """
        return getattr(row, "source", "") == PUBLISHED or (
            (self.seqlens is None or not {row.seqlen_q, row.seqlen_k}.isdisjoint(self.seqlens))
            and (self.head_dims is None or row.head_dim in self.head_dims)
            and (self.causal is None or row.causal in self.causal)
            and (self.tiles is None or (row.Br, row.Bc) in self.tiles)
        )


@dataclass
class Bench:
    """Facts about this machine, and the functions that an experiment calls while it measures.

    Parameters
    ----------
    machine : str, optional
        Name of this machine's GPU as a file name, such as "nvidia-h200". None without a GPU.
    describe : dict, optional
        Result of `fa_numba.device.describe`: name, limits and driver of the GPU.
    progress : callable, optional
        Takes items and a label, shows a progress bar with the label and yields the items.
    say : callable, default print
        Prints a line for the user.
    kept : sequence of Row, default ()
        Stored counts that are still valid. They are used instead of counting again.
    recorder : Recorder, optional
        Stores rows, and knows the items that an interrupted run has already measured.
    stored : sequence of Row, default ()
        Rows of this machine's recording that need not be measured again. Only a run with a time
        limit has such rows.
    over : callable
        Returns whether the time limit of the run has passed.
    """

    machine: Any = None
    describe: Any = None
    progress: Callable[[Sequence[Any], str], Iterable[Any]] | None = None
    say: Callable[[str], None] = print
    kept: Sequence[Row] = ()
    recorder: Recorder | None = None
    stored: Sequence[Row] = ()
    over: Callable[[], bool] = lambda: False

    def track(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Yield the items while showing progress.

        Parameters
        ----------
        items : sequence
            The items over which the experiment loops, such as problems.
        label : str
            Text of the progress bar.

        Yields
        ------
        item
            Each item.
        """
        yield from self.progress(items, label) if self.progress and items else items

    def each(self, items: Sequence[T], label: str) -> Iterator[T]:
        """Yield the items while showing progress. Skip items that an interrupted run has finished.

        The body of the loop must yield all rows of an item before it takes the next item.

        Parameters
        ----------
        items : sequence
            The items over which the experiment loops, such as problems.
        label : str
            Text of the progress bar. When an interrupted run is resumed, the label identifies the
            loop.

        Yields
        ------
        item
            Each item that is not finished.
        """
        yield from self.unfinished(self.left(items, label), label)

    def left(self, items: Sequence[T], label: str) -> list[tuple[str, T]]:
        """Return the items that an interrupted run has not finished, as pairs (name, item).

        An experiment calls `left` and `unfinished` instead of `each` if it must know all remaining
        items before the loop.

        Parameters
        ----------
        items : sequence
            The items over which the experiment loops.
        label : str
            Text of the progress bar. When an interrupted run is resumed, the label identifies the
            loop.

        Returns
        -------
        list of (str, item)
            The remaining items with their names. The names are empty without a recorder.
        """
        if self.recorder is None:
            return [("", item) for item in items]
        left = self.recorder.left(items, label)
        if len(left) < len(items):
            self.say(f"  {label}: {len(items) - len(left)} of {len(items)} are stored already")
        return left

    def unfinished(self, left: Sequence[tuple[str, T]], label: str) -> Iterator[T]:
        """Yield the items of `left` while showing progress, until the time limit has passed.

        The body of the loop must yield all rows of an item before it takes the next item.

        Parameters
        ----------
        left : sequence of (str, item)
            The result of `left`.
        label : str
            Text of the progress bar.

        Yields
        ------
        item
            Each item.
        """
        shown = self.track(left, label)
        each = (item for _, item in shown) if self.recorder is None else self.recorder.each(shown)
        for item in each:
            yield item
            if self.over():
                # The recorder stores the rows of this item when the next item is taken.
                next(each, None)
                return

    def counted(
        self, work: Sequence[tuple[Any, ...]], label: str,
        count: Callable[..., Iterable[Row | Sequence[Row]]],
    ) -> Iterator[Row | Sequence[Row]]:  # fmt: skip
        """Yield the rows that the emulator counts, or stored counts that are still valid.

        Stored counts are valid if the code and the kernels that produced them have not changed.

        Parameters
        ----------
        work : sequence of tuple
            One tuple of arguments for each call ``count(*arguments)``.
        label : str
            Text of the progress bar.
        count : callable
            Takes the arguments, counts, and yields rows.

        Yields
        ------
        Row or sequence of Row
            The counts.
        """
        if self.kept:
            self.say(f"  {len(self.kept)} counts are taken from the recording (same code, kernels)")
            yield self.kept
            return
        for item in self.each(work, label):
            yield from count(*item)
