"""Every key that a user can set in the configuration of a run, with its type, range, default and description.

The sections ``algorithm`` and ``model`` may have further keys, which the chosen algorithm or model declares and
:mod:`fedray.experiment.resolve` checks. This module imports neither torch nor Ray, so that a mistake is reported
immediately.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedray.config.data import DataConfig
from fedray.config.engine import EngineConfig
from fedray.config.model import ModelConfig
from fedray.config.privacy import PrivacyConfig
from fedray.config.robust import AggregationConfig, AttackConfig
from fedray.config.schedule import ScheduleConfig
from fedray.config.section import Natural, Positive, Reached, Real, Section, Whole, at_home, in_message
from fedray.config.system import SystemConfig
from fedray.usercode.extensions import Entry
from fedray.util.uris import is_folder, is_uri, local_folder, problem_of_uri

ALGORITHM = "pfedmo"
"""The default algorithm."""

ROUNDS, LOCAL_STEPS = 50, 20
"""The default numbers of rounds and of local steps, unless a configuration sets a key that replaces them."""

IGNORE_INDEX = -100
"""The default of ``task.ignore_index``: the target of tokens that do not count. PyTorch uses the same number."""

ADAM = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
"""The values that null stands for in the options of the optimizers adam and adamw. torch has the same defaults."""


Given = Literal[
    "data", "model", "loss", "metrics", "transform", "algorithm", "upload", "sampling", "aggregation", "attack"
]  # fmt: skip
"""The kinds of custom objects, which a user passes from Python instead of naming them in the configuration."""


class RunConfig(Section):
    """The section ``run`` of the configuration: the length of a run, what is evaluated in it, and where its
    results go."""

    name: str | None = Field(None, description="name of the run folder; <algorithm>-<source> unless set")
    seed: Whole = Field(0, ge=0, lt=2**63, description="seed of everything; data.seed sets that of the partition apart")
    output: str = Field(
        "runs/",
        description="folder in which the run folder is made; or its URI, such as s3://bucket/runs (tracking/README)",
    )
    working_copy: str | None = Field(
        None, description="folder here in which a run works whose run.output is a URI; in the user's cache unless set"
    )
    output_timeout: Real = Field(
        600.0, gt=0, description="seconds after which a run ends if a URI does not answer; what it has made stays here"
    )
    rounds: Whole | None = Field(None, ge=1, description=f"rounds R ({ROUNDS} unless run.iterations is set)")
    iterations: Whole | None = Field(None, ge=1, description="local iterations T: rounds = T // train.local_steps")
    eval_every: Whole = Field(1, ge=0, description="rounds between evaluations; 0 evaluates after the last round only")
    eval_test: bool = Field(
        True, description="evaluate the test set; the trials of a sweep do not, only the winners' runs do"
    )
    eval_train_samples: Whole = Field(0, ge=0, description="evaluate train_accuracy on so many training samples")
    eval_clients: Natural | Literal["all"] = Field(
        0,
        description="score the global model on the test share of each of so many clients, the same ones every time",
    )
    eval_local_models: bool = Field(
        False, description="also evaluate the models of the cohort's clients before they are averaged: local_accuracy"
    )
    finetune_steps: Whole = Field(
        0, ge=0, description="score the global model after so many plain local steps on each client of the cohort"
    )
    finetune_layers: list[str] | None = Field(
        None,
        min_length=1,
        description="of which layers these steps are, as names, patterns, head or base; unset: of all",
    )
    targets: list[Real] = Field([], description="values of the main metric whose first round is reported")
    stop_at: Reached | None = Field(
        None, description="end the run when the main metric has reached this value, or a column: {train_accuracy: 0.85}"
    )
    patience: Whole | None = Field(
        None, ge=1, description="end the run when the main metric has got no better for so many rounds"
    )
    last_rounds: Whole | None = Field(
        None, ge=1, description="also report the mean of the main metric over the evaluations of so many last rounds"
    )
    diagnostics: bool | Literal["all_clients", "virtual"] = Field(
        False, description="measure how clients drift apart; all_clients, virtual: also against these (tracking/README)"
    )
    save_best: bool = Field(False, description="keep the best evaluated model as model-best.safetensors")
    local_models_of: list[Natural] = Field(
        [], description="clients whose models are saved as they are after local training, before they are averaged"
    )
    local_models_in: list[Positive] = Field([], description="the rounds in which local_models_of are saved")
    personal_models_of: list[Natural] | Literal["all"] = Field(
        [], description="clients whose personal models are saved at the end of the run"
    )
    checkpoint_every: Whole = Field(10, ge=0, description="rounds between checkpoints; 0 turns them off")
    keep_checkpoints: Whole = Field(2, ge=1, description="how many of the last checkpoints are kept")
    resume: Literal["auto"] | bool = Field(
        "auto", description="auto: resume if unfinished and the same; true: resume or fail; false: move the old folder"
    )
    callbacks: list[Entry] = Field(
        [], description="objects that are shown the run as it goes on: file.py:Name, or {name: file.py:Name, option: 1}"
    )
    loggers: list[Entry] = Field(
        [],
        description="tools that show the run: mlflow, wandb, trackio, or your own as in run.callbacks",
    )
    group: str | None = Field(None, description="what loggers show runs under that belong together; sweeps set it")
    log_clients: bool = Field(True, description="write per-client rows to clients.parquet and evaluation.parquet")
    given: list[Given] = Field(
        [],
        description="what was handed to simulate() or tune() in Python; they set it, as without that it is another run",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name and (name in (".", "..") or "/" in name or not name.isprintable() or len(name.encode()) > 200):
            raise ValueError(
                f"must be the name of one folder, not {in_message(name)}; run.output says where it is made"
            )
        return name

    @field_validator("output", "working_copy", mode="before")
    @classmethod
    def _find_home(cls, value: Any) -> Any:
        return at_home(value)

    @field_validator("output")
    @classmethod
    def _check_output(cls, output: str) -> str:
        if is_uri(output) and (problem := problem_of_uri(output)):
            raise ValueError(problem)
        return output

    @model_validator(mode="after")
    def _check_local_models(self) -> RunConfig:
        if bool(self.local_models_of) != bool(self.local_models_in):
            raise ValueError("give both of run.local_models_of (clients) and run.local_models_in (rounds)")
        return self

    @property
    def place(self) -> Path:
        """The folder on this machine in which the run folder is made: ``run.output`` itself, or, if that is a URI, the
        folder of its working copy (``run.working_copy``, or one in the user's cache)."""
        return local_folder(self.output, self.working_copy)

    @property
    def place_setting(self) -> str:
        """The key that decides :attr:`place`, the folder in which the run folder is made, with its value, for messages:
        ``run.output=runs`` or ``run.working_copy=...``."""
        return f"run.{'working_copy' if is_uri(self.output) else 'output'}={self.place}"

    def with_fixed_place(self) -> RunConfig:
        """Returns a copy of this section with an absolute path for :attr:`place`, the folder in which the run folder is
        made, so that every process of this machine uses the same folder, whatever its working directory and environment
        are."""
        key = "working_copy" if is_uri(self.output) else "output"
        return self.model_copy(update={key: str(self.place.absolute())})

    @model_validator(mode="after")
    def _check_alternatives(self) -> RunConfig:
        if self.working_copy is not None and not is_uri(self.output):
            raise ValueError("run.working_copy is for a run.output that is a URI, such as s3://bucket/runs")
        if is_folder(self.output, self.place):
            raise ValueError("run.working_copy must be another folder than run.output")
        if self.rounds is not None and self.iterations is not None:
            raise ValueError("give run.rounds or run.iterations, not both")
        if self.finetune_layers and not self.finetune_steps:
            raise ValueError("run.finetune_layers is for run.finetune_steps, which is not set")
        if not self.eval_every and (self.stop_at is not None or self.patience is not None):
            raise ValueError("run.stop_at and run.patience need evaluations: run.eval_every of at least 1")
        return self


class AlgorithmConfig(Section):
    """The section ``algorithm`` of the configuration. The algorithm's hyper-parameters are further keys of
    this section."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(ALGORITHM, description="see `fedray algorithms`, or your own: file.py:Class or module:Class")


class TaskConfig(Section):
    """The section ``task`` of the configuration: what the model is trained for, that is, how its outputs are compared
    with targets."""

    kind: Literal["auto", "classification", "multilabel", "regression", "tokens", "other"] = Field(
        "auto", description="auto: as the targets are; other: any outputs and targets, with a loss of your own"
    )
    ignore_index: Whole = Field(IGNORE_INDEX, description="tokens: the target of tokens that do not count")
    label_smoothing: Real = Field(
        0.0, ge=0, lt=1, description="classification, tokens: share of the weight that all classes get in training"
    )
    loss: str | None = Field(
        None, description="another loss than the task's: one of fedray's, or your own as file.py:Name or module:Name"
    )
    metrics: dict[str, str] | list[str] = Field(
        {}, description="further metrics: {name: file.py:function}, or [file.py:function, ...], named as the functions"
    )
    metric: str | None = Field(
        None,
        description="the main metric, which best, targets, sweeps and reports follow: loss, one of the task's, or your "
        "own; unless set accuracy, f1 (multilabel), mean_squared_error (regression), perplexity (tokens)",
    )
    mode: Literal["auto", "max", "min"] = Field(
        "auto", description="whether more or less of the main metric is better; needed for a metric of your own"
    )

    @property
    def named_metrics(self) -> dict[str, str]:
        """The additional metrics (``task.metrics``) as a dict: for the name of each metric the function that computes
        it, as a text such as ``file.py:function``.

        If ``task.metrics`` is a list of functions, each metric has the name of its function.
        """
        asked = self.metrics
        return asked if isinstance(asked, dict) else {name.rpartition(":")[2]: name for name in asked}

    @model_validator(mode="after")
    def _check_metrics(self) -> TaskConfig:
        if len(self.named_metrics) < len(self.metrics):
            raise ValueError("task.metrics: two have the same name: give them names, as in {mine: file.py:function}")
        return self


class TrainConfig(Section):
    """The section ``train`` of the configuration: the clients' local training, and how many of them take part in
    a round."""

    local_steps: Whole | None = Field(
        None, ge=1, description=f"local steps tau (J); {LOCAL_STEPS} unless local_epochs is set"
    )
    local_epochs: Whole | None = Field(None, ge=1, description="local epochs E instead of steps")
    batch_size: Positive | Literal["full"] = Field(64, description="batch size B, or full")
    lr: Real = Field(0.01, gt=0, description="client learning rate eta_l")
    server_lr: Real = Field(1.0, gt=0, description="server learning rate eta_g")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(
        "sgd", description="the clients' optimizer; adam and adamw where an algorithm's local rule is a gradient step"
    )
    beta1: Real | None = Field(
        None, ge=0, lt=1, description=f"adam, adamw: decay of the mean; {ADAM['beta1']} unless set"
    )
    beta2: Real | None = Field(
        None, ge=0, lt=1, description=f"adam, adamw: decay of the mean square; {ADAM['beta2']} unless set"
    )
    epsilon: Real | None = Field(
        None, ge=1e-30, description=f"adam, adamw: what is added to the root; {ADAM['epsilon']:g} unless set"
    )
    momentum: Real = Field(0.0, ge=0, lt=1, description="sgd: momentum")
    nesterov: bool = Field(False, description="Nesterov's form of train.momentum")
    momentum_reset: Literal["epoch", "round", "never"] = Field(
        "round", description="when the clients' momentum begins anew at 0; never: clients keep it between rounds"
    )
    weight_decay: Real = Field(0.0, ge=0, description="weight decay of the clients' optimizer")
    decay_norms_and_biases: bool = Field(
        True, description="whether weight decay also pulls biases and the parameters of normalisation layers"
    )
    grad_clip: Real = Field(0.0, ge=0, description="clip the gradient to this norm, before weight decay; 0 is off")
    lr_decay: Real = Field(1.0, gt=0, le=1, description="factor on eta_l per round")
    lr_schedule: ScheduleConfig = Field(ScheduleConfig(), description="how eta_l changes from round to round")
    server_lr_schedule: ScheduleConfig = Field(ScheduleConfig(), description="how eta_g changes from round to round")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = Field(
        "fp32",
        description="tf32: products and convolutions of GPUs round their factors; bf16, fp16: autocast on the forward "
        "pass, fp16 with loss scaling",
    )
    cohort_size: Whole | None = Field(None, ge=1, description="clients per round; all unless set")
    participation: Real | None = Field(
        None, gt=0, le=1, description="clients per round as a fraction C of those with samples"
    )
    sampling: Entry = Field(
        "uniform",
        description="who takes part: uniform, cyclic, weighted (by samples), {kind: power_of_choice, candidates: 20} "
        "(those with the largest losses), oort (those that are most useful), or your own: file.py:Name, {kind: "
        "file.py:Name, option: 1}",
    )
    weighting: Literal["auto", "samples", "uniform"] = Field("auto", description="aggregation weights p_i")
    aggregation: AggregationConfig = Field(
        AggregationConfig(), description="what takes the place of the mean of uploads, as in {kind: krum, f: 2}"
    )
    upload: list[Entry] = Field(
        [],
        description="steps that uploads pass before they are summed, as in [{clip: 1}, {topk: 0.01}, {noise: 1}]; also "
        "randk, qsgd, quantize, sign and your own: file.py:Name, or {name: file.py:Name, option: 1}",
    )

    @property
    def adam(self) -> dict[str, float]:
        """The options of the optimizers adam and adamw (beta1, beta2, epsilon) by name, with defaults for those that
        are not set; an empty dict for sgd."""
        asked = {key: getattr(self, key) for key in ADAM}
        return {} if self.optimizer == "sgd" else {key: ADAM[key] if asked[key] is None else asked[key] for key in ADAM}

    @property
    def steps(self) -> int | None:
        """The number of local steps that a client makes in a round; None if ``local_epochs`` sets the length of
        local training."""
        return None if self.local_epochs is not None else self.local_steps or LOCAL_STEPS

    @model_validator(mode="after")
    def _check_alternatives(self) -> TrainConfig:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("give train.local_steps or train.local_epochs, not both")
        if self.cohort_size is not None and self.participation is not None:
            raise ValueError("give train.cohort_size or train.participation, not both")
        if self.nesterov and not self.momentum:
            raise ValueError("train.nesterov=true needs train.momentum above 0")
        if self.momentum_reset != "round" and not self.momentum:
            raise ValueError(f"train.momentum_reset={self.momentum_reset} needs train.momentum above 0")
        sgd = self.optimizer == "sgd"
        foreign = [key for key in ADAM if getattr(self, key) is not None] if sgd else ["momentum"] * bool(self.momentum)
        if foreign:
            raise ValueError(f"train.{foreign[0]} is not for train.optimizer={self.optimizer}")
        if self.lr_decay != 1 and self.lr_schedule.kind != "constant":
            raise ValueError("give train.lr_decay or train.lr_schedule, not both")
        return self


class Config(Section):
    """The whole configuration of a run, with an attribute for each section, such as ``config.train.lr``."""

    run: RunConfig = Field(default_factory=RunConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    system: SystemConfig = Field(default_factory=SystemConfig)
    privacy: PrivacyConfig = Field(default_factory=PrivacyConfig)
    attack: AttackConfig = Field(default_factory=AttackConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    for_algorithm: dict[str, dict[str, Any]] = Field(
        {}, exclude=True, description="what is said for single algorithms: keys by name, used for that of the run"
    )

    @property
    def rounds(self) -> int:
        """The number of rounds R of the run: ``run.rounds``, or the number that follows from ``run.iterations``."""
        if self.run.iterations is not None and self.train.steps is not None:
            return self.run.iterations // self.train.steps
        return self.run.rounds or ROUNDS

    @model_validator(mode="after")
    def _check_what_is_followed(self) -> Config:
        run = self.run
        of_main = {"stop_at": None if isinstance(run.stop_at, dict) else run.stop_at, "patience": run.patience}
        of_main |= {"save_best": run.save_best or None, "last_rounds": run.last_rounds}
        asked = [key for key, value in of_main.items() if value is not None]
        if asked and not run.eval_test and not self.data.validation_samples:
            raise ValueError(f"run.{asked[0]} needs a test set (run.eval_test) or data.validation_samples")
        return self

    @model_validator(mode="after")
    def _check_iterations(self) -> Config:
        if self.run.iterations is not None:
            steps = self.train.steps
            if steps is None:
                raise ValueError("run.iterations needs train.local_steps, not train.local_epochs")
            if self.run.iterations < steps:
                raise ValueError(f"run.iterations={self.run.iterations} is less than train.local_steps={steps}")
        return self
