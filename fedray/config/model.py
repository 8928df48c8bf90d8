"""The section ``model`` of the configuration: which model is trained."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedray.config.section import Real, Section, Whole, at_home

GROUPS = 2
"""The default number of groups of a GroupNorm that replaces a model's own normalisation layer. It is the number in
GHBM's paper."""


class PeftConfig(Section):
    """The section ``model.peft``: small layers that are trained in place of the model's own (the library peft)."""

    kind: Literal["none", "lora"] = Field(
        "none", description="lora: products of two narrow matrices beside linear layers"
    )
    r: Whole = Field(8, ge=1, description="width of the matrices")
    alpha: Real = Field(16.0, gt=0, description="their product is multiplied by alpha / r")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description="names of the layers that get them, or the ends of these names; unset: all linear ones",
    )
    dropout: Real = Field(0.0, ge=0, lt=1, description="dropout of what goes into them")

    @model_validator(mode="after")
    def _check_kind(self) -> PeftConfig:
        fields = type(self).model_fields
        others = [key for key in fields if getattr(self, key) != fields[key].default]
        if self.kind == "none" and others:
            raise ValueError(f"model.peft.{others[0]} is for model.peft.kind=lora")
        return self


class ModelConfig(Section):
    """The section ``model`` of the configuration: which model is trained, with which initial weights, normalisation
    layers and head (last layers). Options of the model itself, such as ``model.hidden``, are further keys."""

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())
    name: str = Field("lenet5", description="see `fedray models`, or your own: file.py:Class or module:Class")
    init: Literal["default", "zeros"] = Field("default", description="PyTorch's initialisation, or zeros")
    weights: str | None = Field(None, description="a safetensors or pt file with initial weights")
    norm: Literal["batch", "group", "none"] | None = Field(
        None, description="normalisation layers in the place of the model's own BatchNorm and GroupNorm"
    )
    norm_groups: Whole = Field(GROUPS, ge=1, description="norm=group: groups of each GroupNorm")
    head: str = Field(
        "auto",
        description="head in the place of the last layer: none, linear, moon, siam, your own file.py:Class; auto: what "
        "the algorithm needs",
    )
    private: list[str] | None = Field(
        None,
        description="layers that stay at each client: head, base, norm, or names such as conv1 or *.bias; unset: those "
        "of the algorithm",
    )
    trainable: list[str] | None = Field(
        None,
        description="layers that are trained, named as private ones; the others stay as they are; unset: all, or with "
        "peft its own and the head",
    )
    peft: PeftConfig = Field(PeftConfig(), description="layers of the library peft, as in {kind: lora, r: 8}")
    proj_dim: Whole = Field(256, ge=1, description="width of the representation that the head gives")

    @field_validator("weights", mode="before")
    @classmethod
    def _find_home(cls, value: Any) -> Any:
        return at_home(value)

    @model_validator(mode="after")
    def _check_groups(self) -> ModelConfig:
        if self.norm != "group" and self.norm_groups != GROUPS:
            raise ValueError(f"model.norm_groups={self.norm_groups} is for model.norm=group")
        if self.init == "zeros" and (self.peft.kind != "none" or self.name.startswith("transformers:")):
            raise ValueError(
                "model.init=zeros would erase the weights of a model of transformers, or those beside LoRA"
            )
        return self
