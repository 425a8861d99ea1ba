"""`gramtower.TwoTower`: pairs in, recommendations out.

It follows scikit-learn's conventions. What is learned is one object, ``fitted_``, which answers all questions.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar, Unpack, cast

from gramtower._util import checks as check
from gramtower._util import html as html
from gramtower._util.checks import need
from gramtower.data.frames import Column
from gramtower.data.ids import Key
from gramtower.data.interactions import Interactions, PairsLike, pairs_of
from gramtower.data.tables import FeaturesLike
from gramtower.data.text import Encoder, Function
from gramtower.engine.kernels.elementwise import Loss, as_loss
from gramtower.engine.objective.problem import Problem
from gramtower.engine.towers.towers import Towers
from gramtower.metrics.definitions import LOWER_IS_BETTER, parse
from gramtower.model.context import with_context
from gramtower.model.explanation import Explainer, Explanation
from gramtower.model.exporting import write_export
from gramtower.model.feature_spec import attach_encoders
from gramtower.model.fit_data import PairColumns, Validation, read_frame, read_validation, weighed_by_age
from gramtower.model.fitted import FittedModel
from gramtower.model.fitting import ITERATIONS, fit, joined_features, update
from gramtower.model.model_file import read_model, write_model
from gramtower.model.settings import CHOSEN, ModelSettings, documented
from gramtower.model.side import HistoriesLike
from gramtower.training.callbacks import Callback, progress_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gramtower.experiments.tuning.report import Search

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def _asked(
    question: Callable[Concatenate[FittedModel, _Arguments], _Answer],
) -> Callable[Concatenate[TwoTower, _Arguments], _Answer]:
    """A method of the fitted model as one of the estimator that has it."""

    @wraps(question)
    def ask(self: TwoTower, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Answer:
        return question(self._known(), *arguments, **named)

    return ask


def _kept(
    name: str, change: Callable[Concatenate[FittedModel, _Arguments], FittedModel]
) -> Callable[Concatenate[TwoTower, _Arguments], TwoTower]:
    """A method of the fitted model that returns a changed one, as one of the estimator, which takes and returns it."""

    @wraps(change)
    def make(self: TwoTower, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> TwoTower:
        self.fitted_ = change(self._known(), *arguments, **named)
        return self

    make.__name__, make.__qualname__ = name, f"TwoTower.{name}"
    return make


class _Learned(Generic[_Answer]):
    """A field of the fitted model as a read-only attribute of the estimator that has it."""

    def __init__(self, read: Callable[[FittedModel], _Answer]) -> None:
        self.read = read

    def __get__(self, model: TwoTower | None, owner: type[TwoTower]) -> _Answer:
        return cast(_Answer, self) if model is None else self.read(model.fitted_)  # of the class, for help()

    def __set__(self, model: TwoTower, value: object) -> NoReturn:
        raise AttributeError("read-only: fit makes it, as a field of fitted_")


@documented
class TwoTower(ModelSettings):
    """Two networks whose dot product says how well a left and a right entity go together, learned from all pairs.

    Args:
        {arguments}

    Attributes:
        fitted_: what the last ``fit`` learned, a :class:`~gramtower.model.fitted.FittedModel`. Its fields are read
            as ``left_``, ``right_``, ``trained_``, ``seen_``, ``towers_``, ``shards_``, ``dim_``, ``hidden_``,
            ``normalize_``, ``refine_``, ``activation_``, ``omega_``, ``l2_``, ``embedding_l2_``, ``history_``,
            ``reason_``, ``message_``, ``best_metric_``, ``calibration_`` and ``path_``, the settings tried on held-out
            data.

    Example:
        >>> pairs = gt.Interactions.from_arrays(["ann", "ann", "bob", "eve"], ["tea", "milk", "tea", "milk"])
        >>> model = gt.TwoTower(dim=2).fit(pairs)
        >>> ids, scores = model.recommend(["bob"], k=1)
        >>> ids.tolist()
        [['milk']]
    """

    fitted_: FittedModel

    def fit(
        self,
        pairs: PairsLike,
        left_features: FeaturesLike = None,
        right_features: FeaturesLike = None,
        validation: Validation = None,
        warm_start: bool = False,
        checkpoint: str | Path | None = None,
        history: str | Path | None = None,
        *,
        refit: bool = False,
        callbacks: Iterable[Callback] = (),
        candidates: str = "trained",
        validation_side: str | None = None,
        left: Column | None = None,
        right: Column | None = None,
        value: Column | None = None,
        weight: Column | None = None,
        time: Column | None = None,
        threshold: float | None = None,
        half_life: str | timedelta | None = None,
        context: Sequence[str] | None = None,
    ) -> TwoTower:
        """Learn from observed pairs. If it fails, the model stays what it was.

        Args:
            pairs: :class:`~gramtower.Interactions`; a polars, pandas or pyarrow table, ``left``, ``right`` … being its
                columns; or a scipy.sparse matrix whose rows and columns are then the ids.
                Inside an initialised torch.distributed process group all processes learn one model: every one gives
                the same pairs and keeps its share, or gives its :func:`~gramtower.distributed.partition.read_part`.
            left_features: what the left tower sees: None or "id" for only ids, one row for each entity (scipy.sparse,
                numpy or torch), a :class:`~gramtower.data.tables.FeatureTable` joined by id, "history" for the entity's
                own observed right entities, or a list of these side by side, such as ``["id", "history", table]``. A
                frame stands for ``FeatureTable.inferred(frame, id)``, where its column of ids has the name of the
                pairs' column, such as "user", or else "id". ``"history:last=20"`` sees the last 20 of pairs with times,
                ``"history:decay=20"`` all of them with values that halve with every 20 newer ones.
                In a list with features, the id vector of a new entity is predicted from its features, and
                ``"id*0.1"`` makes ids a smaller correction of what features say (docs/choosing.md).
            right_features: the same for the right tower, without "history".
            validation: what to stop early on by ``metric`` and ``patience``: held-out pairs (same ids), or a share of
                each left entity's pairs, such as 0.1, drawn with the model's seed and not learned from; every left
                entity keeps a pair to learn from.
            warm_start: start from this model's towers: of the entities in ``pairs``, those it knows keep their weights,
                and new ones are added. Give all pairs, old and new, as nothing else is kept; pairs without half of the
                entities that it knows are refused, and :meth:`update` adds pairs to those it knows.
            checkpoint: path or URL of a checkpoint that an interrupted fit continues from.
            history: path of a JSONL file with one record an iteration.
            refit: with validation, fit a second time, from the same start, on all pairs, those of the validation
                included, for as many iterations as were best; not after Ctrl-C. ``time_limit`` holds for each of the
                two. ``history_`` is that of the second, ``best_metric_`` that of the first, whose records go to
                ``history`` with ``-validation`` in its name; the second has its checkpoint at ``checkpoint`` with
                ``.refit``.
            callbacks: called with each record and point; one that returns True stops the run. See
                gramtower/training/callbacks.py for those that come with the library.
            candidates: "trained" knows the entities that have pairs; "all" also keeps those that stand in a
                FeatureTable without any. Nothing is learned from them: their features embed them, and they are
                recommended and asked about like the others, as after :meth:`add`.
            validation_side: "left" or "right": ``validation``, a share, is then of that side's entities, which are held
                out with all their pairs, drawn with the model's seed, to stop by how entities that were never seen
                fare; see :meth:`tune`. They are not in the model, unless ``refit`` fits all pairs afterwards.
            left: of a table, the column of left ids, by name or by position from 0. Ids keep their type. A table of
                validation pairs has the same columns.
            right: the column of right ids.
            value: the column of ratings, counts or labels, which without ``threshold`` are the labels.
            weight: the column of pair weights.
            time: the column of times; rows without one are left out.
            threshold: smallest value that makes a pair, labelled 1.
            half_life: the age at which a pair counts half, such as "90d", for pairs with times; see
                :meth:`gramtower.Interactions.decayed`. Such a model cannot be updated, as pairs have weights then.
            context: of a table, context columns, such as ``["device", "hour"]``: left entities are then combinations of
                a left id and their values, and ``recommend(ids, context={"device": "tv"})`` asks in a context. See
                docs/how-to/context.md.
        """
        previous = self._known() if warm_start else None
        columns: PairColumns = {
            "left": left, "right": right, "value": value, "weight": weight, "time": time, "threshold": threshold,
            "context": context,
        }  # fmt: skip
        read = weighed_by_age(read_frame("pairs", pairs, **columns), half_life)
        self.fitted_ = fit(
            self.with_changes(), read, left_features, right_features,
            read_validation("validation", validation, **columns), previous, checkpoint, history,
            refit=refit, callbacks=callbacks, candidates=candidates, validation_side=validation_side,
        )  # fmt: skip
        return self

    def update(
        self,
        more_pairs: PairsLike,
        left_features: FeaturesLike = None,
        right_features: FeaturesLike = None,
        iterations: int = ITERATIONS,
        *,
        callbacks: Iterable[Callback] = (),
        **columns: Unpack[PairColumns],
    ) -> TwoTower:
        """Add pairs to those the model knows, and run a few iterations from its weights.

        Old pairs, entities and seen lists stay; new entities get rows after the old ones, in the order of their first
        pair. Entities of :meth:`add` stay too; other rows of a table without pairs are not taken into the model. A pair
        that was known is taken as it is given now. Of the old pairs the model keeps which there are: all
        have the label 1 and no weight. A model fitted with other labels or with weights is refused; fit all pairs with
        ``warm_start=True`` instead. If it fails, the model stays what it was.

        Args:
            more_pairs: as for ``fit``, with ids of the same kind, and with the context columns of training; for a model
                fitted on a matrix, a matrix whose rows and columns are numbered as there, and may be more.
            left_features: as for ``fit``, None for ids and histories. If the model sees a table or a matrix, that of
                all entities, old and new, is needed. A frame is read with the columns and kinds of the table that the
                model was fitted with. With ``store_features`` only rows of new and changed entities are needed; a
                matrix without ids has those of new ones in the order of their first pair, and numbers are encoded as
                in the first fit.
            right_features: the same for the right tower.
            iterations: how many.
            callbacks: as for ``fit``.
            columns: ``left``, ``right``, ``value`` … of a table of pairs, as for ``fit``.
        """
        columns.setdefault("context", self._known().context_of(more_pairs))
        more = read_frame("more_pairs", more_pairs, **columns)
        self.fitted_ = update(
            self.with_changes(), self._known(), more, (left_features, right_features), iterations, callbacks
        )
        return self

    def tune(
        self,
        pairs: PairsLike,
        *,
        trials: int = 50,
        time_limit: float | None = None,
        metric: str | None = None,
        validation: Validation = 0.1,
        validation_side: str | None = None,
        space: Mapping[str, object] | None = None,
        storage: str | Path | None = None,
        seed: int = 0,
        left_features: FeaturesLike = None,
        right_features: FeaturesLike = None,
        refit: bool = True,
        verbose: bool | None = None,
        **columns: Unpack[PairColumns],
    ) -> Search:
        """Choose settings by how well they rank a validation part of the pairs, then fit all pairs with them.

        The search covers the settings that this model was not given explicitly, or those that ``space`` names. Trials
        stop early, and are given up when their curve cannot reach the best. The model's own settings stay unless a
        trial is better by more than two standard errors over the validation entities. The same seed gives the same
        search. Needs optuna: ``pip install "gramtower[tune]"``.

        Args:
            pairs: as for ``fit``.
            trials: how many settings to try; the first are this model's own.
            time_limit: seconds for the whole search, without the last fit. The first trial runs to its end whatever
                the limit.
            metric: the metric to maximise; None for the model's own.
            validation: the share of each user's pairs to rank, drawn with ``seed``, or pairs held out by yourself.
            validation_side: "left" or "right" to choose by entities that were never seen: ``validation`` is then the
                share of that side's entities with pairs that is held out with all of them. Trials learn from the other
                entities only. At each look the features of the held-out ones go through the present towers; with
                "left" the known right entities are ranked for them, with "right" they are ranked among themselves for
                the known left ones. A trial runs to its end and counts with the mean of its last points. That side
                needs a table or a matrix of features. Where both sides are one set, held-out entities are on neither
                side of what trials learn from.
            space: names and what to search for each; see docs/tuning.md.
            storage: a folder that keeps the log, so that a search can be stopped and continued.
            seed: of the split and of the proposals.
            left_features: as for ``fit``.
            right_features: as for ``fit``.
            refit: whether this model takes the settings that were found and is fitted on all pairs; not after Ctrl-C,
                which ends a search with what it has found. Settings that were not changed stay as they are.
            verbose: whether to print a line for each trial on standard error; None for yes in a terminal or a notebook.
                The logger ``gramtower.tune`` gets these lines at level INFO.
            columns: ``left``, ``right``, ``value`` … of a table of pairs, as for ``fit``.

        Returns:
            The search: trials, which of them won and why, importances, and ``config()``, a config file for
            ``gramtower fit``.
        """
        from gramtower.experiments.tuning.report import trial_lines
        from gramtower.experiments.tuning.search import tune
        from gramtower.experiments.tuning.trial import chosen_features

        refit = check.flag("refit", refit)
        pairs = read_frame("pairs", pairs, **columns)
        validation = read_validation("validation", validation, **columns)
        if isinstance(pairs, Interactions) and pairs.context:
            left_features = with_context(pairs, left_features)
        features = joined_features((left_features, right_features), pairs)
        lines = progress_lines("gramtower.tune", verbose)
        found = tune(
            self.with_changes(), pairs, trials=trials, time_limit=time_limit, metric=metric or self.metric,
            validation=validation,
            space=space, storage=storage, seed=seed, features=features, validation_side=validation_side,
            progress=None if lines is None else trial_lines(lines),
        )  # fmt: skip
        if refit and not found.interrupted:
            self.set_params(**found.arguments).fit(pairs, *chosen_features({"features": found.features}, features))
        return found

    def save(self, path: str | Path) -> None:
        """Write the model to a file or URL with checksums; nothing is pickled, an old one stays if writing fails."""
        write_model(check.path("path", path), self, self._known())

    def export(self, path: str | Path, to: str) -> list[Path]:
        """Write the model for other programs into a folder; docs/exporting.md says what is in it.

        Args:
            path: the folder, or the URL of one.
            to: "onnx" or "torchscript", the towers as networks; "numpy", "parquet" or "faiss", embeddings with ids.

        Returns:
            The files.
        """
        return write_export(check.path("path", path), self._known(), to)

    def score(self, X: Any, y: Any = None, **described: Any) -> Any:
        """The model's ``metric`` on held-out pairs, as scikit-learn's searches and ``cross_val_score`` ask for it.

        A search without ``scoring`` chooses by it; :func:`gramtower.ranking_scorer` gives another metric. A metric of
        which less is better is negated.

        Args:
            X: the pairs: :class:`~gramtower.PairSamples`, or what ``test`` of :meth:`evaluate` may be.
            y: None. Two lists of ids, ``score(left, right)``, still give the scores of pairs, with a
                DeprecationWarning; :meth:`predict` has taken their place.
            described: further arguments of :meth:`evaluate`, such as ``left_features``.
        """
        if y is not None:
            text = "score(left, right) is now predict(left, right); score(pairs) is the model's metric on pairs"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return self.predict(X, y, **described)
        (metric,) = parse(self.metric, "metric")
        found = float(self.evaluate(pairs_of(X), (metric.name,), **described)[metric.name])
        return -found if metric.kind in LOWER_IS_BETTER else found

    def plot_reliability(self, test: PairsLike | None = None, bins: int = 10) -> Figure:
        """A figure of :meth:`reliability`: how often pairs are held out, by the probability that the model gives them.

        Args:
            test: held-out pairs, as for :meth:`reliability`.
            bins: number of bins.

        Raises:
            ImportError: without matplotlib, with the line that installs it.
        """
        from gramtower.experiments.figures import reliability_figure

        found = self.reliability(test, bins)
        return reliability_figure(found.probability, found.positives, found.pairs)

    def plot(self) -> Figure:
        """A figure of the training: objective, validation metric, and the path of penalties that were tried.

        With ``refit`` the records are those of the second fit, which has no validation; ``history`` keeps the others.

        Raises:
            ImportError: without matplotlib, with the line that installs it.
        """
        from gramtower.experiments.figures import run_figure

        fitted = self._known()
        points = [] if fitted.path is None else fitted.path.tried
        tried = [(point.settings, point.metric, point.standard_error) for point in points]
        return run_figure({"fit": fitted.history}, self.metric, tried)

    def explain(
        self, left: Key | None = None, right: Key | None = None, *, side: str = "left",
        left_features: FeaturesLike = None, right_features: FeaturesLike = None,
        histories: HistoriesLike | None = None,
    ) -> Explanation:  # fmt: skip
        """What carried the score of a pair: a part for each thing known of its left entity, whose sum is the score.

        Where the left tower sees a history or features, these are its parts; exact for linear towers and those with
        one hidden layer, otherwise with a small ``remainder``. An entity known only by id, in a model without
        hidden layers, is explained by what it was observed with. docs/explaining.md says how.

        Args:
            left: id of a left entity; None with ``left_features`` or ``histories`` for a new one.
            right: id of a right entity.
            side: "right" explains by what is known of the right entity instead.
            left_features: a table or matrix with one row, which describes the left entity; needed where the tower sees
                features, as only a model with ``store_features=True`` keeps the rows of known entities.
            right_features: the same of the right entity, with ``side="right"``.
            histories: a list with one list of right ids, or a sparse matrix with one row: the history of a new entity.
        """
        return Explainer(self.with_changes(), self._known()).of_keys(
            {"left": left, "right": right}, side, {"left": left_features, "right": right_features}, histories
        )

    add = _kept("add", FittedModel.with_added)
    calibrate = _kept("calibrate", FittedModel.calibrated)
    recommend = _asked(FittedModel.recommend)
    recommend_all = _asked(FittedModel.recommend_all)
    similar = _asked(FittedModel.similar)
    has_direction = _asked(FittedModel.has_direction)
    predict = _asked(FittedModel.predict)
    embed = _asked(FittedModel.embed)
    evaluate = _asked(FittedModel.evaluate)
    reliability = _asked(FittedModel.reliability)

    left_ = _Learned(lambda fitted: fitted.left)
    right_ = _Learned(lambda fitted: fitted.right)
    trained_ = _Learned(lambda fitted: fitted.trained)
    seen_ = _Learned(lambda fitted: fitted.seen)
    towers_ = _Learned(lambda fitted: fitted.towers)
    shards_ = _Learned(lambda fitted: fitted.shards)
    dim_ = _Learned(lambda fitted: fitted.dim)
    hidden_ = _Learned(lambda fitted: fitted.hidden)
    normalize_ = _Learned(lambda fitted: fitted.normalize)
    refine_ = _Learned(lambda fitted: fitted.refine)
    activation_ = _Learned(lambda fitted: fitted.activation)
    omega_ = _Learned(lambda fitted: fitted.omega)
    l2_ = _Learned(lambda fitted: fitted.l2)
    embedding_l2_ = _Learned(lambda fitted: fitted.embedding_l2)
    history_ = _Learned(lambda fitted: fitted.history)
    reason_ = _Learned(lambda fitted: fitted.reason)
    message_ = _Learned(lambda fitted: fitted.message)
    best_metric_ = _Learned(lambda fitted: fitted.best_metric)
    path_ = _Learned(lambda fitted: fitted.path)
    calibration_ = _Learned(lambda fitted: fitted.calibration)

    def __repr__(self) -> str:
        settings = super().__repr__()
        return f"{settings}: {self.fitted_}" if hasattr(self, "fitted_") else settings

    def _repr_html_(self) -> str:
        """A card for notebooks: the settings and, once fitted, what was learned."""
        learned = self.fitted_.html_facts() if hasattr(self, "fitted_") else html.note("not fitted yet")
        return html.card(type(self).__name__, html.note(super().__repr__()), learned)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "fitted_")

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks of an estimator: X are pairs, and there is no y."""
        tags = need("sklearn.utils", "scikit-learn's tags", "scikit-learn")
        pairs = tags.InputTags(two_d_array=False, sparse=True)
        return tags.Tags(estimator_type=None, target_tags=tags.TargetTags(required=False), input_tags=pairs)

    def _known(self) -> FittedModel:
        if not hasattr(self, "fitted_"):
            known = sys.modules.get("sklearn.exceptions")  # whose error, a ValueError, its tools look for
            error: type[ValueError] = getattr(known, "NotFittedError", ValueError)
            raise error("model: not fitted yet; call fit first")
        return self.fitted_


def load(
    path: str | Path,
    towers: Callable[[Problem], Towers] | None = None,
    *,
    loss: Loss | None = None,
    mapped: bool = False,
    encoders: Mapping[str, Encoder | str | Path | Function] | None = None,
) -> TwoTower:
    """Read a model from the file that :meth:`TwoTower.save` wrote.

    Args:
        path: the file, or its URL such as s3://bucket/model.gramtower (extra ``cloud``).
        towers: for a model with towers of your own, the function it was made with; without it the model recommends but
            cannot embed new entities.
        loss: for a model with a loss of your own, that loss; without it the model recommends but cannot be fitted or
            updated. Its name must be that of the model's loss.
        mapped: leave the parameters in the file, mapped, so that processes share them. The file may then be replaced by
            renaming, as ``save`` does, and never be overwritten in place.
        encoders: for a model with columns of text through functions, these functions by their names
            (:class:`gramtower.text.Encoder`); without them the model recommends but cannot encode new rows. Also the
            new folder of a pretrained model, by its old one. Other pretrained models are loaded when they are needed.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not a model, is damaged, or does not hold together, or if ``loss`` or an encoder is
            another one.
    """
    settings, fitted = read_model(check.path("path", path), towers, mapped)
    if encoders is not None:
        attach_encoders([side.inputs for side in fitted.sides], encoders)
    if loss is not None:
        if (name := as_loss(loss).name) != settings.loss:
            check.fail("loss", repr(name), f"{settings.loss!r}, the name of the loss that the model was fitted with")
        settings = settings.with_changes(loss=loss)
    params = settings.get_params()
    model = TwoTower(**params | {name: "auto" for name in CHOSEN if params[name] is None})
    model.fitted_ = fitted
    return model
