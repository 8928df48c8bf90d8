"""The keys of the section ``engine``: where and how the clients are simulated."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fedray.config.section import Auto, Positive, Real, Section, Whole, at_home, in_message
from fedray.errors import closest
from fedray.usercode.importing import FORMS, is_user_defined

ENGINES = ("ray", "local")
"""The engines that come with fedray."""


class EngineConfig(Section):
    """The section ``engine`` of the configuration: where and how the clients are simulated.

    A key can change the results of a run only if its description says "changes bits".
    """

    kind: str = Field(
        "ray", description="ray; local: one process without Ray; or a pool of your own, file.py:Class; the same bits"
    )
    actors: Positive | Literal["auto", "per_client"] = Field(
        "auto", description="client actors; auto fills the cluster"
    )
    cpus_per_actor: Real = Field(1.0, ge=0, description="CPU share of a client actor")
    gpus_per_actor: Real = Field(0.0, ge=0, description="GPU share of a client actor: 1/n or a whole number")
    actors_per_gpu: Positive | Auto | None = Field(
        None, description="client actors on each GPU, instead of gpus_per_actor; auto (if none is set): as many as fit"
    )
    chunk: Positive | Auto = Field(
        "auto",
        description="the most clients of a batched stack, or that stay together; changes bits if batched",
    )
    lanes: Positive | Auto = Field(
        "auto", description="clients side by side on a GPU where they are not stacked; auto: by model and memory"
    )
    vectorize: bool | Auto = Field(
        "auto", description="train a chunk in one batched stream (torch.func.vmap); changes bits"
    )
    compile: bool | Auto = Field(
        "auto",
        description="compile gradients; auto: in long runs of dense models, or of stacks on a GPU; changes bits",
    )
    channels_last: bool | Auto = Field(
        "auto",
        description="lay 2-d convolutions out with channels last; auto: where that is faster; changes bits",
    )
    replay: bool | Auto = Field(
        "auto", description="record a gradient's operations and repeat them: faster, same bits; auto: of known layers"
    )
    start_timeout: Real = Field(120.0, gt=0, description="seconds to wait for the cluster's resources")
    answer_timeout: Real = Field(
        15.0, gt=0, description="seconds without a sign of life after which an actor's tasks are given to others"
    )
    max_retries: Whole = Field(3, ge=0, description="how often in a row an actor may be lost before the run stops")
    address: str | None = Field(None, description="address of a running Ray cluster; `local` starts one here")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there are GPUs, or where the run began; changes bits"
    )
    threads: Whole = Field(1, ge=1, le=1024, description="torch threads of every computing process; changes bits")
    server_cpus: Real = Field(0.0, ge=0, description="CPU share of the server actor")
    server_gpus: Real = Field(
        0.0,
        ge=0,
        description="GPU share of the server actor; more than 0: the server's rule is computed there; changes bits",
    )
    spill_dir: str | None = Field(
        None, description="place of clients' states (null: the run folder; /tmp on others), and of Ray's spilled data"
    )
    portable_bits: bool = Field(False, description="the same bits on different CPUs (slower); changes bits")
    profile: bool = Field(False, description="record what each round's time went into (profile.csv, TensorBoard)")

    @field_validator("spill_dir", mode="before")
    @classmethod
    def _find_home(cls, value: Any) -> Any:
        return at_home(value)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str) -> str:
        if kind not in ENGINES and not is_user_defined(kind):
            meant = closest(kind, ENGINES)
            hint = f" (did you mean {meant!r}?)" if meant else ""
            raise ValueError(f"must be 'ray' or 'local', or your own as {FORMS}, not {in_message(kind)}{hint}")
        return kind

    @property
    def asks_for_ray(self) -> bool:
        """Whether the user has set ``engine.kind`` or ``engine.address``. If Ray can't be started, such a run ends with
        an error, and any other run goes on without Ray."""
        return "kind" in self.model_fields_set or self.address is not None

    @model_validator(mode="after")
    def _check_shares(self) -> EngineConfig:
        if self.gpus_per_actor and self.actors_per_gpu:
            raise ValueError("give engine.gpus_per_actor or engine.actors_per_gpu, not both")
        if 0 < self.gpus_per_actor < 1 and abs(1 / self.gpus_per_actor - round(1 / self.gpus_per_actor)) > 1e-6:
            raise ValueError(
                f"engine.gpus_per_actor must be 1/n or a whole number, not {self.gpus_per_actor}: "
                f"use engine.actors_per_gpu={int(1 / self.gpus_per_actor)}"
            )
        if self.gpus_per_actor > 1 and self.gpus_per_actor != int(self.gpus_per_actor):
            raise ValueError(f"engine.gpus_per_actor must be 1/n or a whole number, not {self.gpus_per_actor}")
        return self
