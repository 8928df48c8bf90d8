"""A run leaves the global settings and generators alone, and needs neither TensorFlow nor, without actors, Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_modules import AlwaysDropping
from small_runs import opened_run, run

import fedray
from fedray import Report


def test_neither_tensorflow_nor_torchs_compiler_is_imported(tmp_path):
    """A package named tensorflow is there, and tensorboard would take it. The compiler takes 200 MB."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise SystemExit('tensorflow was imported')")
    code = (
        "import sys; from fedray import simulate; from fedray.testing.contracts import SETTINGS, small_source;"
        "simulate({**SETTINGS, 'algorithm.name': 'fedavg', 'run.output': sys.argv[1]}, data=small_source());"
        "sys.exit('tensorflow' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    root = Path(fedray.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run").glob("*/events.out.tfevents.*"))


def test_actors_import_only_what_they_need():
    """Each of a run's processes imports it, while the user waits."""
    code = (
        "import sys, fedray.engine.ray.client_actor, fedray.engine.ray.server;"
        "print({'pandas', 'scipy', 'tensorboard', 'torch._dynamo'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


def test_no_lock_is_taken_at_forks_from_a_moment_on_while_ray_is_started():
    """Between the two halves of a fork it would act at the second half only, and release a lock that nobody holds."""
    code = (
        "import sys, fedray.engine.ray.start; import os;"
        "os.register_at_fork = lambda before=None, **_: 'acquire' in str(before) and sys.exit(f'{before} at forks');"
        "import torch, ray, fedray.api"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_model_that_draws_in_evaluations_leaves_the_global_generator_alone(tmp_path):
    """Evaluations of the same model also give the same numbers."""
    rows = []
    for attempt in ("one", "two"):
        for found in opened_run(tmp_path / attempt, "pfedmo", model=AlwaysDropping):
            torch.manual_seed(len(rows))
            before = torch.random.get_rng_state()
            rows.append([report.metrics["personalized_accuracy"] for report in found.rounds()])
            assert torch.equal(torch.random.get_rng_state(), before)
    assert rows[0] == rows[1]
    assert len(set(rows[0])) > 1


def test_torchs_global_settings_are_as_before(tmp_path):
    def settings() -> tuple[Any, ...]:
        return (
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    def inside(report: Report) -> None:
        seen.append(settings())

    def failing(report: Report) -> None:
        raise KeyError("the user's own")

    before, threads = settings(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        changed, seen = settings(), []
        run(tmp_path / "one", call={"callbacks": [inside]})
        assert settings() == changed
        assert seen[0][:4] == (1, True, True, False)
        with pytest.raises(KeyError):
            run(tmp_path / "two", call={"callbacks": [failing]})
        assert settings() == changed
    finally:
        torch.set_num_threads(threads)
    assert settings() == before


def test_a_local_run_needs_no_ray(tmp_path):
    code = (
        "import sys; sys.modules['ray'] = None;"
        "from fedray import simulate; from fedray.testing.contracts import SETTINGS, small_source;"
        "simulate({**SETTINGS, 'algorithm.name': 'pfedmo', 'run.output': sys.argv[1]}, data=small_source())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
