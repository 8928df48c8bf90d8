"""The keys of the data: which data are used, how they are scaled, and how they are partitioned among the clients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedray.config.section import Auto, Natural, Positive, Real, Section, Whole

TARGET_COLUMN = "target"
"""The default of ``data.target_column``: the column of a table that holds the targets."""

MAX_LENGTH = 128
"""The default of ``data.max_length``."""

ALPHA, CLUSTERS, MIN_SAMPLES = 0.5, 5, 1
"""The values that null stands for in the options of a partition."""


class PartitionConfig(Section):
    """The section ``data.partition`` of the configuration: how the samples of the training set are divided among the
    clients.

    The key ``kind`` names the way, and the other keys are its options. The functions in :mod:`fedray.data.partitions`
    say what each option does.
    """

    kind: str = Field(
        "auto",
        description="see `fedray datasets`; auto: natural if the data say whose each sample is, else dirichlet; iid "
        "where samples have no classes",
    )
    alpha: Real | None = Field(None, gt=0, description=f"Dirichlet concentration (xi of pFedMo); {ALPHA} unless set")
    prior: list[Annotated[Real, Field(ge=0)]] | None = Field(
        None, description="dirichlet_fixed: prior over the classes, uniform unless set"
    )
    capped: bool = Field(False, description="dirichlet: full clients get no more samples")
    rebalanced: bool = Field(False, description="dirichlet: capped, then made equal in size")
    classes_per_client: Whole | None = Field(None, ge=1, description="label_skew: classes x of each client")
    assign: Literal["random", "balanced"] = Field("random", description="label_skew: how class sets are chosen")
    on_empty: Literal["shrink", "fill", "error"] = Field(
        "shrink", description="label_skew: what happens when a class runs out"
    )
    sizes: list[Positive] | None = Field(None, description="quantity_skew: samples per client")
    shards_per_client: Whole = Field(1, ge=1, description="shards: shards per client")
    clusters: Whole | None = Field(None, ge=1, description=f"orthogonal: clusters of clients; {CLUSTERS} unless set")
    min_samples: Whole | None = Field(
        None, ge=0, description=f"least samples per client ({MIN_SAMPLES} unless set); 0 lets clients be empty"
    )
    max_clients: Whole | None = Field(None, ge=1, description="natural: draw so many of the data's own clients")
    max_samples: Whole | None = Field(None, ge=1, description="natural: draw so many of each client's samples")
    overlap: bool = Field(
        False, description="iid, dirichlet_fixed, orthogonal: clients draw samples_per_client each, and may overlap"
    )
    same_draw: bool = Field(
        False,
        description="with overlap, for dirichlet_fixed, orthogonal: all clients draw with the same random numbers, so "
        "that similar clients have mostly the same samples",
    )

    @model_validator(mode="after")
    def _check_same_draw(self) -> PartitionConfig:
        if self.same_draw and not self.overlap:
            raise ValueError("data.partition.same_draw=true needs data.partition.overlap=true")
        return self


class DataConfig(Section):
    """The section ``data`` of the configuration: which data are used, and how they are partitioned among
    the clients."""

    source: str = Field("sample", description="see `fedray datasets`, or your own: file.py:function or module:function")
    root: str | None = Field(
        None, description="folder of the files; unless set, $FEDRAY_DATA and the usual places are searched"
    )
    variant: str | None = Field(None, description="which of a source's variants; see `fedray datasets`")
    target_column: str = Field(TARGET_COLUMN, description="csv, hf: the column that holds the targets")
    client_column: str | None = Field(
        None, description='csv, hf: the column that says whose each sample is; "client", if there is one, unless set'
    )
    input_columns: list[str] | None = Field(
        None, min_length=1, description="csv, hf: the columns that are the model's inputs; all others unless set"
    )
    tokenizer: str | None = Field(
        None, description="hf: what turns texts into tokens: a folder of save_pretrained, or a name on the hub"
    )
    max_length: Whole | None = Field(
        None,
        ge=1,
        description=f"hf: tokens of a text; longer ones are cut, shorter ones padded; {MAX_LENGTH} unless set",
    )
    normalization: str = Field("default", description="mean and std of the inputs; see `fedray datasets`")
    mean: list[Real] | None = Field(
        None, min_length=1, description="instead of normalization: what is subtracted from pixels/255, or from floats"
    )
    std: list[Annotated[Real, Field(gt=0)]] | None = Field(
        None, min_length=1, description="what is then divided by; like mean one number for each channel, or for all"
    )
    clients: Whole = Field(20, ge=1, description="number of registered clients N")
    samples_per_client: Whole | None = Field(None, ge=1, description="fixed local size; all samples unless set")
    seed: Whole | None = Field(None, ge=0, lt=2**63, description="seed of partition and public set; = run.seed")
    partition: PartitionConfig = Field(default_factory=PartitionConfig)
    public_samples: Natural | Auto = Field(
        "auto", description="i.i.d. public set of the server; auto: 10 % if the algorithm needs it, else none"
    )
    public_overlap: bool = Field(
        False, description="clients may hold the samples of the public set, too: nothing is held out of them"
    )
    public_to: Literal["server", "clients"] = Field(
        "server", description="clients: partition the public set among them, on top of their samples"
    )
    validation_samples: Whole = Field(0, ge=0, description="held out of the training set for validation_accuracy")
    least_test_samples: Whole = Field(
        0, ge=0, description="least size of a client's test share; smaller ones are drawn again, and may overlap"
    )
    access: Literal["auto", "memory", "mapped", "lazy"] = Field(
        "auto",
        description="where samples are read from: memory; mapped: files that are mapped into memory and made once on a "
        "machine; lazy: a Dataset of yours, item by item; auto: as they are random and large; the bits are the same",
    )
    image_size: Whole | None = Field(
        None,
        ge=1,
        description="pixels of the square to which image files are scaled and cropped; sources of images need it",
    )
    augment: Literal["none", "crop_flip"] = Field("none", description="crop_flip: random crop (pad 4) and mirror")
    transform: str | None = Field(
        None,
        description="a function of yours that changes the inputs of a client's mini-batch at random, in training only: "
        "file.py:Name or module:Name",
    )

    @model_validator(mode="after")
    def _check_tokenizer(self) -> DataConfig:
        if self.max_length is not None and self.tokenizer is None:
            raise ValueError("data.max_length is for data.tokenizer, which is not set")
        if self.tokenizer is not None and self.source != "hf":
            raise ValueError(f"data.tokenizer is for data.source=hf, not {self.source}")
        return self

    @model_validator(mode="after")
    def _check_mean_and_std(self) -> DataConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("give both of data.mean and data.std")
        if self.mean is not None and self.normalization != "default":
            raise ValueError(f"data.mean and data.std are instead of data.normalization={self.normalization}")
        return self

    @model_validator(mode="after")
    def _check_public_overlap(self) -> DataConfig:
        if self.public_overlap and self.public_to == "clients":
            raise ValueError("data.public_overlap=true is for a public set of the server (data.public_to=server)")
        return self
