"""One benchmark run: build the systems, check that they agree, time them in paired rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from processor.bench.agree import TOLERANCE, Answers, check_agreement
from processor.bench.flops import Shape, event_flops, full_flops, ideal_gain
from processor.bench.points import Point
from processor.bench.result import Entry, rows
from processor.bench.rounds import Times, best_rate, paired_rounds
from processor.engine import bench_chip as chip
from processor.engine.bench_decision import Decision, Unavailable
from processor.engine.bench_systems import (
    FullPrefill,
    Ours,
    StockCache,
    StockModel,
    System,
    Work,
    load_stock,
    random_work,
)
from processor.engine.model import LoadedModel

LABELS = 2
_CHECKED = 2  # events that full prefill is asked for the check: it is slow, and the others do more
_PRODUCT_EVENTS = 16  # rows of the model's own products, in events
_SHORT = 1.0  # seconds: what is faster is run a few times more before it is timed


@dataclass(frozen=True)
class _Lane:
    """A system at a batch size, and what it computes per event."""

    system: System
    entry: Entry

    def run(self) -> Answers:
        places = range(self.entry.batch)
        keys = map(self.system.key, places)
        return list(zip(keys, self.system.score(places), strict=True))

    def warm_up(self) -> Answers:
        begun = time.perf_counter()
        answers = self.run()
        if time.perf_counter() - begun < _SHORT:
            for _ in range(2):
                self.run()
        return answers


class Bench:
    """Measures points with one loaded model. `skip`: names of systems that are not timed."""

    def __init__(
        self,
        loaded: LoadedModel,
        rounds: int,
        seed: int,
        skip: frozenset[str] = frozenset(),
        progress: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self._loaded, self._rounds, self._seed = loaded, rounds, seed
        self._skip, self._progress = skip, progress
        self._shape = Shape(**chip.model_shape(loaded.model))
        self._stock: StockModel | None = None
        self._own_memory: tuple[int, int | None] | None = None

    def measure(self, point: Point) -> dict[str, Any]:
        """The result of one point. Raises `DistrustFigures` where systems disagree."""
        self._progress(f"capturing {point.topics} x {point.prefix} tokens")
        loaded = self._loaded
        work = random_work(loaded, point.prefix, point.suffix, point.topics, self._seed)
        lanes = self._own_lanes(point, work)
        own_answers = {lane.entry.name: lane.warm_up() for lane in lanes}
        self._own_memory = self._own_memory or (chip.peak_rss(), chip.peak_cuda(loaded.device))
        self._progress("loading the other systems")
        stock = self._stock = self._stock or load_stock(loaded)
        full = FullPrefill(loaded, stock, work)
        others, notes = self._other_lanes(point, full, stock, work)
        self._progress("checking that answers agree")
        answers = {lane.entry.name: lane.warm_up() for lane in others}
        tolerance = TOLERANCE[_dtype(stock)]
        difference = check_agreement(
            {"full": _reference(full, [*others, *lanes]), **answers, **own_answers}, tolerance
        )
        times, peaks = self._time([*others, *lanes], stock, point)
        product, peak = peaks["torch"]
        own_product, own_peak = peaks.get("ours", (None, None))
        return {
            **self._facts(point, stock),
            "peak_flops": peak,
            "peak_product": product,
            "own_peak_flops": own_peak,
            "own_peak_product": own_product,
            "tolerance": tolerance,
            "largest_difference": difference,
            "rows": rows([lane.entry for lane in (*others, *lanes)], times, peak),
            **self._memory(),
            "host_ms_per_event": None,
            "host_policy": None,
            "notes": [*notes, *chip.uncounted(stock)],
        }

    def _own_lanes(self, point: Point, work: Work) -> list[_Lane]:
        if "ours" in self._skip:
            return []
        flops = event_flops(self._shape, point.prefix, point.suffix, LABELS)
        ours = Ours(self._loaded, work)
        return [
            _Lane(ours, Entry(ours.name, batch, point.suffix, flops)) for batch in point.batches
        ]

    def _other_lanes(
        self, point: Point, full: FullPrefill, stock: StockModel, work: Work
    ) -> tuple[list[_Lane], list[str]]:
        """The stock systems; and why one of them is left out."""
        shape, skip = self._shape, self._skip
        tokens = point.prefix + point.suffix
        lanes, notes = [], []
        if "full" not in skip:
            entry = Entry(full.name, 1, tokens, full_flops(shape, tokens, LABELS))
            lanes.append(_Lane(full, entry))
        if "transformers" not in skip:
            cached = StockCache(self._loaded, stock, work)
            flops = event_flops(shape, point.prefix, point.suffix, LABELS)
            lanes += [
                _Lane(cached, Entry(cached.name, batch, point.suffix, flops))
                for batch in point.stock_batches
            ]
        if "decision" not in skip:
            try:
                pipeline = Decision(self._loaded, stock, tokens, self._seed)
                flops = full_flops(shape, pipeline.tokens, LABELS)
                entry = Entry(pipeline.name, 1, pipeline.tokens, flops)
                lanes.append(_Lane(pipeline, entry))
            except Unavailable as reason:
                notes.append(f"the decision pipeline is left out: {reason}")
        return lanes, notes

    def _time(
        self, lanes: Sequence[_Lane], stock: StockModel, point: Point
    ) -> tuple[Times, dict[str, tuple[str, float]]]:
        """Seconds per lane and round; and by owner (torch, and our kernels where the model runs on
        them) the fastest product and its FLOP/s, of the same rounds."""
        products = chip.products(self._loaded, stock, _PRODUCT_EVENTS * point.suffix)
        tasks: dict[str, Callable[[], object]] = {lane.entry.name: lane.run for lane in lanes}
        tasks |= {name: product.run for name, product in products.items()}
        times = paired_rounds(tasks, self._rounds, time.perf_counter, self._progress)
        peaks = {}
        for owner in ("torch", "ours"):
            work = {n: p.flops for n, p in products.items() if n.startswith(owner)}
            if work:
                peaks[owner] = best_rate({name: times[name] for name in work}, work)
        return times, peaks

    def _facts(self, point: Point, stock: StockModel) -> dict[str, Any]:
        shape, tokens = self._shape, point.prefix + point.suffix
        return {
            "model": self._loaded.name,
            "chip": chip.chip_name(stock.device),
            "dtype": _dtype(stock),
            "threads": chip.threads(),
            "backend": self._loaded.backend.name,
            "stock_attention": str(stock.config._attn_implementation),
            "versions": chip.versions(),
            "rounds": self._rounds,
            "seed": self._seed,
            "prefix": point.prefix,
            "suffix": point.suffix,
            "topics": point.topics,
            "flops_per_event": event_flops(shape, point.prefix, point.suffix, LABELS),
            "flops_per_full_prefill": full_flops(shape, tokens, LABELS),
            "ideal_gain": ideal_gain(shape, point.prefix, point.suffix, LABELS),
        }

    def _memory(self) -> dict[str, int | None]:
        own_rss, own_cuda = self._own_memory or (None, None)
        return {
            "peak_rss_bytes": chip.peak_rss(),
            "peak_rss_ours_bytes": own_rss,
            "peak_cuda_bytes": chip.peak_cuda(self._loaded.device),
            "peak_cuda_ours_bytes": own_cuda,
        }


def _reference(full: FullPrefill, lanes: Sequence[_Lane]) -> Answers:
    """What full prefill says of the first events, of those that just one system is asked, and of
    the decision pipeline's first prompt, whose tokens are others."""
    wanted = (*range(_CHECKED), *_asked_once(lanes))
    known = {full.key(place): place for place in wanted}
    places = list(known.values())
    answers = list(zip(map(full.key, places), full.score(places), strict=True))
    for lane in lanes:
        if isinstance(lane.system, Decision):
            prompt, labels = lane.system.prompt(0), lane.system.labels
            answers.append((lane.system.key(0), full.answer(prompt, labels)))
    return answers


def _asked_once(lanes: Sequence[_Lane]) -> list[int]:
    """Places of the events that no second system is asked; full prefill can be asked any."""
    askers: dict[str, set[str]] = {}
    places: dict[str, int] = {}
    for lane in lanes:
        if not isinstance(lane.system, Decision | FullPrefill):
            for place in range(lane.entry.batch):
                key = lane.system.key(place)
                askers.setdefault(key, set()).add(lane.entry.system)
                places[key] = place
    return [places[key] for key, systems in askers.items() if len(systems) == 1]


def _dtype(model: StockModel) -> str:
    return str(model.dtype).removeprefix("torch.")
