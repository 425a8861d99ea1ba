"""The arguments of `gramtower.TwoTower`: each is a dataclass field with an entry in the docstring of its class.

Everything else derives from there. A field's :class:`Setting` says where it appears: the constructor's signature and
docstring, the flag and config-file key of the command line (cli/options.py), the header of a model file
(model/model_file.py), and the search space of ``tune``. To add an argument, add both here and read it where the fit
needs it.

As in scikit-learn, the constructor keeps arguments as they are given, and they are checked where they are used.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import wraps
from textwrap import TextWrapper
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gramtower._util import checks as check
from gramtower._util.checks import Hidden
from gramtower.engine.kernels.elementwise import LOSSES, Loss
from gramtower.engine.objective.problem import Problem
from gramtower.engine.objective.regularizers import BlockRidge, Regularizer
from gramtower.engine.towers.towers import Towers
from gramtower.optim.solvers import SOLVERS, Solver, TorchOptimizer

REQUIRED: Any = object()
_LINE = 79  # characters in a line of a repr
#: What arguments are called in other libraries, by their name here.
_ELSEWHERE = {
    "dim": ("factors", "n_factors", "num_factors", "no_components", "n_components", "embedding_dim", "latent_dim"),
    "hidden": ("layers", "hidden_layers", "hidden_layer_sizes", "hidden_units"),
    "l2": ("regularization", "reg", "weight_decay"),
    "max_iterations": ("iterations", "epochs", "n_iter", "max_iter", "num_iterations"),
    "optimizer": ("solver",),
    "seed": ("random_state", "random_seed"),
    "device": ("use_gpu",),
}
#: The default of settings that are chosen by the data; None stands for the same.
Auto = Literal["auto"]
Factors: TypeAlias = tuple[NDArray[np.floating], NDArray[np.floating]]
WeightsLike: TypeAlias = str | Sequence[float] | NDArray[np.floating] | None
_Kind = TypeVar("_Kind", bound=type)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Setting:
    """The description of one argument."""

    # table of the config file and group of the flag, "model" or "train"; None if there is no flag
    table: str | None = None
    help: str | None = None  # text of the flag; None for the first sentence of ``doc``
    flag: str | None = None  # name of the flag, if it is not that of the argument
    shown: str | None = None  # default that the help of the flag shows, if it is not the argument's default
    fitted: bool = False  # whether a fitted model has the value that was used, as ``NAME_``, which its run then records
    saved: bool = True  # whether a model file holds it
    before: Any = REQUIRED  # value that the versions used whose model files do not hold it; REQUIRED if every file does
    searched: str | None = None  # its name in the search space of ``tune``; None if it is not searched
    doc: str = ""  # what the argument does, from the docstring

    @property
    def flag_help(self) -> str:
        return self.help or self.doc.partition(". ")[0].rstrip(".") + "."


def _setting(default: _Value, table: str | None = None, **further: Any) -> _Value:
    return field(default=default, metadata={"setting": Setting(table, **further)})


def _meant(name: str, known: Collection[str]) -> str:
    """Suggest what an unknown argument may stand for, as a question; empty if nothing is similar."""
    near = [here for here, there in _ELSEWHERE.items() if name.lower() in there and here in known]
    near = near or check.near(name, known, 1)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _suggesting_names(kind: _Kind) -> _Kind:
    """Make a class's constructor refuse unknown arguments with a suggestion."""
    made = kind.__init__  # type: ignore[misc]

    @wraps(made)
    def init(self: object, *arguments: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                hint = _meant(name, known) or f"known are {', '.join(known)}"
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}; {hint}")
        made(self, *arguments, **named)

    known = list(inspect.signature(kind).parameters)
    kind.__init__ = init  # type: ignore[misc]
    return kind


def given(value: _Value | Auto | None) -> _Value | None:
    """Return the value of a setting, or None if the data are to choose it."""
    return None if isinstance(value, str) and value == "auto" else cast(_Value, value)


@_suggesting_names
@dataclass(eq=False, repr=False)
class ModelSettings:
    """The settings of a model and of its training, the arguments of :class:`gramtower.TwoTower`.

    An object of this class, unlike one of a subclass, has None for each setting that is "auto".

    Args:
        dim: Size k of the embeddings. "auto" chooses it by the size of the data (see docs/choosing.md). This and the
            next argument are also chosen by ``select`` where a fit stops early.
        hidden: Widths of the hidden layers of both towers, or a pair of such tuples for the left and the right tower;
            ``()`` for linear factors. "auto" uses one hidden layer where a side has features and no ids, and none
            elsewhere, unless ``select`` finds linear towers better.
        activation: Activation of the hidden layers, such as "relu", "gelu" or "leaky_relu(0.25)". "auto" chooses one.
        normalize: Scale the embeddings of each side to one length. Scores are then cosines times a learned scale.
            "auto" means no, unless ``select`` finds it better, which it tries where both sides have only features.
        refine: After training, refine the embeddings of known entities with their own pairs. The more pairs an entity
            has, the further its embedding moves from where its features place it; new entities stay there. "auto" means
            yes where both sides have features and neither has ids or histories.
        loss: Loss of observed pairs: logistic, squared or squared_hinge.
        omega: Weight ω of each unobserved pair. "auto" scales it with the data (see docs/choosing.md).
        l2: Penalty λ on all parameters. "auto" lets ``select`` choose it where there are features.
        embedding_l2: Penalty μ on embeddings, which grows with the frequency of an entity. "auto" lets ``select``
            choose it where there are ids.
        regularizer: Weights of the penalty ``l2`` by name or pattern of the towers' tensors, such as {"left.*": 4.0},
            or a gramtower.Regularizer. None for equal weights.
        frequency_power: Power ν of the frequency in ``embedding_l2``.
        imputed: Label of unobserved pairs: a number, "fitted" for the mean score of each left entity, or two arrays
            (P̃, Q̃) with a row for each left and each right entity, whose products are the labels. "auto" is -0.5.
        left_weights: Weights a of unobserved pairs by left entity. Text such as "degree^0.5", an array, or None for
            equal weights. "auto" means "degree^0.5" where only features describe left entities, otherwise None.
        right_weights: Weights b of unobserved pairs by right entity. Like ``left_weights``; "auto" gives frequent
            entities more weight, by an amount that depends on whether there are features.
        pair_weights: Weights of observed pairs by how often their left entity is observed, such as "degree^-0.5", or
            None for equal weights. Weights of the data are multiplied by them. "auto" means "degree^-0.5" where only
            features describe left entities, so that those with many pairs do not decide for new ones, otherwise None.
        optimizer: Name of the optimizer, or a solver of gramtower.optim (see docs/choosing.md).
        optimizer_options: Constants of the optimizer, by name.
        max_iterations: Stop after this many iterations. "auto" means 20, or 12 where there are features and for ids on
            a CPU, where an iteration is a sweep over all rows; with features on both sides ``select`` may choose fewer.
        time_limit: Stop after this many seconds of training.
        patience: With validation data, stop after this many iterations without a better metric.
        metric: Metric of held-out data, such as recall@20. Training stops early by it; ``select`` chooses by it.
        select: Choose the penalties that are "auto" on held-out data before all pairs are fitted (see
            docs/choosing.md). True holds out pairs, or entities of a side that has only features; "pairs", "left" or
            "right" says which; False uses the values of the rules. An argument that is given is never changed.
        device: Device to train on: auto, cpu or cuda.
        seed: Seed of initial weights, splits and random optimizers.
        towers: Function from a Problem to Towers of your own, used instead of the multi-layer ones.
        memory_budget: Memory that training may use beyond the data and the towers, such as 500MB or 2GiB. "auto" goes
            by the machine (see docs/choosing.md).
        precision: Precision of matrix products on a GPU: tf32 or float32. "auto" is tf32 with optimizers that get as
            far with it, such as newton-kron, and float32 with the others, such as newton (see docs/gpu.md).
        pair_precision: Precision of embeddings gathered for each pair on a GPU: float32 or bfloat16.
        scale_features: Bring features to a common scale. The scale is learned from the training data and kept in the
            model (model/feature_spec.py); False uses features unchanged.
        store_features: Store the encoded rows of feature tables and matrices in the model. ``update`` then needs only
            the rows of new and changed entities; the model and its file grow by the size of the rows.
        verbose: Print one line for each iteration on standard error.
    """

    dim: int | Auto | None = _setting("auto", "model", fitted=True, searched="dim")
    hidden: Hidden | Auto | None = _setting(
        "auto",
        "model",
        help="Widths of the hidden layers, such as 256,256, or left/right; none for linear factors.",
        fitted=True,
        searched="hidden",
    )
    activation: str | Auto | None = _setting("auto", "model", searched="activation")
    normalize: bool | Auto | None = _setting("auto", "model", fitted=True, searched="normalize")
    refine: bool | Auto | None = _setting("auto", "model", fitted=True, before=False)
    loss: str | Loss = _setting("logistic", "model", searched="loss")
    omega: float | Auto | None = _setting("auto", "model", searched="omega")
    l2: float | Auto | None = _setting("auto", "model", searched="l2")
    embedding_l2: float | Auto | None = _setting("auto", "model", searched="penalty")
    regularizer: Regularizer | dict[str, float] | str | None = _setting(
        None,
        "model",
        help="Weight of --l2 on some tensors, PATTERN=WEIGHT such as left.*=4; may be repeated.",
        flag="regularizer",
        before=None,
    )
    frequency_power: float = _setting(
        0.8, "model", help="Power of the frequency in --embedding-l2.", searched="frequency_power"
    )
    imputed: float | str | Factors = _setting(
        "auto",
        "model",
        help="Label of unobserved pairs: a number, fitted, or a file of low-rank labels: FILE.npz with the arrays left "
        "and right, and left_ids and right_ids for the ids of their rows; or LEFT.npy,RIGHT.npy.",
        searched="imputed",
    )
    left_weights: WeightsLike = _setting(
        "auto",
        "model",
        help="Weights of unobserved pairs by left entity; degree^0 for equal weights.",
        searched="left_power",
    )
    right_weights: WeightsLike = _setting(
        "auto",
        "model",
        help="Weights of unobserved pairs by right entity; degree^0 for equal weights.",
        searched="right_power",
    )
    pair_weights: str | None = _setting(
        "auto",
        "model",
        help="Weights of observed pairs by the degree of their left entity; degree^0 for equal weights.",
        before=None,
    )
    optimizer: str | Solver = _setting(
        "newton-kron", "train", help="newton-kron, newton, gd, gd-diag, lbfgs, sogram(-diag) or sampling(-diag)."
    )
    optimizer_options: dict[str, Any] | None = _setting(
        None, "train", help="A constant of the optimizer, NAME=VALUE; may be repeated.", flag="option"
    )
    max_iterations: int | Auto | None = _setting("auto", "train")
    time_limit: float | None = _setting(None, "train", shown="none")
    patience: int = _setting(
        10, "train", help="With --validation: stop after this many iterations without a better metric."
    )
    metric: str = _setting("ndcg@20", "train")
    select: bool | str = _setting(
        True,
        "train",
        help="Choose penalties on held-out data first: auto, off, or the part to hold out: pairs, left or right "
        "entities.",
        shown="auto",
        before=False,
    )
    device: str = _setting("auto", "train")
    seed: int = _setting(0, "train")
    towers: Callable[[Problem], Towers] | None = _setting(None, saved=False)
    memory_budget: int | str | Auto | None = _setting("auto", "train", shown="by the machine")
    precision: str = _setting("auto", "train")
    pair_precision: str = _setting("float32", "train")
    scale_features: bool = _setting(True, "model", shown="yes")
    store_features: bool = _setting(False, "model", before=False)
    verbose: bool = _setting(False)

    def __post_init__(self) -> None:
        if type(self) is ModelSettings:  # an estimator, which is a subclass, keeps its arguments as they are given
            for name in CHOSEN:
                setattr(self, name, given(getattr(self, name)))

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments by name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                hint = _meant(name, known)
                check.fail("parameter", f"{name!r} ({hint})" if hint else repr(name), "one of " + ", ".join(known))
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        """Show the arguments that differ from the defaults, in lines of 79 characters, as scikit-learn does."""
        given = inspect.signature(type(self)).parameters
        changed = [
            f"{k}={v!r}"
            for k, v in sorted(self.get_params().items())
            if v is not given[k].default and (type(v) is not type(given[k].default) or v != given[k].default)
        ]
        head, unbroken = f"{type(self).__name__}(", (one.replace(" ", "\xa0") for one in changed)
        wrap = TextWrapper(_LINE, subsequent_indent=" " * len(head), break_long_words=False, break_on_hyphens=False)
        return wrap.fill(f"{head}{', '.join(unbroken)})").replace("\xa0", " ")

    def with_changes(self, **changes: Any) -> ModelSettings:
        """Copy these settings, without a fitted model, with some of them changed."""
        return ModelSettings(**{field.name: getattr(self, field.name) for field in fields(ModelSettings)} | changes)

    def by_name(self) -> ModelSettings:
        """Copy these settings with the library's own solvers and losses by name; a user's own stay objects."""
        solver: Any = self.optimizer
        changes: dict[str, Any] = {}
        if isinstance(solver, Solver) and SOLVERS.get(solver.name) is type(solver):
            changes |= {"optimizer": solver.name, "optimizer_options": asdict(solver)}
        if isinstance(solver, TorchOptimizer) and solver.plain_options is not None:
            changes |= {"optimizer": solver.name, "optimizer_options": solver.plain_options}
        if isinstance(self.loss, Loss) and LOSSES.get(self.loss.name) is self.loss:
            changes["loss"] = self.loss.name
        if isinstance(self.regularizer, BlockRidge):
            changes["regularizer"] = self.regularizer.weights
        return self.with_changes(**changes)

    @property
    def factors(self) -> Factors | None:
        """P̃ and Q̃ where ``imputed`` has them, otherwise None."""
        return self.imputed if isinstance(self.imputed, (tuple, list)) else None

    def solver_options(self) -> Mapping[str, Any]:
        """Return the constants of the optimizer."""
        options = {} if self.optimizer_options is None else self.optimizer_options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            check.fail("optimizer_options", repr(options), "names and values")
        return options


def settings_of(kind: type[ModelSettings]) -> dict[str, Setting]:
    """Return the settings of a class by name, each with its entry in the class's docstring."""
    arguments = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2]
    docs = dict(re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE))
    return {
        one.name: replace(one.metadata["setting"], doc=" ".join(docs.get(one.name, "").split())) for one in fields(kind)
    }


def documented(kind: _Kind) -> _Kind:
    """Replace ``{arguments}`` in the docstring of a class by the documentation of all settings."""
    arguments = (ModelSettings.__doc__ or "").partition("Args:\n")[2].strip()
    kind.__doc__ = (kind.__doc__ or "").replace("{arguments}", arguments)
    return kind


SETTINGS = settings_of(ModelSettings)
#: Settings that the data choose if they are "auto" or None.
CHOSEN = tuple(one.name for one in fields(ModelSettings) if "Auto" in str(one.type))
