"""Makes the algorithm of a configuration and checks its requirements on other keys, before any data are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from inspect import isfunction, unwrap
from types import CodeType
from typing import Any

from fedray.algorithms import Algorithm, find_algorithm, known_algorithms
from fedray.config import Config, check, unknown_key
from fedray.errors import UserError, closest
from fedray.experiment.custom import CustomObjects
from fedray.experiment.permissions import require
from fedray.gradients.known_code import is_of_known
from fedray.models.heads import DEFAULT, find_head, in_words, serves
from fedray.usercode.importing import as_user_error


def choose_algorithm(config: Config, custom: CustomObjects) -> Algorithm:
    """Makes the algorithm of a run, with the hyper-parameters ``algorithm.*``, and checks that it allows the values of
    other keys. For example, some algorithms have no server learning rate.

    This is done before any data are read. Hyper-parameters that are null in ``config`` are still None in the result;
    the training stage replaces them later. The algorithm is the class in ``custom`` (the objects that the user passed
    from Python) if there is one, and otherwise the one that ``algorithm.name`` names. Raises :class:`UserError` if it
    does not exist, or does not allow the value of some key.
    """
    name = config.algorithm.name
    cls = custom.algorithm or find_algorithm(name)
    is_set = custom.algorithm is not None or "name" in config.algorithm.model_fields_set
    hyper = _hyper_parameters(cls, config.algorithm.model_extra or {}, name, is_set)
    for other, keys in config.for_algorithm.items():
        with _within(f"for_algorithm: {other}: "):
            its_class = cls if other == name else find_algorithm(other)
            _hyper_parameters(its_class, keys.get("algorithm") or {}, other)
    with as_user_error(f"algorithm.name={name} can't be made"):
        algorithm = cls(hyper)
    train = config.train
    scheduled = train.server_lr_schedule.kind != "constant" or train.server_lr_schedule.warmup
    if (train.server_lr != 1 or scheduled) and not algorithm.uses_server_lr:
        key = f"train.server_lr={train.server_lr}" if train.server_lr != 1 else "train.server_lr_schedule"
        raise UserError(f"{key}: {name} has no server learning rate")
    if train.optimizer != "sgd" and not algorithm.any_optimizer:
        raise UserError(
            f"train.optimizer={train.optimizer}: the rules of algorithm.name={name} count on the step of sgd"
        )
    has_own_loop = type(algorithm).train is not Algorithm.train
    if train.momentum_reset != "round" and (has_own_loop or not algorithm.any_optimizer):
        raise UserError(
            f"train.momentum_reset={train.momentum_reset}: the rules of algorithm.name={name} count on a momentum that "
            "is new in each round"
        )
    if train.momentum_reset == "never" and len(algorithm.phases) > 1:
        raise UserError(
            f"train.momentum_reset=never: {name} has {len(algorithm.phases)} phases, and momentum needs one"
        )
    _check_private(config, algorithm)
    if algorithm.several_models and config.run.diagnostics:
        raise UserError(f"run.diagnostics: clients of {name} do not all begin with the same model")
    if algorithm.several_models and config.model.weights:
        raise UserError(f"model.weights: the models of {name} begin with different weights, drawn by run.seed")
    if train.momentum_reset == "never" and config.run.diagnostics == "virtual":
        raise UserError("run.diagnostics=virtual: clients keep their momentum (train.momentum_reset=never); use true")
    return algorithm


def _check_private(config: Config, algorithm: Algorithm) -> None:
    """Checks that an algorithm works with private layers, if it has some or ``model.private`` asks for them. Raises
    :class:`UserError` if not."""
    name, asked = config.algorithm.name, config.model.private
    if asked and algorithm.private:
        raise UserError(f"model.private: {name} has private layers of its own, which algorithm.private says")
    if asked:
        require(algorithm, name, "allows_private", "model.private", "its rule is right with private layers")
    if not (asked or algorithm.private):
        return
    if len(algorithm.phases) > 1 or type(algorithm).train is not Algorithm.train:
        raise UserError(f"private layers: they need an algorithm of begin, step and end alone, which {name} is not")
    if config.system.mode == "buffered":
        raise UserError("system.mode=buffered: there are no asynchronous rounds with private layers")
    if isinstance(config.run.diagnostics, str):
        raise UserError(f"run.diagnostics={config.run.diagnostics}: the model has private layers; use true")
    if algorithm.private_from > 1 and config.system.is_on:
        raise UserError(f"system.*: the first rounds of {name} send more than the others, which the clock can't count")


def misspelt_methods(cls: type[Algorithm]) -> Iterator[str]:
    """Yields warnings about methods of user-defined classes that nothing calls, if their names are nearly those of
    methods that fedray calls. ``cls`` is the class of a run's algorithm."""
    known = [name for name, value in vars(Algorithm).items() if isfunction(value) and not name.startswith("_")]
    for each in (each for each in cls.__mro__ if not is_of_known(each)):
        methods = {name: value for name, value in vars(each).items() if isfunction(value)}
        called = {*cls.phases}.union(*(_names_in(unwrap(method).__code__) for method in methods.values()))
        for name in sorted(methods.keys() - called):
            meant = None if name.startswith("_") or hasattr(Algorithm, name) else closest(name, known, cutoff=0.8)
            if meant:
                yield f"{each.__name__}.{name} is never called (did you mean {meant!r}?)"


def _names_in(code: CodeType) -> set[str]:
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*inner)


def choose_head(config: Config, algorithm: Algorithm) -> str:
    """Returns the name of the model's head (its last layers), such as ``moon``, or ``none`` for the layers that the
    model already has. It is the value of ``model.head`` or, if that is ``auto``, the default head that the algorithm
    needs.

    Raises :class:`UserError` if there is no such head, or the algorithm can't work with it.
    """
    asked, need = config.model.head, algorithm.needs_head
    if asked != "auto" and not serves(asked, need):
        raise UserError(
            f"model.head={asked}: {config.algorithm.name} needs a head with {in_words(need)}, such as {DEFAULT[need]}; "
            "use auto"
        )
    head = DEFAULT[need] if asked == "auto" else asked
    find_head(head)
    return head


def _hyper_parameters(cls: type[Algorithm], values: Mapping[str, Any], name: str, is_set: bool = True) -> Any:
    """Returns the hyper-parameters of the algorithm ``name``, checked, from ``values`` of the keys ``algorithm.*``.
    ``is_set`` says whether the user has named the algorithm, and does not only have the default."""
    unknown = [key for key in values if key not in cls.Hyper.model_fields]
    if unknown:
        where = f"{name}{'' if is_set else ' (algorithm.name is not set)'}: "
        having = sorted(known for known, other in known_algorithms().items() if unknown[0] in other.Hyper.model_fields)
        others = "" if is_set or not having else f"; it is a key of {', '.join(having)}"
        known = [*cls.Hyper.model_fields]
        known = ["name"] if closest(unknown[0], ["name", *known]) == "name" else known
        raise UserError(where + unknown_key(unknown[0], known, "algorithm.") + others)
    return check(cls.Hyper, values, prefix="algorithm.")


@contextlib.contextmanager
def _within(where: str) -> Iterator[None]:
    """A context in which messages for the user begin with ``where``."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}{error}") from None
