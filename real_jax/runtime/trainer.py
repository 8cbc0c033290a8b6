"""The training loop.

One run:
  1. Load or make the actor's weights; fine-tune it on answers (stage sft).
  2. Give a copy of it a scalar head and train that on preference pairs (stage preference): the reward model.
  3. PPO: the reference is the fine-tuned actor, the critic starts from the reward model. Each iteration the engine walks
     the graph of six calls under the plan, moving weights and data between the calls' meshes.
  4. Before and after, the actor answers held-out prompts and a judge scores them.
Every stage is the same loop: next batch, one engine iteration, one metrics row, now and then a checkpoint.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from real_jax.data.corpus import Corpus
from real_jax.models.hf import save as save_model
from real_jax.models.load import load_model
from real_jax.models.transformer import abstract_params, initialize
from real_jax.runtime import distributed
from real_jax.runtime.build import compile_programs
from real_jax.runtime.calls import Program
from real_jax.runtime.checkpoint import Checkpoints
from real_jax.runtime.engine import Engine
from real_jax.runtime.history import History
from real_jax.runtime.hosts import on_main
from real_jax.runtime.meshes import prepare_devices
from real_jax.runtime.metrics import CompileCounter, MetricsLog, Row, flatten
from real_jax.runtime.moves import planned_moves
from real_jax.runtime.prepare import (
    STAGES,
    Stage,
    load_data,
    load_tokenizer,
    make_build,
    make_stages,
    model_archs,
    program_key,
)
from real_jax.runtime.run_directory import CONFIG, PLAN
from real_jax.runtime.weights import WeightStore
from real_jax.spec import files
from real_jax.spec.arch import Arch, Weight, weights
from real_jax.spec.errors import Stopped, UsageError
from real_jax.spec.experiment import Experiment, ModelConfig
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan
from real_jax.spec.timeline import Event

HostParams = dict[str, np.ndarray]
Programs = dict[tuple, Program]  # compiled programs that a search has left, by `prepare.program_key`


class Listener(Protocol):
    """Hears what a run does; every method may be left as it is."""

    def stage(self, name: str, steps: int, done: int) -> None: ...
    def compiled(self, program: Program) -> None: ...
    def row(self, row: Row, total: int) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    """Hears and says nothing."""

    def stage(self, name: str, steps: int, done: int) -> None:
        del name, steps, done

    def compiled(self, program: Program) -> None:
        del program

    def row(self, row: Row, total: int) -> None:
        del row, total

    def note(self, text: str) -> None:
        del text


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Responses to the held-out prompts and their scores; `reward` is the mean score."""

    reward: float
    scores: list[float]
    prompts: list[str]
    responses: list[str]
    judge: str


class Trainer:
    """Runs an experiment under a plan.

    Args:
      experiment: what to train.
      plan: a placement for every call of every stage.
      run_dir: folder for metrics, checkpoints, config and plan; None keeps the run in memory.
      resume: go on from the newest checkpoints in `run_dir`.
      programs: compiled programs to reuse.
      listener: hears of progress.
      cluster: what the plan was made for; metrics then say what was predicted of each reallocation.
      stop: asked once an iteration, in all processes alike, whether the run is to end early: it then writes a checkpoint
        and `fit` raises `Stopped`.

    In several processes every one of them makes the same calls. The first alone reads the data, scores responses on the
    host and writes files; checkpoints are written by all.

    Attributes:
      metrics: one row per iteration done; shows itself as a table and plots (`runtime.history.History`).
      events: timeline of the newest PPO iteration.
      before, after: evaluations around PPO.
    """

    def __init__(
        self,
        experiment: Experiment,
        plan: ExecutionPlan,
        *,
        run_dir: Path | str | None = None,
        resume: bool = False,
        programs: Programs | None = None,
        listener: Listener | None = None,
        cluster: Cluster | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        prepare_devices()
        self.experiment, self.plan = experiment, plan
        self.archs = model_archs(experiment)
        self.stages = {s.name: s for s in make_stages(experiment, self.archs)}
        for stage in self.stages.values():
            missing = [c.name for c in stage.graph.calls if c.kind != "host" and c.name not in plan.placements]
            if missing:
                raise UsageError(f"The plan has no placement for call {missing[0]!r}. Add a line for it under 'calls'.")
        self.tokenizer = load_tokenizer(experiment)
        self._main = distributed.is_main()
        self.corpus: Corpus | None = load_data(experiment, self.tokenizer, self.archs) if self._main else None
        self.run_dir = Path(run_dir) if run_dir else None
        self._stop, self._cluster = stop, cluster
        self.listener: Listener = listener or Silent()
        self.programs: Programs = programs if programs is not None else {}
        self.events: list[Event] = []
        self.before: Evaluation | None = None
        self.after: Evaluation | None = None
        self._log = MetricsLog(self.run_dir if self._main else None)
        self._compiles = CompileCounter()
        self._engine: Engine | None = None
        self._done = {name: 0 for name in self.stages}
        self._meta: dict[str, Any] = {}
        self._weights: dict[str, HostParams] = {}
        self._checkpoints: dict[str, Checkpoints] = {}
        if self.run_dir:
            for name in self.stages:
                self._checkpoints[name] = Checkpoints(self.run_dir / "checkpoints" / name, experiment.checkpoint.keep)
            if resume:
                self._done = {name: c.latest() or 0 for name, c in self._checkpoints.items()}
                self._log.keep_until(self._done, STAGES)
            elif self._main:
                files.save_experiment(experiment, self.run_dir / CONFIG)
            if self._main:
                files.save_plan(plan, self.run_dir / PLAN)

    @property
    def metrics(self) -> History:
        return History(self._log.rows)

    @property
    def _tokens(self) -> tuple[int, int]:
        return self.tokenizer.eos_id, self.tokenizer.pad_id

    @property
    def done(self) -> int:
        """PPO iterations done."""
        return self._done["ppo"]

    def fit(self, steps: int | None = None) -> "Trainer":
        """Runs every stage that is not done, PPO up to `steps` iterations in all (default: the experiment's). Raises
        Stopped where `stop` asked for an early end."""
        if self._engine is None:
            self._load_actor()
            for name in ("sft", "preference"):
                if name in self.stages:
                    self._warm_up(self.stages[name])
        stage, steps = self.stages["ppo"], self.experiment.steps if steps is None else steps
        engine = self._ppo_engine()
        if self.before is None:
            self.before = self._restored_before() or self.evaluate()
        self._meta["before"] = dataclasses.asdict(self.before)
        self._run(stage, engine, steps)
        self.after = self.evaluate()
        return self

    # Stages

    def _warm_up(self, stage: Stage) -> None:
        """Supervised or preference training of one model; leaves its weights in `_weights`."""
        (model,) = stage.graph.models
        table = self._table(stage, model)
        done = self._done[stage.name]
        if done >= stage.steps:
            self._weights[model] = self._checkpoints[stage.name].restore_params(done, model, abstract_params(table))
            return
        engine = self._make_engine(stage)
        engine.store.put(model, self._weights["actor"] if model == "actor" else self._reward_start(table))
        if done:
            self._checkpoints[stage.name].restore(done, engine)
        self._run(stage, engine, stage.steps)
        self._weights[model] = engine.fetch(engine.store.home(model).params)
        engine.close()

    def _ppo_engine(self) -> Engine:
        if self._engine is None:
            stage = self.stages["ppo"]
            self._engine = engine = self._make_engine(stage)
            reward = self._weights.get("reward")
            if reward is None and not self.experiment.reward.function:
                reward = self._reward_start(self._table(stage, "reward"))
            start = {"actor": self._weights["actor"], "reference": self._weights["actor"], "reward": reward}
            start["critic"] = self._critic_start(self._table(stage, "critic"), reward)
            for model in stage.graph.models:
                engine.store.put(model, start[model])
            self._weights.clear()
            if self._done["ppo"]:
                self._meta = dict(self._checkpoints["ppo"].restore(self._done["ppo"], engine))
        return self._engine

    def _make_engine(self, stage: Stage) -> Engine:
        build = make_build(self.experiment, stage, *self._tokens)
        keys = {
            c.name: program_key(self.experiment, stage.name, c.name, self.plan[c.name], self._tokens)
            for c in stage.graph.calls
            if c.kind != "host"
        }
        known = {call: self.programs[key] for call, key in keys.items() if key in self.programs}
        self.listener.stage(stage.name, stage.steps, self._done[stage.name])
        programs = compile_programs(build, self.plan, known=known, progress=self.listener.compiled)
        self.programs |= {keys[call]: program for call, program in programs.items()}
        host = {"reward_function": self._score_on_host} if self.experiment.reward.function else {}
        return Engine(stage.graph, programs, WeightStore(stage.graph, programs), host, build.algorithm.initial)

    def _run(self, stage: Stage, engine: Engine, steps: int) -> None:
        """The loop of every stage."""
        done, saved = self._done[stage.name], self._checkpoints.get(stage.name)
        stopping = False

        def pause(step: int) -> bool:
            nonlocal stopping
            stopping = self._stop()
            return stopping or self._checkpoint_due(step + 1, steps) or self._evaluation_due(stage, step + 1, steps)

        moves = planned_moves(engine.programs, engine.store, self._cluster)
        self._compiles.since()  # those of building the stage do not count
        results = engine.run(range(done, steps), lambda i: self._inputs(stage, i), frozenset({"lengths"}), pause)
        for result in results:
            done = result.iteration + 1
            row = flatten(stage.name, result.iteration, result, int(np.sum(result.batch["lengths"])), moves)
            row["compiles"] = self._compiles.since()
            if stage.name == "ppo":
                self.events = result.events
            if self._evaluation_due(stage, done, steps):
                row["held_out_reward"] = self.evaluate().reward
            self._done[stage.name] = done
            self._log.add(row)
            self.listener.row(row, steps)
            if saved and (stopping or self._checkpoint_due(done, steps)):
                saved.save(done, engine, self._meta)
            if stopping:
                break
        if saved:
            saved.wait()
        if stopping and done < steps:
            raise Stopped(f"Stopped as asked after iteration {done} of {steps} of stage {stage.name}.")

    def _checkpoint_due(self, done: int, steps: int) -> bool:
        every = self.experiment.checkpoint.every
        return done == steps or (every > 0 and done % every == 0)

    def _evaluation_due(self, stage: Stage, done: int, steps: int) -> bool:
        every = self.experiment.evaluate_every
        return stage.name == "ppo" and every > 0 and done % every == 0 and done < steps

    def _inputs(self, stage: Stage, step: int) -> dict[str, np.ndarray]:
        return distributed.once(lambda: self._load_inputs(stage, step))

    def _load_inputs(self, stage: Stage, step: int) -> dict[str, np.ndarray]:
        if stage.name == "sft":
            return self.corpus.answers[step]
        if stage.name == "preference":
            return self.corpus.pairs[step]
        batch = dict(self.corpus.prompts[step])
        del batch["prompt_ids"]
        rows = np.arange(self.experiment.batch, dtype=np.int64) + step * self.experiment.batch
        return batch | {"row_ids": (rows % 2**31).astype(np.uint32)}

    # Weights

    def _table(self, stage: Stage, model: str) -> dict[str, Weight]:
        return weights(stage.work.archs[model], stage.work.heads[model])

    def _initial(self, table: Mapping[str, Weight], purpose: int) -> HostParams:
        key = jax.random.fold_in(jax.random.key(self.experiment.seed), purpose)
        return jax.device_get(initialize(table, key))

    def _load_actor(self) -> None:
        if self._done.get("sft", 0) >= self.experiment.sft.steps > 0:
            return  # the fine-tuned weights come from their checkpoint
        self._weights["actor"] = self._load(self.experiment.actor, self.archs["actor"], weights(self.archs["actor"]), 0)

    def _load(self, config: ModelConfig, arch: Arch, table: Mapping[str, Weight], purpose: int) -> HostParams:
        """Weights by their configuration: read from a path, or random; a scalar head that the path lacks is random."""
        if not config.path:
            return self._initial(table, purpose)
        self.listener.note(f"reading {config.path}")
        _, params = load_model(config.path)
        return self._backbone(params, table, purpose)

    def _backbone(self, params: HostParams, table: Mapping[str, Weight], purpose: int) -> HostParams:
        """The weights that `table` shares with `params`, and a fresh head where there is none."""
        rest = {name: weight for name, weight in table.items() if name not in params}
        fresh = self._initial(rest, purpose) if rest else {}
        return {name: params[name] if name in params else fresh[name] for name in table}

    def _reward_start(self, table: Mapping[str, Weight]) -> HostParams:
        config = self.experiment.reward.model
        if config.path or config.arch:
            return self._load(config, self.archs["reward"], table, 1)
        return self._backbone(self._weights["actor"], table, 1)

    def _critic_start(self, table: Mapping[str, Weight], reward: HostParams | None) -> HostParams:
        config = self.experiment.critic
        if config.path or config.arch:
            return self._load(config, self.archs["critic"], table, 2)
        return self._backbone(reward if reward is not None else self._weights["actor"], table, 2)

    # Text

    def _texts(
        self, tokens: np.ndarray, prompt_lengths: np.ndarray, lengths: np.ndarray
    ) -> tuple[list[str], list[str]]:
        """Prompts and responses as text; where each ends is told by lengths, never by a token."""
        prompts, responses = [], []
        for row, first, end in zip(tokens, prompt_lengths, lengths, strict=True):
            prompts.append(self.tokenizer.decode(row[:first]))
            responses.append(self.tokenizer.decode(row[first:end]))
        return prompts, responses

    def _score_on_host(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        prompts, responses = self._texts(batch["tokens"], batch["prompt_lengths"], batch["lengths"])
        return {"scores": np.asarray(self.corpus.judge(prompts, responses), np.float32)}

    def evaluate(self) -> Evaluation:
        """Answers the held-out prompts with the actor as it is and scores the answers; the random numbers are always
        the same ones."""
        engine = self._ppo_engine()
        responses: list[str] = []
        scores: list[float] = []
        batches, by_model = distributed.once(self._held_out_batches)
        for inputs in batches:
            written = engine.run_call("actor_generate", inputs)
            _, texts = self._texts(written["tokens"], inputs["prompt_lengths"], written["lengths"])
            responses += texts
            if by_model:
                scored = engine.run_call("reward_inference", {k: written[k] for k in ("tokens", "lengths")})
                scores += scored["scores"].tolist()
        return distributed.once(lambda: self._judged(responses, scores))

    def _held_out_batches(self) -> tuple[list[dict[str, np.ndarray]], bool]:
        """Inputs, and whether it is for the reward model to score the answers."""
        e = self.experiment
        starts = range(0, len(self.corpus.held_out), e.batch)
        pad = self.tokenizer.pad_id
        batches = [self.corpus.held_out_batch(i, e.batch, e.data.prompt_length, pad) for i in starts]
        return batches, self.corpus.judge is None

    def _judged(self, responses: list[str], scores: list[float]) -> Evaluation:
        """By the task's own rule where it has one, else by the reward model, which gave `scores`. The last batch may be
        filled up with rows that do not count."""
        prompts, count = list(self.corpus.held_out_texts), len(self.corpus.held_out)
        responses = responses[:count]
        if self.corpus.judge is not None:
            scores = self.corpus.judge(prompts, responses)
        scores = [float(s) for s in scores[:count]]
        return Evaluation(float(np.mean(scores)), scores, prompts, responses, self.corpus.judge_name)

    def _restored_before(self) -> Evaluation | None:
        kept = self._meta.get("before")
        return Evaluation(**kept) if kept else None

    def params(self, model: str = "actor") -> HostParams | None:
        """A model's weights, in the memory of the first process; None in the others."""
        store = self._ppo_engine().store
        return on_main(store.home(model).params, store.mover)

    def export(self, folder: Path | str) -> list[Path]:
        """Writes the actor as a Hugging Face folder, with its tokenizer, and returns the files."""
        params = self.params("actor")
        return save_model(folder, self.archs["actor"], params, self.tokenizer) if self._main else []

    def close(self) -> None:
        """Waits for checkpoints in progress and closes the files."""
        for checkpoints in self._checkpoints.values():
            checkpoints.close()
        self._log.close()
        if self._engine is not None:
            self._engine.close()
