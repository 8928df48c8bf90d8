"""The configuration of a run: its keys, and how it is read and checked."""

from fedray.config.data import ALPHA, CLUSTERS, MAX_LENGTH, MIN_SAMPLES, TARGET_COLUMN, DataConfig, PartitionConfig
from fedray.config.engine import EngineConfig
from fedray.config.keys import documented_keys, unknown_key
from fedray.config.model import ModelConfig
from fedray.config.reading import (
    assign,
    check,
    expand,
    flat,
    load,
    plain,
    read,
    read_file,
    run_name,
)
from fedray.config.schedule import ScheduleConfig
from fedray.config.section import Auto, Real, Section, Whole
from fedray.config.sections import (
    IGNORE_INDEX,
    AlgorithmConfig,
    Config,
    Given,
    RunConfig,
    TaskConfig,
    TrainConfig,
)
from fedray.config.yaml_text import dump_yaml, parse_yaml

__all__ = [
    "ALPHA", "CLUSTERS", "IGNORE_INDEX", "MAX_LENGTH", "MIN_SAMPLES", "TARGET_COLUMN", "AlgorithmConfig", "Auto",
    "Config", "DataConfig", "EngineConfig", "Given", "ModelConfig", "PartitionConfig", "Real", "RunConfig",
    "ScheduleConfig", "Section", "TaskConfig", "TrainConfig", "Whole", "assign", "check", "documented_keys",
    "dump_yaml", "expand", "flat", "load", "parse_yaml", "plain", "read", "read_file", "run_name", "unknown_key",
]  # fmt: skip
