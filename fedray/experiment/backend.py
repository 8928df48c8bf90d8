"""Decides how clients' gradients are computed: in batched stacks (``engine.vectorize``), compiled (``engine.compile``)
and replayed (``engine.replay``)."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn
from torch.fx import GraphModule

from fedray.config import Config, EngineConfig
from fedray.core.precision import HALF
from fedray.core.structure import leaves
from fedray.data.federated import FederatedData
from fedray.errors import UserError
from fedray.experiment.model import ModelStage
from fedray.experiment.training import TrainingStage
from fedray.gradients.known_code import unknown_code
from fedray.gradients.passes import ELSEWHERE
from fedray.models.compiling import traced_gradient
from fedray.models.stacking import samples_of_trial, stacking_obstacle
from fedray.warning import as_warning

VMAP_CHUNK = 64
"""The largest number of clients in a batched stack on a CPU under ``engine.chunk: auto``. It is lower if a cohort would
not make two stacks.

In stacks of 64 a CPU trains 1.25 times as many clients in a second as in stacks of 32, with logistic regression as the
model; with an MLP it is 1.1 times as many.
"""

LEAST_VMAP_CHUNK = 8
"""The smallest number of clients for which a batched stack is faster on a CPU."""

VMAP_FLOPS = 2e5
"""A CPU trains a batched stack faster than one client after another if one client's batch takes at most this number of
forward FLOPs, times the clients of the stack. A step of a smaller model (logistic regression, small MLPs) spends most
of its time starting operations, which a stack starts only once; a step of a larger one computes. Measured by
analysis/benchmarks/chunks.py."""


DOCUMENTED = "see 'Replayed gradients' in the engine's documentation"
"""The documentation of replayed gradients, for messages."""

LONG = 100_000
"""The number of local steps, of all clients in all rounds, from which ``engine.compile: auto`` compiles on a CPU.

A process takes up to 20 s for its first graph, and 3 s if another process has compiled it before. On a CPU a step of a
small dense model becomes 0.2 to 0.5 ms faster.
"""

GPU_FLOPS = 3e8
"""A GPU trains a batched stack faster than lanes of clients if one client's batch takes at most this number of forward
FLOPs. LeNet-5 with batches of 64 takes 0.05e9, and is three times as fast in stacks; GHBM's CNN with batches of 50
takes 1.5e9, and is as fast in lanes, where it may use tensor cores; ResNet-18 takes 56e9, and 0.6 times as fast in
stacks (:mod:`fedray.gradients.stacked_layers`)."""

GPU_FULL = 3e9
"""The forward FLOPs of a stack's mini-batches that keep a GPU busy. A larger stack takes more memory, and is no faster:
rounds of 100 clients of LeNet-5 make 17,400 local steps a second in two stacks as in one."""

GPU_CHUNK = 1024
GPU_NUMBERS = 2**28
"""The limits of a stack on a GPU under ``engine.chunk: auto``: its clients, and the numbers in their parameters and
mini-batches together. Local training takes about five times the memory of these numbers."""

GPU_LONG = 2_000_000
"""The number of local steps from which ``engine.compile: auto`` compiles the gradients of stacks on a GPU.

A process takes 17 s or more for its first graph. LeNet-5 saves 14 us per local step, so that compiling pays after 1.2
million."""

SLOWER_LAYERS = (
    nn.RNNBase, nn.LayerNorm, nn.GroupNorm, nn.Embedding, nn.MultiheadAttention,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
SLOWER = ("conv", "pool", "norm", "embedding", "attention", "fft")
"""Layers, and parts of the names of operations, that torch's own kernels on a CPU compute faster than compiled ones.

Compiled gradients of small convolutional networks of torch's layers take 0.87 to 1.19 of the time of replayed ones,
0.95 on average, which makes no difference in whole rounds. Those of fedray's own LeNet-5, CNNs and ResNet-20 take 1.15
to 1.41 (``analysis/benchmarks/compiled.py``).
"""

PYTHON_FLOPS = 1e9
"""The forward FLOPs of a mini-batch above which the time of a local step's Python code is negligible. A round of
pfl-research's simple_cnn with mini-batches of 10 (0.34e9) takes 1.08 times as long with this code."""


def in_stacks(
    engine: EngineConfig, device: str, data: FederatedData, training: TrainingStage, model: ModelStage
) -> tuple[bool, int | None, str | None]:
    """Decides whether clients are trained in batched stacks (``engine.vectorize``). A stack is several clients that are
    trained together, as rows of one tensor.

    Returns three values:

    * whether clients are trained in stacks;
    * with stacks the largest number of clients in a stack; without stacks the size of the groups of clients that are
      never divided between workers (``engine.chunk``), or None if the user has set no size;
    * a line for the user that says why there are no stacks although they would be faster, or None.

    The first two values change the bits of the results. So they depend only on the configuration, the data, the model,
    and ``device`` (cpu or cuda), and not on anything else of the machine. Raises :class:`UserError` if
    ``engine.vectorize=true`` is impossible.
    """
    batch_size, cohort_size = training.batch_size, training.cohort_size

    def obstacle() -> str | None:
        return stacking_obstacle(model.module, model.task, *data.examples(samples_of_trial(batch_size)), device)

    line: str | None = None
    work = model.facts.flops * batch_size
    if engine.chunk != "auto":
        chunk = engine.chunk
    elif device == "cuda":
        inputs = sum(leaf[0].numel() for leaf in leaves(data.examples(1)[0]))
        chunk = _gpu_chunk(work, model.facts.parameters + batch_size * inputs, cohort_size)
    else:
        chunk = min(VMAP_CHUNK, (cohort_size + 1) // 2)
    vectorize = engine.vectorize
    if vectorize == "auto":
        if device == "cuda":
            pays = chunk >= min(LEAST_VMAP_CHUNK, cohort_size) and work <= GPU_FLOPS
        else:
            pays = chunk >= LEAST_VMAP_CHUNK and work <= VMAP_FLOPS * chunk
        reason = obstacle() if pays else None
        if reason is not None:
            line = f"engine.vectorize=auto: clients are trained one after another, which is slower, because {reason}"
        vectorize = pays and reason is None
    elif vectorize and (reason := obstacle()):
        raise UserError(f"engine.vectorize=true: this model can't be batched over clients: {reason}; use auto")
    if not vectorize:
        return False, None if engine.chunk == "auto" else engine.chunk, line
    return True, chunk, None


def _gpu_chunk(work: float, numbers: int, cohort_size: int) -> int:
    """Returns the largest number of clients in a stack on a GPU.

    The mini-batch of one client takes ``work`` forward FLOPs, and its parameters and inputs have ``numbers`` numbers.
    """
    busy = max(LEAST_VMAP_CHUNK, math.ceil(GPU_FULL / max(1, work)))
    return max(1, min(busy, GPU_CHUNK, GPU_NUMBERS // numbers, cohort_size))


def is_compiled(
    config: Config,
    begun: bool | None,
    steps: float,
    device: str,
    vectorize: bool,
    module: nn.Module,
    trace: Callable[[], GraphModule | str],
    missing: Callable[[], str | None],
) -> tuple[bool, str | None]:
    """Decides whether gradients are compiled by torch's compiler (``engine.compile``). Returns the decision, and a line
    for the user or None.

    ``begun`` is the decision of a run that has begun before, and None for a new run. ``steps`` is the number of local
    steps of all clients in all rounds, and ``module`` the model that they train. ``device`` is cpu or cuda, and
    ``vectorize`` says whether clients are trained in stacks (several clients as rows of one tensor). ``trace()``
    returns the operations of a gradient as a graph, or the reason why it can't be compiled. ``missing()`` returns what
    a machine of the cluster lacks to compile, or None. Raises :class:`UserError` if a machine can't compile, but
    gradients must be compiled because the user asks for it or the run began with it.
    """
    asked = config.engine.compile
    wanted = begun if asked == "auto" else asked
    pays = _may_pay_to_compile(steps, device, vectorize, module)
    if wanted is False or (wanted is None and not pays):
        return False, None
    found = trace()
    key = f"engine.compile={asked if isinstance(asked, str) else str(asked).lower()}"
    if isinstance(found, str):
        line = f"{key}: gradients are not compiled, because {found}"
        return False, (as_warning(line) if asked is True else line) if wanted else None
    if wanted is None and device == "cpu" and not _is_faster(found):
        return False, None
    lacking = missing()
    if lacking is None:
        return True, f"{key}: gradients are compiled, which takes up to a minute the first time, and seconds later on"
    if wanted is None:
        return False, f"{key}: gradients are not compiled, because there is {lacking}"
    raise UserError(f"{key}: there is {lacking}; install it, or use engine.compile=false in a new run")


def _may_pay_to_compile(steps: float, device: str, vectorize: bool, module: nn.Module) -> bool:
    if device == "cuda":
        # the compiler makes one kernel of the operations between the products: windows, activations, pooling
        return vectorize and steps >= GPU_LONG and any(isinstance(m, nn.Conv1d | nn.Conv2d) for m in module.modules())
    return steps >= LONG and not any(isinstance(layer, SLOWER_LAYERS) for layer in module.modules())


def gradient_graph(
    config: Config, device: str, data: FederatedData, training: TrainingStage, model: ModelStage, vectorize: bool
) -> GraphModule | str:
    """Finds out whether the gradient of a mini-batch can be compiled. Returns its torch operations as a graph if it
    can, and otherwise the reason why it can't, as text.

    The graph shows whether compiling would make the gradient faster (:func:`is_compiled`). ``device`` is cpu or cuda.
    With ``vectorize`` it is the gradient of a stack (several clients that are computed at once).
    """
    batch_size, facts = training.local.batch_size, model.facts
    if config.engine.portable_bits:
        return "engine.portable_bits=true asks for the same bits on different processors"
    if config.train.precision in HALF:
        return f"train.precision={config.train.precision} is not float32"
    if batch_size is None:
        return "with train.batch_size=full each client has mini-batches of another size"
    if training.algorithm.needs_head != "nothing":
        return f"the loss of {config.algorithm.name} is the algorithm's own"
    if facts.draws:
        return "the model draws random numbers"
    if facts.behaviour.elsewhere:
        return f"the model takes its parameter {facts.behaviour.elsewhere} from {ELSEWHERE}"
    if facts.late_buffers:
        return f"the model makes its buffer {facts.late_buffers[0]} in its first forward pass"
    x, y = data.examples(batch_size)
    return traced_gradient(model.module, model.task, vectorize, x, y, facts.behaviour.changing, device)


def is_replayed(config: Config, device: str, training: TrainingStage, model: ModelStage) -> tuple[bool, str | None]:
    """Decides whether the torch operations of a gradient are recorded once and then replayed in the local steps,
    instead of running the model's Python code each time (``engine.replay``).

    Returns the decision, and a line for the user or None. ``device`` is cpu or cuda.
    """
    asked = config.engine.replay
    obstacle, precision = None, config.train.precision
    if precision == "fp16" or (precision == "bf16" and device == "cpu"):
        obstacle = f"train.precision={precision} is not float32"
    elif model.facts.draws:
        obstacle = "the model draws random numbers"
    elif model.facts.behaviour.elsewhere:
        obstacle = f"the model takes its parameter {model.facts.behaviour.elsewhere} from {ELSEWHERE}"
    elif training.algorithm.needs_head != "nothing":
        obstacle = f"the loss of {config.algorithm.name} is the algorithm's own"
    if obstacle is not None or asked is False:
        line = f"warning: engine.replay=true: gradients are not replayed, because {obstacle}"
        return False, line if asked is True else None
    unknown = None if asked is True else unknown_code(model.module, model.task)
    if unknown is None:
        return True, None
    line = f"engine.replay=auto: gradients are not replayed, because {unknown}; true may be faster ({DOCUMENTED})"
    # a GPU waits for Python in any model's steps
    return False, line if device == "cuda" or model.facts.flops * training.batch_size <= PYTHON_FLOPS else None


def _is_faster(graph: GraphModule) -> bool:
    """Returns whether a CPU computes a gradient, whose operations are in ``graph``, faster if it is compiled."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return not any(part in name for name in names for part in SLOWER)
