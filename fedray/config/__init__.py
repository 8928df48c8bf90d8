"""The configuration of a run: its keys, and how it is read and checked."""

from fedray.config.reading import (
    assign,
    check,
    documented_keys,
    expand,
    flat,
    folder_name,
    load,
    plain,
    read,
    read_file,
    unknown_key,
)
from fedray.config.sections import (
    LOCAL_STEPS,
    ROUNDS,
    AlgorithmConfig,
    Auto,
    Config,
    DataConfig,
    EngineConfig,
    ModelConfig,
    PartitionConfig,
    Real,
    RunConfig,
    Section,
    TrainConfig,
    Whole,
)
from fedray.config.yaml_text import dump_yaml, parse_yaml

__all__ = [
    "LOCAL_STEPS", "ROUNDS", "AlgorithmConfig", "Auto", "Config", "DataConfig", "EngineConfig", "ModelConfig",
    "PartitionConfig", "Real", "RunConfig", "Section", "TrainConfig", "Whole", "assign", "check", "documented_keys",
    "dump_yaml", "expand", "flat", "folder_name", "load", "parse_yaml", "plain", "read", "read_file", "unknown_key",
]  # fmt: skip
