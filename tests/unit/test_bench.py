"""The benchmarks' own arithmetic, baselines and command line: a wrong ruler measures nothing."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench import __main__ as command  # noqa: E402
from bench import (  # noqa: E402
    batch_insert,
    capacity_model,
    import_time,
    paper,
    paper_costs,
    peers,
    peers_remote,
    peers_setup,
    report,
    scaling,
    single_insert,
    targets,
    workers,
)
from bench.__main__ import QUESTIONS, main  # noqa: E402
from bench.baselines import (  # noqa: E402
    BareGather,
    BareMemcpy,
    NumpySumTree,
    PayloadRing,
    TransitionRing,
)
from bench.harness import (  # noqa: E402
    Bench,
    Contender,
    Figure,
    Measure,
    Quantity,
    Reading,
    Settings,
    Spread,
    TimedLoop,
)
from bench.payloads import (  # noqa: E402
    FIELDS,
    TRANSITION_BYTES,
    batch_chunks,
    frames,
    rows_for,
    transition_batch,
    transitions,
)
from bench.peers_cases import CASES, REMOTE_CASES  # noqa: E402
from bench.processes import Crew, Work, WorkerError  # noqa: E402
from bench.resume import Clock  # noqa: E402


def silent_bench(repeat: int = 3) -> tuple[Bench, list[str]]:
    """Returns a bench whose progress goes into a list."""
    lines: list[str] = []
    return Bench(Settings(repeat=repeat), lines.append), lines


def fixed(name: str, log: list[str], seconds: float = 0.5, calls: int = 10) -> Contender:
    """Returns a contender that notes each run and takes a made-up time."""

    def prepare(stack: ExitStack) -> Measure:
        def measure(_: float) -> Reading:
            log.append(name)
            return Reading(calls, seconds)

        return measure

    return Contender(name, prepare)


def figure(row: targets.Row, seconds: tuple[float, ...], items: int = 1) -> Figure:
    """Returns a figure with the given repetitions."""
    return Figure(
        *row, ours=True, items_per_call=items, bytes_per_item=1000, seconds_per_call=seconds
    )


class TestHarness:
    def test_contenders_take_turns_and_the_first_one_changes(self) -> None:
        log: list[str] = []
        bench, _ = silent_bench(repeat=3)
        bench.compare("q", "c", [fixed(name, log) for name in "abc"], bytes_per_item=1)
        warm_up, runs = log[:3], log[3:]
        assert warm_up == ["a", "b", "c"]
        assert runs == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]

    def test_a_figure_holds_one_value_a_repetition(self) -> None:
        bench, _ = silent_bench(repeat=3)
        contender = fixed("a", [], seconds=0.5, calls=10)
        bench.compare("q", "c", [contender], bytes_per_item=1000, items_per_call=4)
        (taken,) = bench.figures
        assert taken.seconds_per_call == (0.05, 0.05, 0.05)
        assert taken.items_per_second.median == pytest.approx(80)
        assert taken.gigabytes_per_second.median == pytest.approx(80e-6)
        assert taken.microseconds.median == pytest.approx(50_000)

    def test_spread_is_median_least_and_greatest(self) -> None:
        assert Spread.of([5.0, 1.0, 2.0]) == Spread(2.0, 1.0, 5.0)
        assert Spread.of([1.0, 2.0]).median == 1.5
        with pytest.raises(ValueError, match="at least one value"):
            Spread.of([])

    def test_a_contender_that_cannot_be_built_leaves_the_others(self) -> None:
        def broken(stack: ExitStack) -> Measure:
            raise RuntimeError("no library")

        log: list[str] = []
        bench, lines = silent_bench()
        bench.compare("q", "c", [Contender("bad", broken), fixed("good", log)], bytes_per_item=1)
        assert [taken.contender for taken in bench.figures] == ["good"]
        (failure,) = bench.failures
        assert (failure.contender, failure.error) == ("bad", "RuntimeError: no library")
        assert "no library" in failure.trace
        assert any("bad" in line for line in lines)

    def test_a_contender_that_fails_later_has_no_figure(self) -> None:
        runs: list[int] = []

        def prepare(stack: ExitStack) -> Measure:
            def measure(_: float) -> Reading:
                runs.append(1)
                if len(runs) == 3:
                    raise RuntimeError("broke")
                return Reading(1, 1.0)

            return measure

        log: list[str] = []
        bench, _ = silent_bench(repeat=4)
        bench.compare("q", "c", [Contender("bad", prepare), fixed("good", log)], bytes_per_item=1)
        assert [taken.contender for taken in bench.figures] == ["good"]
        assert len(bench.figures[0].seconds_per_call) == 4
        assert len(runs) == 3

    def test_no_call_in_time_is_a_failure(self) -> None:
        bench, _ = silent_bench()
        bench.compare("q", "c", [fixed("slow", [], calls=0)], bytes_per_item=1)
        assert bench.figures == []
        assert "no call was completed" in bench.failures[0].error

    def test_resources_are_released_after_the_comparison(self) -> None:
        closed: list[str] = []

        def prepare(stack: ExitStack) -> Measure:
            stack.callback(closed.append, "closed")
            return lambda _: Reading(1, 1.0)

        bench, _ = silent_bench()
        bench.compare("q", "c", [Contender("a", prepare)], bytes_per_item=1)
        assert closed == ["closed"]

    def test_timed_loop_counts_every_call_of_the_box(self) -> None:
        made = 0

        def loop(calls: int) -> None:
            nonlocal made
            for _ in range(calls):
                made += 1

        measure = TimedLoop(loop)
        measure(0.01)
        before = made
        reading = measure(0.02)
        assert reading.calls == made - before
        assert reading.seconds >= 0.02


class TestPayloads:
    def test_the_transition_has_681_bytes(self) -> None:
        assert TRANSITION_BYTES == 681
        assert sum(np.asarray(part).nbytes for part in next(transitions())) == 681

    def test_batches_have_the_fields_and_count_their_rows(self) -> None:
        chunks = list(batch_chunks(10, 4))
        assert [len(chunk["action"]) for chunk in chunks] == [4, 4, 2]
        assert np.concatenate([chunk["action"] for chunk in chunks]).tolist() == list(range(10))
        for name, (shape, dtype) in FIELDS.items():
            assert chunks[0][name].shape == (4, *shape)
            assert chunks[0][name].dtype == dtype

    def test_frames_repeat_exactly(self) -> None:
        first, second = frames(400), frames(400)
        assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))

    def test_buffers_are_larger_than_caches_within_reason(self) -> None:
        assert rows_for(400) == 100_000
        assert rows_for(40_000) == 5_000
        assert rows_for(400_000) == 500


class TestBaselines:
    @pytest.mark.parametrize("capacity", [7, 8])
    def test_ring_wraps_row_by_row_and_by_batch(self, capacity: int) -> None:
        single, batched = TransitionRing(capacity), TransitionRing(capacity)
        for chunk in batch_chunks(20, 5):
            batched.add_batch(chunk)
            for row in range(5):
                single.add(
                    chunk["obs"][row],
                    chunk["next_obs"][row],
                    chunk["action"][row],
                    chunk["reward"][row],
                    bool(chunk["done"][row]),
                )
        assert single.size == batched.size == capacity
        assert single.position == batched.position == 20 % capacity
        assert sorted(single.action.tolist()) == list(range(20 - capacity, 20))
        for name, column in single.columns().items():
            assert np.array_equal(column, batched.columns()[name])

    def test_all_ways_of_gathering_give_the_same_rows(self) -> None:
        ring = TransitionRing(1000)
        ring.add_batch(transition_batch(1000))
        index = np.random.default_rng(0).integers(0, 1000, (3, 256))
        for prefetch in (False, True):
            gather = BareGather(ring.columns(), index, prefetch=prefetch)
            for batch in range(5):
                gather.run(1)
                rows = index[batch % 3]
                out = {name: np.empty_like(array) for name, array in gather.out.items()}
                for found in (
                    gather.out,
                    ring.sample_fancy(rows),
                    ring.sample_take(rows),
                    ring.sample_take(rows, out),
                ):
                    for name, column in ring.columns().items():
                        assert found[name].dtype == column.dtype
                        assert np.array_equal(found[name], column[rows])

    def test_gather_refuses_strided_columns(self) -> None:
        strided = np.zeros((10, 4), np.float32)[:, ::2]
        with pytest.raises(ValueError, match="C-contiguous"):
            BareGather({"x": strided}, np.zeros((1, 2), np.int64))

    def test_memcpy_takes_payloads_in_turn_and_wraps(self) -> None:
        copies = BareMemcpy(3, 100, 2)
        payloads = frames(100, 2)
        for source, payload in enumerate(payloads):
            copies.set_source(source, payload)
        copies.run(1)
        copies.run(3)
        # Four copies into three rows: payloads 0, 1, 0 and then 1 over the first.
        for row, source in enumerate([1, 1, 0]):
            assert np.array_equal(copies.row(row), payloads[source])

    def test_packed_transition_is_all_of_its_bytes(self) -> None:
        transition = next(transitions())
        packed = single_insert.packed(transition)
        assert packed.nbytes == TRANSITION_BYTES
        assert np.array_equal(packed[:336].view(np.float32), transition[0])

    def test_payload_ring_wraps(self) -> None:
        ring = PayloadRing(2, 3)
        for value in (1, 2, 3):
            ring.add(np.full(3, value, np.uint8))
        assert ring.data[:, 0].tolist() == [3, 2]


class TestSumTree:
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 1000])
    def test_parents_are_sums_after_updates(self, count: int) -> None:
        rng = np.random.default_rng(count)
        weights = rng.random(count)
        tree = NumpySumTree(weights)
        index = rng.integers(0, count, 64)
        changed = rng.random(64)
        tree.update(index, changed)
        for leaf, weight in zip(index, changed, strict=True):
            weights[leaf] = weight
        inner = np.arange(1, tree.leaves)
        assert np.array_equal(tree.nodes[inner], tree.nodes[2 * inner] + tree.nodes[2 * inner + 1])
        assert np.array_equal(tree.nodes[tree.leaves : tree.leaves + count], weights)
        assert tree.total == pytest.approx(weights.sum())

    def test_draws_follow_the_weights(self) -> None:
        weights = np.array([0.0, 1.0, 2.0, 5.0, 0.0])
        tree = NumpySumTree(weights)
        index, probability = tree.sample(np.random.default_rng(3), 80_000)
        counts = np.bincount(index, minlength=5)
        expected = 10_000 * weights
        assert counts[0] == counts[4] == 0
        chance = ((counts[1:4] - expected[1:4]) ** 2 / expected[1:4]).sum()
        assert chance < 13.8  # chi-square of two degrees at 0.1 %; the seed is fixed
        assert np.array_equal(probability, weights[index] / 8.0)


class TestTargets:
    ROW: targets.Row = ("q", "c", "ours")
    OTHER: targets.Row = ("q", "c", "theirs")

    def judged(self, target: targets.Target, *figures: Figure) -> targets.Verdict:
        (verdict,) = targets.judge([target], figures)
        return verdict

    @pytest.mark.parametrize(("seconds", "met"), [(2.9e-6, True), (3.1e-6, False)])
    def test_an_upper_limit_in_microseconds(self, seconds: float, met: bool) -> None:
        target = targets.Target("t", self.ROW, 3.0, False, "us")
        verdict = self.judged(target, figure(self.ROW, (seconds,)))
        assert verdict.met is met
        assert target.requirement == "<= 3 us"

    def test_a_lower_limit_in_items(self) -> None:
        target = targets.Target("t", self.ROW, 5.0, True, "M items/s")
        fast = figure(self.ROW, (256 / 6e6, 256 / 5.5e6, 256 / 1e6), items=256)
        verdict = self.judged(target, fast)
        assert verdict.met is True
        assert verdict.measured is not None
        assert verdict.measured.median == pytest.approx(5.5)
        assert verdict.measured.minimum == pytest.approx(1.0)

    def test_a_ratio_is_taken_within_each_repetition(self) -> None:
        # Ours is twice as fast in every repetition, though the machine slowed down tenfold.
        mine = figure(self.ROW, (1e-6, 10e-6, 100e-6))
        theirs = figure(self.OTHER, (2e-6, 20e-6, 200e-6))
        faster = targets.Target("t", self.ROW, 2.0, True, "x", "items/s", self.OTHER)
        shorter = targets.Target("t", self.ROW, 0.5, False, "x", "us", self.OTHER)
        for target, expected in ((faster, 2.0), (shorter, 0.5)):
            verdict = self.judged(target, mine, theirs)
            assert verdict.measured is not None
            spread = verdict.measured
            assert (spread.minimum, spread.maximum) == pytest.approx((expected, expected))
            assert verdict.met is True

    def test_what_the_machine_takes_by_itself_is_divided_out(self) -> None:
        bare: targets.Row = ("q", "c", "bare, many")
        alone: targets.Row = ("q", "c", "bare, one")
        target = targets.Target(
            "t", self.ROW, 0.95, True, "x", "items/s", self.OTHER, control=(bare, alone)
        )
        # Ours keeps 0.8 and 0.5 of the rate, those that share nothing 0.8 and 0.25.
        mine = figure(self.ROW, (1.25e-6, 2e-6))
        theirs = figure(self.OTHER, (1e-6, 1e-6))
        found = [mine, theirs, figure(bare, (5e-6, 4e-6)), figure(alone, (4e-6, 1e-6))]
        verdict = self.judged(target, *found)
        assert verdict.measured is not None
        assert (verdict.measured.minimum, verdict.measured.maximum) == pytest.approx((1.0, 2.0))
        assert verdict.met is True
        assert self.judged(target, *found[:3]).met is None

    def test_a_missing_figure_is_not_measured(self) -> None:
        target = targets.Target("t", self.ROW, 2.0, True, "x", "items/s", self.OTHER)
        for figures in ((), (figure(self.ROW, (1.0,)),), (figure(self.OTHER, (1.0,)),)):
            verdict = self.judged(target, *figures)
            assert verdict.met is None
            assert verdict.word == "not measured"

    def test_a_latency_is_held_to_that_beside_no_actors(self) -> None:
        case = paper_costs.LATENCY_CASE
        found = [
            Quantity(paper.NAME, case, "0 actors, p50", "us", (50.0, 60.0)),
            Quantity(paper.NAME, case, "1 actors, p50", "us", (55.0, 66.0)),
            Quantity(paper.NAME, case, "64 actors, p50", "us", (500.0, 600.0)),
            Quantity(paper.NAME, "insert", f"200 clients: {paper.FAIR}", "x", (1.5, 1.7, 1.9)),
        ]
        held = paper.quantity_targets(found)
        verdicts = targets.judge(held, [], found)
        assert [verdict.met for verdict in verdicts] == [True, False, True]
        assert [v.measured and v.measured.median for v in verdicts] == pytest.approx([1.1, 10, 1.7])
        assert "as many actors as cores" in held[1].reason
        assert targets.judge(held[:1], [], found[1:2])[0].met is None

    def test_every_target_names_a_question_and_limit_once(self) -> None:
        found = targets.all_targets()
        assert {target.row[0] for target in found} <= set(QUESTIONS)
        assert len({target.text for target in found}) == len(found)
        limits = {(target.row[0], target.limit) for target in found}
        assert {
            ("single_insert", 2.0),
            ("single_insert", 1.0),
            ("batch_insert", 5.0),
            ("block_append", 0.9),
            ("uniform_sample", 2.0),
            ("uniform_sample", 1.3),
            ("prioritized", 1.8),
            ("borrow", 10.0),
            ("scaling", 1.7),
            ("scaling", 0.95),
            ("crash_safety", 1.1),
            ("import_time", 250_000.0),
        } == limits

    @pytest.mark.parametrize("name", sorted({t.row[0] for t in targets.all_targets()}))
    def test_rows_of_targets_are_rows_that_are_measured(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: set[targets.Row] = set()

        def note(
            self: Bench, question: str, case: str, contenders: list[Contender], **_: object
        ) -> None:
            seen.update((question, case, contender.name) for contender in contenders)

        monkeypatch.setattr(Bench, "compare", note)
        # The rings that are built before comparing need not be large to be named.
        monkeypatch.setattr("bench.uniform_sample.TransitionRing", lambda items: TransitionRing(4))
        monkeypatch.setattr("bench.uniform_sample.batch_chunks", lambda items, rows: iter(()))
        bench, _ = silent_bench()
        QUESTIONS[name].run(bench)
        wanted = [target for target in targets.all_targets() if target.row[0] == name]
        for target in wanted:
            assert target.row in seen
            assert target.to is None or target.to in seen


def counting_work(stack: ExitStack, chunk: int) -> Work:
    """Does nothing, quickly."""
    return Work(lambda calls: None, chunk)


def uneven_work(stack: ExitStack, most: int) -> Work:
    """Plays two clients, one of which does twice as much."""
    return Work(lambda calls: None, 1, several=lambda deadline: [most, most // 2])


def failing_work(stack: ExitStack, when: str) -> Work:
    """Fails while it gets ready or while it runs."""

    def fail(calls: int) -> None:
        raise RuntimeError("as it ran")

    if when == "prepare":
        raise RuntimeError("as it prepared")
    return Work(fail, 1)


class TestCrew:
    def test_all_processes_are_counted(self) -> None:
        with ExitStack() as stack:
            crew = Crew(stack, counting_work, [(16,), (16,)])
            first, second = crew.measure(0.5), crew.measure(0.5)
        for reading in (first, second):
            assert reading.seconds == 0.5
            assert reading.calls > 0
            assert reading.calls % 16 == 0

    def test_fairness_is_that_of_clients_not_of_processes(self) -> None:
        with ExitStack() as stack:
            fairness = paper.Fairness(Crew(stack, uneven_work, [(40,), (60,)]))
            reading = fairness(0.01)
        assert reading == Reading(150, 0.01)
        assert fairness.ratios == [3.0]

    def test_a_failure_brings_its_traceback(self) -> None:
        with ExitStack() as stack, pytest.raises(WorkerError, match="as it prepared"):
            Crew(stack, failing_work, [("prepare",)])
        with ExitStack() as stack:
            crew = Crew(stack, failing_work, [("run",)])
            with pytest.raises(WorkerError, match="as it ran"):
                crew.measure(0.05)


class TestReport:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.0, "0"),
            (0.0161, "0.0161"),
            (0.5, "0.50"),
            (3.9149, "3.91"),
            (9.996, "10.0"),
            (29.04, "29.0"),
            (256.4, "256"),
            (999.6, "1.00 k"),
            (42_900.0, "42.9 k"),
            (8_810_000.0, "8.81 M"),
        ],
    )
    def test_numbers_have_three_digits(self, value: float, text: str) -> None:
        assert report.short(value) == text

    def run_made_up(self, directory: Path) -> tuple[Bench, list[Path]]:
        """Writes a report of one made-up question."""
        bench, _ = silent_bench()
        name, case = single_insert.NAME, single_insert.CASE
        rows = [fixed(single_insert.OURS, [], 2e-6, 1), fixed(single_insert.RING, [], 4e-6, 1)]
        bench.compare(name, case, rows, bytes_per_item=TRANSITION_BYTES)
        verdicts = targets.judge(targets.all_targets(), bench.figures)
        environment = {"versions": report.versions(), "machine": report.machine()}
        questions = {key: question.text for key, question in QUESTIONS.items()}
        return bench, report.write(directory, "latest", bench, verdicts, environment, questions)

    def test_files_hold_figures_targets_and_machine(self, tmp_path: Path) -> None:
        _, paths = self.run_made_up(tmp_path)
        document = json.loads((tmp_path / "latest.json").read_text())
        assert {"format", "taken", "versions", "machine", "settings", "failures"} <= set(document)
        ours = document["figures"][0]
        assert ours["microseconds_per_call"] == pytest.approx({"median": 2, "min": 2, "max": 2})
        assert ours["seconds_per_call"] == pytest.approx([2e-6] * 3)
        met = {target["target"]: target["met"] for target in document["targets"]}
        assert met["append + five slices + create_item"] is True
        assert met["append + five slices + create_item: time against the numpy ring"] is True
        assert met["insert_batch of 256"] is None
        text = (tmp_path / "latest.md").read_text()
        assert "| append + five slices + create_item | <= 2 us | 2.00 (2.00-2.00) | met |" in text
        assert all(path.stat().st_size > 0 for path in paths)

    def test_plots_where_matplotlib_is_installed(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        _, paths = self.run_made_up(tmp_path)
        picture = tmp_path / "latest-single_insert.png"
        assert picture in paths
        assert picture.read_bytes().startswith(b"\x89PNG")
        drawing = tmp_path / "latest-single_insert.svg"
        assert drawing in paths
        assert "<svg" in drawing.read_text()
        assert "![single_insert](latest-single_insert.png)" in (tmp_path / "latest.md").read_text()

    def test_nothing_names_the_machine(self, tmp_path: Path) -> None:
        self.run_made_up(tmp_path)
        document = json.loads((tmp_path / "latest.json").read_text())
        assert not any(name in document["machine"] for name in ("host", "user", "path"))
        assert str(tmp_path) not in json.dumps(document)


class TestCommandLine:
    def small(
        self,
        monkeypatch: pytest.MonkeyPatch,
        run: Callable[[Bench], None],
        name: str = batch_insert.NAME,
    ) -> None:
        """Puts a question in the place of another."""
        question = command.Question(name, QUESTIONS[name].text, run)
        monkeypatch.setitem(command.QUESTIONS, name, question)

    def test_a_part_does_not_overwrite_the_run_of_record(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(bench: Bench) -> None:
            rows = [fixed(batch_insert.OURS, [], 1e-6, 1)]
            bench.compare(batch_insert.NAME, batch_insert.CASE, rows, bytes_per_item=1)

        self.small(monkeypatch, run)
        options = ["--only", batch_insert.NAME, "--repeat", "2", "--output", str(tmp_path)]
        assert main(options) == 0
        assert {path.stem for path in tmp_path.glob("*.json")} == {"partial"}
        document = json.loads((tmp_path / "partial.json").read_text())
        assert [len(row["seconds_per_call"]) for row in document["figures"]] == [2]
        assert {target["target"] for target in document["targets"]} == {"insert_batch of 256"}

    def test_a_question_that_breaks_is_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(bench: Bench) -> None:
            raise RuntimeError("out of order")

        self.small(monkeypatch, run)
        assert main(["--only", batch_insert.NAME, "--output", str(tmp_path)]) == 1
        assert "RuntimeError: out of order" in capsys.readouterr().out
        document = json.loads((tmp_path / "partial.json").read_text())
        assert document["failures"][0]["error"] == "RuntimeError: out of order"

    def test_an_interrupted_run_goes_on_after_what_was_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []

        def batch(bench: Bench) -> None:
            ran.append("batch")
            rows = [fixed(batch_insert.OURS, [], 1e-6, 1)]
            bench.compare(batch_insert.NAME, batch_insert.CASE, rows, bytes_per_item=1)

        def interrupted(bench: Bench) -> None:
            ran.append("interrupted")
            raise KeyboardInterrupt

        def last(bench: Bench) -> None:
            ran.append("last")
            bench.skip(import_time.NAME, "all", "somebody", "not here")

        self.small(monkeypatch, batch)
        self.small(monkeypatch, interrupted, import_time.NAME)
        options = ["--only", batch_insert.NAME, "--only", import_time.NAME]
        options += ["--output", str(tmp_path)]
        with pytest.raises(KeyboardInterrupt):
            main(options)
        self.small(monkeypatch, last, import_time.NAME)
        assert main([*options, "--quick", "--resume"]) == 2
        assert main([*options, "--resume"]) == 0
        assert ran == ["batch", "interrupted", "last"]
        document = json.loads((tmp_path / "partial.json").read_text())
        assert [row["contender"] for row in document["figures"]] == [batch_insert.OURS]
        assert document["skipped"][0]["reason"] == "not here"
        assert "import_time, somebody (all): not here" in (tmp_path / "partial.md").read_text()
        assert not list(tmp_path.glob("unfinished*"))
        assert main([*options, "--resume"]) == 2

    def test_a_run_interrupted_within_a_question_goes_on_after_the_last_case(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ran: list[str] = []

        def cases(bench: Bench, stop: bool) -> None:
            for case in ("one", "two", "three"):
                if stop and case == "two":
                    raise KeyboardInterrupt

                def after(case: str = case) -> None:
                    ran.append(case)

                rows = [fixed("row", [], 1e-6, 1)]
                bench.compare(batch_insert.NAME, case, rows, bytes_per_item=1, after=after)
                bench.skip(batch_insert.NAME, case, "somebody", "not here")

        options = ["--only", batch_insert.NAME, "--output", str(tmp_path)]
        self.small(monkeypatch, partial(cases, stop=True))
        with pytest.raises(KeyboardInterrupt):
            main(options)
        self.small(monkeypatch, partial(cases, stop=False))
        assert main([*options, "--resume"]) == 0
        assert ran == ["one", "two", "three"]
        document = json.loads((tmp_path / "partial.json").read_text())
        assert [row["case"] for row in document["figures"]] == ["one", "two", "three"]
        assert [row["case"] for row in document["skipped"]] == ["one", "two", "three"]

    def test_long_questions_run_when_they_are_asked_for(self) -> None:
        def names(*options: str) -> set[str]:
            return set(command._chosen(command._arguments(options)))

        long = {name for name, question in QUESTIONS.items() if question.by_name}
        assert {"peers_remote", "paper"} == long
        assert names() == set(QUESTIONS) - long
        assert names("--all") == set(QUESTIONS)
        assert names("--only", "peers_remote") == {"peers_remote"}

    @pytest.mark.parametrize(
        "options", [["--only", "nonsense"], ["--repeat", "0"], ["--repeat", "many"]]
    )
    def test_bad_options_are_refused(self, options: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(options)
        assert ended.value.code == 2

    def test_it_runs_as_a_module_from_the_root(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "bench", "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in QUESTIONS:
            assert name in done.stdout


class TestClock:
    def test_what_is_left_follows_the_pace_so_far(self) -> None:
        usual = {"a": 10.0, "b": 20.0, "c": 30.0}
        assert Clock(usual, {}).left == pytest.approx(60, abs=1)
        late = Clock(usual, {"a": 20.0})
        assert late.left == pytest.approx(100, abs=1)
        assert late.line.startswith("[1/3 done, about ")
        assert Clock(usual, dict(usual)).left == 0


class TestPaper:
    def test_the_most_clients_are_held_to_the_best(self) -> None:
        rates = {"1 client": 2e-6, "8 clients": 1e-6, "200 clients": 1.02e-6}
        figures = [figure((paper.NAME, "insert", name), (s,)) for name, s in rates.items()]
        figures.append(figure((paper.NAME, "sample_batch", "10^3 items"), (1e-6,)))
        (target,) = paper.targets(figures)
        assert (target.row[2], target.to and target.to[2]) == ("200 clients", "8 clients")
        (verdict,) = targets.judge([target], figures)
        assert verdict.met is True

    def test_quantities_are_reported(self, tmp_path: Path) -> None:
        bench, _ = silent_bench()
        bench.quantities.append(Quantity(paper.NAME, "insert", "fair", "x", (1.0, 3.0, 2.0)))
        environment = {"versions": report.versions(), "machine": report.machine()}
        questions = {paper.NAME: "How far?"}
        report.write(tmp_path, "partial", bench, [], environment, questions)
        assert "| insert: fair | 2.00 (1.00-3.00) x |" in (tmp_path / "partial.md").read_text()
        assert "insert: fair" in report.as_text(bench, [])
        document = json.loads((tmp_path / "partial.json").read_text())
        assert document["quantities"][0]["values"] == [1.0, 3.0, 2.0]


class TestCapacityModel:
    COSTS = capacity_model.Costs(1.4, 0.02, 0.06, 64.0, 10.0)

    def test_one_writer_takes_what_its_parts_take(self) -> None:
        assert capacity_model.simulate(self.COSTS, 1, 2) == pytest.approx(1 / 1.48, rel=0.01)

    def test_two_writers_on_two_stripes_nearly_double(self) -> None:
        one = capacity_model.simulate(self.COSTS, 1, 2)
        two = capacity_model.simulate(self.COSTS, 2, 2)
        assert 1.8 < two / one < 2.0
        assert capacity_model.simulate(self.COSTS, 2, 2) == two

    def test_many_writers_are_held_by_the_lock_that_all_take(self) -> None:
        many = capacity_model.simulate(self.COSTS, 192, 16)
        assert many == pytest.approx(1 / (0.02 + capacity_model.LINE_TRANSFER), rel=0.02)
        assert capacity_model.machine(self.COSTS, 192).insert_limit == "the limiter's lock"
        assert capacity_model.machine(self.COSTS, 2).insert_limit == "the cores"

    def test_a_stripe_that_all_share_holds_them_all(self) -> None:
        slow = capacity_model.Costs(1.0, 0.0, 1.0, 64.0, 10.0)
        free = capacity_model.simulate(slow, 16, 1, transfer=0.0)
        assert free == pytest.approx(1.0, rel=0.02)
        assert capacity_model.simulate(slow, 16, 16, transfer=0.0) > 7.5

    def test_more_hosts_add_nothing_to_one_server_but_servers_do(self) -> None:
        ten, many = (capacity_model.hosts(self.COSTS, count, 64) for count in (10, 1000))
        assert ten.inserts == many.inserts == pytest.approx(0.1)
        assert ten.insert_limit == "the bridge's process (one core)"
        spread = capacity_model.sharded(self.COSTS, 10, 64)
        assert spread.inserts == 10 * capacity_model.machine(self.COSTS, 64).inserts

    def document(self, two_writers: float) -> dict[str, object]:
        """Returns a run with the figures that the model reads, in microseconds a call."""
        writer = capacity_model.WRITER_CASE
        rows = [
            ("scaling", writer, "shmreplay, 1 writer", 1.5),
            ("scaling", writer, "shmreplay, 2 writers", two_writers),
            ("scaling", writer, "numpy ring of its own, 1 process", 3.0),
            ("scaling", writer, "numpy ring of its own, 2 processes", 1.5),
            ("crash_safety", "insert, the core alone", "shmreplay", 0.2),
            ("uniform_sample", "200k items", "shmreplay sample_batch", 64.0),
            (
                "bridge",
                "insert 64 of 400 B, one by one",
                "shmreplay, item by item, confirmed together",
                640.0,
            ),
        ]
        keys = ("question", "case", "contender")
        return {
            "figures": [
                {**dict(zip(keys, row, strict=False)), "microseconds_per_call": {"median": row[3]}}
                for row in rows
            ]
        }

    def test_costs_are_those_of_the_run_and_the_check_meets_them(self) -> None:
        document = self.document(0.8)
        costs = capacity_model.costs_of(document)
        assert (costs.insert, costs.bridge) == pytest.approx((1.5, 10.0))
        assert (costs.limiter, costs.stripe) == pytest.approx((0.03, 0.09))
        (_, one, measured_one), (_, two, measured_two) = capacity_model.check(document, costs)
        assert one == pytest.approx(measured_one, rel=0.01)
        assert two == pytest.approx(measured_two, rel=0.1)

    def test_the_command_prints_check_and_set_ups(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "run.json"
        path.write_text(json.dumps(self.document(0.8)))
        assert capacity_model.main([str(path)]) == 0
        printed = capsys.readouterr().out
        for line in ("shmreplay, 2 writers", "one machine of 192 cores", "clients on 1000 hosts"):
            assert line in printed
        path.write_text(json.dumps({"figures": []}))
        assert capacity_model.main([str(path)]) == 1
        assert "run python -m bench first" in capsys.readouterr().err


class TestPeers:
    ALL = (*peers.PEERS, *peers_remote.PEERS)

    def test_every_peer_has_a_row_or_a_reason_for_every_case(self) -> None:
        for peer in peers.PEERS:
            rows = {row.case for row in peers.rows_of(peer)}
            assert rows <= set(CASES)
            # Reverb's own ways are its own; the others have no such calls.
            own = set() if peer.label in ("shmreplay", "dm-reverb") else set(CASES) - rows
            assert set(CASES) == rows | set(peer.lacks) | {c for c in own if c.startswith("w8")}
            assert not rows & set(peer.lacks)
        for peer in peers_remote.PEERS:
            assert {row.case for row in peers.rows_of(peer)} == set(REMOTE_CASES)

    def test_rows_of_a_case_have_different_names(self) -> None:
        found = [(row.case, row.name) for peer in self.ALL for row in peers.rows_of(peer)]
        assert len(set(found)) == len(found)

    def test_every_environment_has_a_list(self) -> None:
        wanted = {peer.environment for peer in self.ALL if peer.environment}
        assert wanted == set(peers_setup.names())
        with pytest.raises(SystemExit):
            peers_setup.main(["somewhere", "nobody"])

    def test_without_environments_every_peer_is_listed(self, tmp_path: Path) -> None:
        bench, _ = silent_bench()
        bench.peers = tmp_path
        peers.run(bench)
        assert not bench.figures and not bench.failures
        missing = {skipped.contender for skipped in bench.skipped}
        assert missing == {peer.label for peer in peers.PEERS if peer.environment}
        assert str(tmp_path) in bench.skipped[0].reason

    def test_targets_are_the_best_of_reverb_and_of_the_others(self) -> None:
        case = CASES["w1"].title
        rows = {"shmreplay": 1e-6, "dm-reverb near": 60e-6, "dm-reverb far": 90e-6}
        rows |= {"cpprb": 40e-6, "stable-baselines3": 1.5e-6, "numpy ring": 1e-9}
        figures = [
            Figure(peers.NAME, case, name, name == "shmreplay", 1, 1, (seconds,))
            for name, seconds in rows.items()
        ]
        found = peers.targets(figures)
        assert [target.to and target.to[2] for target in found] == [
            "dm-reverb near",
            "stable-baselines3",
        ]
        verdicts = targets.judge(found, figures)
        assert [verdict.met for verdict in verdicts] == [True, False]
        assert verdicts[0].measured is not None
        assert verdicts[0].measured.median == pytest.approx(60)

    def test_every_row_that_may_be_missed_has_its_reason(self) -> None:
        assert set(peers.REASONS) == set(CASES)
        for key, case in CASES.items():
            rows = [
                dataclasses.replace(figure((peers.NAME, case.title, name), (seconds,)), ours=False)
                for name, seconds in (("dm-reverb near", 3e-6), (peers.RING, 1e-6))
            ]
            mine = figure((peers.NAME, case.title, "shmreplay"), (2e-6,))
            (target,) = peers.targets([*rows, mine])
            assert peers.REASONS[key] in target.reason
            assert "has 3 x the rival's rate, so that it is out of reach" in target.reason
            (target,) = peers.targets([rows[0], mine])
            assert target.reason == peers.REASONS[key]

    def test_a_row_is_measured_in_a_process_of_its_own(self) -> None:
        ours = next(peer for peer in peers.PEERS if peer.environment is None)
        row = next(row for row in peers.rows_of(ours) if row.case == "w2")
        with ExitStack() as stack:
            measure = peers._launch(stack, sys.executable, ours.module, row, quick=True).ready()
            assert measure(0.02).calls > 0

    def test_a_worker_that_ends_brings_what_it_said(self) -> None:
        program = "import sys; sys.exit('no such thing')"
        with ExitStack() as stack, pytest.raises(RuntimeError, match="status 1: no such thing"):
            workers.Worker(stack, [sys.executable, "-c", program], ROOT, {}).ready()


def test_two_writers_are_measured_on_two_stripes() -> None:
    assert scaling.STRIPES == 2
    assert {1, 2, 64} == set(scaling.WRITERS)
