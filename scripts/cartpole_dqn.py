"""Learns CartPole-v1 with a distributed DQN whose processes talk through shmreplay alone.

    python scripts/cartpole_dqn.py [--seed N] [--out FILE.png]

Four processes share one server's tables:

* Two *actors* play with an epsilon-greedy policy. They write every step once, and cut overlapping
  n-step transitions out of their history: the table 'replay'.
* The *learner*, which is this process, samples batches by priority, corrects for that with
  importance weights, and writes the new priorities back. It is a double DQN with a small numpy
  network.
* An *evaluator* plays greedily and never explores. The weights to judge and the returns it got go
  through two queues: the tables 'snapshots' and 'returns'.

The newest weights reach the actors through a table of one item, 'policy', which everybody reads as
often as they like. The rate limiter of 'replay' keeps actors and learner in step: whoever runs
ahead waits. The run ends, with exit code 0, once the mean return of the last 50 evaluation episodes
is at least 475, and with exit code 1 if that does not happen within the budget.

Things to look at, if this is the program that you want to copy from: `make_tables`, `Actor._write`,
`Learner.update`, and `playing_processes`.
"""

from __future__ import annotations

import os

# A matrix of 64 x 128 is too small to share between threads, and each process has its own core to
# fill. This must happen before numpy is imported; the processes started below inherit it.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import contextlib
import dataclasses
import json
import logging
import multiprocessing
import multiprocessing.connection
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from dqn_network import Adam, FloatArray, QNetwork

import shmreplay as reverb

logger = logging.getLogger("cartpole_dqn")

# What a call raises once the learner has stopped the server, and what attaching raises after that.
SERVER_IS_GONE = (reverb.errors.ServerClosedError, reverb.errors.StoreNotFoundError)
# Brings position, velocity, angle and angular velocity to about the same size.
INPUT_SCALE: FloatArray = np.array([0.5, 0.5, 5.0, 0.5], np.float32)


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything that can be set about a run; the defaults usually learn within half a minute."""

    environment: str = "CartPole-v1"
    seed: int = 0
    actors: int = 2
    # Learning
    layer_sizes: tuple[int, ...] = (4, 128, 128, 2)
    batch_size: int = 64
    n_step: int = 5
    gamma: float = 0.99
    learning_rate: float = 5e-4
    final_learning_rate: float = 5e-5
    learning_rate_updates: int = 30_000
    target_rate: float = 0.01  # share of the online network that enters the target at each update
    max_gradient_norm: float = 10.0
    # Exploration: each actor goes from 1 to its own final value over so many steps.
    final_epsilons: tuple[float, ...] = (0.02, 0.1)
    epsilon_steps: int = 5_000
    # Replay
    replay_size: int = 50_000
    min_replay_size: int = 1_000
    samples_per_insert: float = 16.0
    priority_exponent: float = 0.6
    importance_exponent: float = 0.5
    min_priority: float = 0.01
    # Rhythm
    publish_every: int = 50  # updates between two policies for the actors
    evaluate_every: int = 100  # updates between two snapshots for the evaluator
    # Goal and budget
    target_return: float = 475.0
    window: int = 50  # evaluation episodes that the goal is about
    max_updates: int = 100_000
    max_seconds: float = 300.0


def make_tables(config: Config) -> list[reverb.Table]:
    """The four tables through which the processes talk."""
    ratio = config.samples_per_insert
    return [
        reverb.Table(
            name="replay",
            sampler=reverb.selectors.Prioritized(config.priority_exponent),
            remover=reverb.selectors.Fifo(),
            max_size=config.replay_size,
            rate_limiter=reverb.rate_limiters.SampleToInsertRatio(
                samples_per_insert=ratio,
                min_size_to_sample=config.min_replay_size,
                error_buffer=0.1 * ratio * config.min_replay_size,
            ),
            seed=config.seed,
        ),
        # One item, read by everybody and replaced by the next: the latest value of a variable.
        reverb.Table(
            name="policy",
            sampler=reverb.selectors.Fifo(),
            remover=reverb.selectors.Fifo(),
            max_size=1,
            rate_limiter=reverb.rate_limiters.MinSize(1),
        ),
        reverb.Table.queue(name="snapshots", max_size=1),
        reverb.Table.queue(name="returns", max_size=1_000),
    ]


# --- Actors and the evaluator: the processes that play -------------------------------------------


def watch_parent() -> None:
    """Ends this process as soon as its parent is gone, even where that was killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def make_environment(name: str) -> gymnasium.Env[Any, Any]:
    """The environment, without the checks that gymnasium makes at each step by default."""
    return gymnasium.make(name, disable_env_checker=True)


class Actor:
    """Plays episodes and writes what it saw to the table 'replay' as n-step transitions."""

    def __init__(self, client: reverb.Client, index: int, config: Config) -> None:
        self._client = client
        self._index = np.int32(index)
        self._config = config
        self._rng = np.random.default_rng([config.seed, index])
        self._environment = make_environment(config.environment)
        self._environment.reset(seed=int(self._rng.integers(2**31)))
        self._network = QNetwork(config.layer_sizes, INPUT_SCALE)
        self._priority = 1.0
        self._steps = 0
        # A transition of n steps spans n + 1 observations.
        self._writer = client.trajectory_writer(num_keep_alive_refs=config.n_step + 1)

    def play_episode(self) -> None:
        """Plays one episode with the newest policy."""
        config = self._config
        self._fetch_policy()
        observation, _ = self._environment.reset()
        ended = False
        while not ended:
            action = self._choose(observation)
            following, reward, terminated, truncated, _ = self._environment.step(action)
            # A fallen pole ends all return, so that nothing is added to the last reward. When
            # merely the time is up, the return would have gone on: the discount stays.
            self._write(observation, action, float(reward), 0.0 if terminated else config.gamma)
            observation = following
            ended = terminated or truncated
        # Steps without reward or discount carry the last observation on, so that the last n
        # transitions have the same shape as the others and bootstrap from that observation.
        for _ in range(config.n_step):
            self._write(observation, 0, 0.0, 1.0)
        self._writer.end_episode()

    def _fetch_policy(self) -> None:
        policy = self._client.sample_batch("policy", 1).data
        self._network.parameters[:] = policy["parameters"][0]
        self._priority = float(policy["priority"][0])

    def _choose(self, observation: FloatArray) -> int:
        config = self._config
        final = config.final_epsilons[int(self._index) % len(config.final_epsilons)]
        epsilon = max(final, 1.0 - (1.0 - final) * self._steps / config.epsilon_steps)
        self._steps += 1
        if self._rng.random() < epsilon:
            return int(self._rng.integers(2))
        return int(np.argmax(self._network.values(observation)))

    def _write(self, observation: FloatArray, action: int, reward: float, discount: float) -> None:
        """Appends one step, and makes an item of the n steps before it.

        `reward` and `discount` are those of the action, so the item that begins n steps ago takes
        n of each, and of the observations its first and the newest. All of them are rows of steps
        that were written once, however many items refer to them.
        """
        self._writer.append(
            {
                "observation": observation,
                "action": np.int32(action),
                "reward": np.float32(reward),
                "discount": np.float32(discount),
                "actor": self._index,
            }
        )
        n = self._config.n_step
        if self._writer.episode_steps <= n:
            return
        history = self._writer.history
        self._writer.create_item(
            table="replay",
            priority=self._priority,
            trajectory={
                "observation": history["observation"][-n - 1],
                "action": history["action"][-n - 1],
                "reward": history["reward"][-n - 1 : -1],
                "discount": history["discount"][-n - 1 : -1],
                "last_observation": history["observation"][-1],
                "actor": history["actor"][-n - 1],
            },
        )


def run_actor(address: str, index: int, config: Config) -> None:
    """Body of an actor's process: plays until the server is stopped."""
    threading.Thread(target=watch_parent, daemon=True).start()
    with contextlib.suppress(*SERVER_IS_GONE), reverb.Client(address) as client:
        actor = Actor(client, index, config)
        while True:
            actor.play_episode()


def run_evaluator(address: str, config: Config) -> None:
    """Body of the evaluator's process: plays one greedy episode with each snapshot it gets."""
    threading.Thread(target=watch_parent, daemon=True).start()
    environment = make_environment(config.environment)
    environment.reset(seed=config.seed + 1_000_003)
    network = QNetwork(config.layer_sizes, INPUT_SCALE)
    with contextlib.suppress(*SERVER_IS_GONE), reverb.Client(address) as client:
        while True:
            snapshot = client.sample_batch("snapshots", 1).data
            network.parameters[:] = snapshot["parameters"][0]
            observation, _ = environment.reset()
            total = 0.0
            ended = False
            while not ended:
                action = int(np.argmax(network.values(observation)))
                observation, reward, terminated, truncated, _ = environment.step(action)
                total += float(reward)
                ended = terminated or truncated
            result = {"return": np.array([total]), "updates": snapshot["updates"]}
            client.insert_batch("returns", result)


# --- The learner ---------------------------------------------------------------------------------


class Learner:
    """Double DQN on prioritized n-step transitions, with a slowly following target network."""

    def __init__(self, client: reverb.Client, config: Config) -> None:
        self._client = client
        self._config = config
        self._online = QNetwork(config.layer_sizes, INPUT_SCALE)
        self._online.initialise(np.random.default_rng(config.seed))
        self._target = QNetwork(config.layer_sizes, INPUT_SCALE, self._online.parameters)
        self._optimiser = Adam(self._online.parameters.size, config.max_gradient_norm)
        self._priority = 1.0  # for new transitions: the largest of late, so that each is soon seen
        self.updates = 0
        self.priorities_written = 0
        self.sampled_by_actor = np.zeros(config.actors, np.int64)

    def update(self, timeout: float) -> None:
        """Samples one batch, takes one step of the optimiser, and writes the priorities back.

        Raises:
            DeadlineExceededError: no transition could be sampled within `timeout` seconds.
        """
        config = self._config
        info, data = self._client.sample_batch("replay", config.batch_size, timeout=timeout)
        errors = self._online.backward(
            data["observation"], data["action"], self._targets(data), self._importance(info)
        )
        self._optimiser.step(self._online.parameters, self._online.gradient, self._learning_rate())
        self._target.parameters += config.target_rate * (
            self._online.parameters - self._target.parameters
        )
        priorities = np.abs(errors).astype(np.float64) + config.min_priority
        self.priorities_written += self._client.update_priorities("replay", info.key, priorities)
        self._priority = max(0.999 * self._priority, float(priorities.max()))
        self.sampled_by_actor += np.bincount(data["actor"], minlength=config.actors)
        self.updates += 1

    def _targets(self, data: dict[str, Any]) -> FloatArray:
        """n-step returns: rewards[B, n], then the value of the last observation.

        The action in the last observation is the online network's choice and its value the
        target network's, which keeps the maximum from picking the luckiest error.
        """
        last = data["last_observation"]
        best = np.argmax(self._online.values(last), axis=1)
        target: FloatArray = self._target.values(last)[np.arange(len(best)), best]
        for step in reversed(range(self._config.n_step)):
            target = data["reward"][:, step] + data["discount"][:, step] * target
        return target

    def _importance(self, info: reverb.SampleInfo) -> FloatArray:
        """Weights that take back what sampling by priority distorts, at most 1."""
        weights = (info.table_size * info.probability) ** -self._config.importance_exponent
        result: FloatArray = (weights / weights.max()).astype(np.float32)
        return result

    def _learning_rate(self) -> float:
        config = self._config
        left = max(0.0, 1.0 - self.updates / config.learning_rate_updates)
        return config.final_learning_rate + left * (
            config.learning_rate - config.final_learning_rate
        )

    def publish_policy(self) -> None:
        """Puts the newest weights where the actors look for them."""
        record = {
            "parameters": self._target.parameters[np.newaxis],
            "priority": np.array([self._priority]),
        }
        self._client.insert_batch("policy", record)

    def publish_snapshot(self) -> None:
        """Hands the newest weights to the evaluator, unless it has yet to fetch the last ones."""
        record = {
            "parameters": self._target.parameters[np.newaxis],
            "updates": np.array([self.updates]),
        }
        with contextlib.suppress(reverb.DeadlineExceededError):
            self._client.insert_batch("snapshots", record, timeout=0)


# --- Watching the run ----------------------------------------------------------------------------


class Evaluation(NamedTuple):
    """One greedy episode: the learner's updates before it, and its undiscounted return."""

    updates: int
    episode_return: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where the run stands; rates are those since the last look."""

    seconds: float
    updates: int
    mean_return: float
    episodes: int
    inserts: int
    samples: int
    inserts_per_second: float
    samples_per_second: float
    table_size: int
    arena_bytes: int

    @property
    def ratio(self) -> float:
        """Samples an insert so far."""
        return self.samples / max(1, self.inserts)


class Monitor:
    """Collects what the evaluator found, and the counters that the store keeps."""

    def __init__(self, client: reverb.Client, config: Config) -> None:
        self._client = client
        self._config = config
        self._start = time.monotonic()
        self._last: Progress | None = None
        self.evaluations: list[Evaluation] = []

    @property
    def seconds(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._start

    @property
    def mean_return(self) -> float:
        """Mean return of the last evaluation episodes; 0 before the first."""
        window = self.evaluations[-self._config.window :]
        return sum(each.episode_return for each in window) / max(1, len(window))

    @property
    def learned(self) -> bool:
        """Whether the goal is reached."""
        enough = len(self.evaluations) >= self._config.window
        return enough and self.mean_return >= self._config.target_return

    def collect(self) -> None:
        """Takes the returns that have arrived, without waiting for any."""
        try:
            results = self._client.sample_batch("returns", self._config.window, timeout=0).data
        except reverb.DeadlineExceededError:  # none has arrived
            return
        for updates, value in zip(results["updates"], results["return"], strict=True):
            self.evaluations.append(Evaluation(int(updates), float(value)))
            if self.learned:
                return  # what came later does not count

    def look(self, updates: int) -> Progress:
        """Reads the counters."""
        table = self._client.server_info()["replay"]
        inserts = table.rate_limiter_info.insert_stats.completed
        samples = table.rate_limiter_info.sample_stats.completed
        seconds = self.seconds
        last = self._last
        elapsed = max(1e-9, seconds - (last.seconds if last else 0.0))
        self._last = Progress(
            seconds=seconds,
            updates=updates,
            mean_return=self.mean_return,
            episodes=len(self.evaluations),
            inserts=inserts,
            samples=samples,
            inserts_per_second=(inserts - (last.inserts if last else 0)) / elapsed,
            samples_per_second=(samples - (last.samples if last else 0)) / elapsed,
            table_size=table.current_size,
            arena_bytes=int(self._client.stats()["arena_used_bytes"]),
        )
        return self._last


class Display(Protocol):
    """Shows the progress of a run."""

    @property
    def interval(self) -> float:
        """Seconds between two calls of `show`."""

    def show(self, progress: Progress, evaluations: list[Evaluation]) -> None:
        """Shows where the run stands."""


# --- The run -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended, and its last progress."""

    learned: bool
    progress: Progress
    priorities_written: int
    sampled_by_actor: list[int]
    evaluations: list[Evaluation]


@contextlib.contextmanager
def playing_processes(server: reverb.Server, config: Config) -> Iterator[list[BaseProcess]]:
    """Starts actors and evaluator, and ends them together with the server.

    They are new interpreters (spawn) that attach to the store by its address alone.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = [
        context.Process(
            target=run_actor, args=(server.address, index, config), name=f"actor {index}"
        )
        for index in range(config.actors)
    ]
    processes.append(
        context.Process(target=run_evaluator, args=(server.address, config), name="evaluator")
    )
    try:
        with ignored_interrupts():
            for process in processes:
                process.start()
        # The budget is spent once all are there: no actor is to have a start on another.
        while server.stats()["participants"] <= len(processes):
            check_processes(processes)
            time.sleep(0.01)
        yield processes
    finally:
        server.stop()  # whatever call they are in or make next raises ServerClosedError
        for process in processes:
            if process.pid is not None:
                process.join(timeout=5.0)
                process.kill()
                process.join()


@contextlib.contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Ignores Ctrl-C for a moment; processes started meanwhile inherit that for good.

    A terminal sends Ctrl-C to all of them at once, but only the learner is to act on it.
    """
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class ProcessLostError(Exception):
    """An actor or the evaluator has ended, although the run goes on."""


def check_processes(processes: list[BaseProcess]) -> None:
    """Raises ProcessLostError if one of the processes has ended."""
    for process in processes:
        if process.exitcode is not None:
            raise ProcessLostError(f"{process.name} ended with exit code {process.exitcode}")


def train(config: Config, display: Display) -> Result:
    """Runs the whole training, until the goal is reached or the budget is spent."""
    with (
        reverb.Server(make_tables(config)) as server,
        reverb.Client(server.address) as client,
    ):
        learner = Learner(client, config)
        monitor = Monitor(client, config)
        next_look = display.interval
        with playing_processes(server, config) as processes:
            while (
                not monitor.learned
                and learner.updates < config.max_updates
                and monitor.seconds < config.max_seconds
            ):
                if learner.updates % config.publish_every == 0:
                    learner.publish_policy()
                if learner.updates % config.evaluate_every == 0:
                    learner.publish_snapshot()
                # Nothing to sample in a second? Then see whether the actors are still there.
                with contextlib.suppress(reverb.DeadlineExceededError):
                    learner.update(timeout=1.0)
                monitor.collect()
                if monitor.seconds >= next_look:
                    check_processes(processes)
                    display.show(monitor.look(learner.updates), monitor.evaluations)
                    next_look = monitor.seconds + display.interval
            progress = monitor.look(learner.updates)
            display.show(progress, monitor.evaluations)
    return Result(
        learned=monitor.learned,
        progress=progress,
        priorities_written=learner.priorities_written,
        sampled_by_actor=learner.sampled_by_actor.tolist(),
        evaluations=monitor.evaluations,
    )


# --- The command ---------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    defaults = Config()
    parser = argparse.ArgumentParser(
        description=f"Learns {defaults.environment} with a DQN, two actors and shmreplay.",
        epilog="Exit code: 0 learned, 1 not learned within the budget, 3 a process was lost,"
        " 130 interrupted.",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--actors", type=int, default=defaults.actors, help="actor processes (default: %(default)s)"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=defaults.target_return,
        help="mean return that counts as learned (default: %(default)s)",
    )
    parser.add_argument(
        "--max-updates",
        type=int,
        default=defaults.max_updates,
        help="budget of the learner's updates (default: %(default)s)",
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=defaults.max_seconds,
        help="budget of time (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/cartpole_dqn.png"),
        help="where the learning curve goes (default: %(default)s)",
    )
    parser.add_argument("--summary", type=Path, help="also write the summary here, as JSON")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed must be 0 or more, got {options.seed}")
    if options.actors < 1:
        parser.error(f"--actors must be 1 or more, got {options.actors}")
    return options


def log_summary(result: Result) -> None:
    """Says how it ended."""
    progress = result.progress
    total = max(1, sum(result.sampled_by_actor))
    shares = ", ".join(
        f"{100 * count / total:.0f} % from actor {index}"
        for index, count in enumerate(result.sampled_by_actor)
    )
    logger.info("")
    logger.info("%s", "Learned." if result.learned else "Not learned within the budget.")
    logger.info("  mean return         %.1f", progress.mean_return)
    logger.info("  time                %.1f s", progress.seconds)
    logger.info("  updates             %d", progress.updates)
    logger.info("  evaluation episodes %d", progress.episodes)
    logger.info("  transitions written %d", progress.inserts)
    logger.info("  transitions sampled %d (%s)", progress.samples, shares)
    logger.info("  samples per insert  %.2f", progress.ratio)
    logger.info("  priorities written  %d", result.priorities_written)


def write_summary(result: Result, path: Path) -> None:
    """Writes the summary as JSON."""
    fields = dataclasses.asdict(result.progress)
    fields["learned"] = result.learned
    fields["priorities_written"] = result.priorities_written
    fields["sampled_by_actor"] = result.sampled_by_actor
    path.write_text(json.dumps(fields, indent=2) + "\n")


def exit_on_termination(number: int, frame: FrameType | None) -> None:
    """Turns SIGTERM into an orderly exit, so that the actors and the store go with us."""
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    # Imported here, since the processes started above import this module too and draw nothing.
    from dqn_display import make_display, save_curve

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, exit_on_termination)
    options = parse_arguments(arguments)
    config = Config(
        seed=options.seed,
        actors=options.actors,
        target_return=options.target,
        max_updates=options.max_updates,
        max_seconds=options.max_seconds,
    )
    for path in filter(None, (options.out, options.summary)):
        path.parent.mkdir(parents=True, exist_ok=True)  # fails now rather than after the run
    try:
        with make_display(config) as display:
            result = train(config, display)
    except KeyboardInterrupt:
        logger.info("Interrupted: the actors are gone, and nothing is left in shared memory.")
        return 130
    except ProcessLostError as error:
        logger.error("Stopped: %s", error)
        return 3
    log_summary(result)
    if options.summary is not None:
        write_summary(result, options.summary)
    save_curve(result, config, options.out)
    logger.info("  learning curve      %s", options.out)
    return 0 if result.learned else 1


if __name__ == "__main__":
    sys.exit(main())
