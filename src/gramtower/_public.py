"""The public names of ``gramtower``, each imported from the module that defines it.

``gramtower`` imports this module when one of the names is first used; type checkers and editors read it directly.
Solvers and parts of optimizers are in ``gramtower.optim``, ways to split pairs in ``gramtower.splits``.
"""

from gramtower.data import splits as splits
from gramtower.data import text as text
from gramtower.data.interactions import Interactions as Interactions
from gramtower.data.interactions import PairSamples as PairSamples
from gramtower.data.tables import FeatureTable as FeatureTable
from gramtower.engine.kernels.elementwise import Loss as Loss
from gramtower.engine.objective.problem import Point as Point
from gramtower.engine.objective.problem import Problem as Problem
from gramtower.engine.objective.regularizers import BlockRidge as BlockRidge
from gramtower.engine.objective.regularizers import Regularizer as Regularizer
from gramtower.engine.towers.layers import InputLinear as InputLinear
from gramtower.engine.towers.mlp import mlp_towers as mlp_towers
from gramtower.engine.towers.parameters import Parameters as Parameters
from gramtower.engine.towers.towers import Towers as Towers
from gramtower.experiments.benchmark_report import Benchmark as Benchmark
from gramtower.experiments.benchmark_runner import benchmark as benchmark
from gramtower.experiments.cross_validation import CrossValidation as CrossValidation
from gramtower.experiments.cross_validation import PairSplit as PairSplit
from gramtower.experiments.cross_validation import cross_validate as cross_validate
from gramtower.experiments.cross_validation import ranking_scorer as ranking_scorer
from gramtower.model.two_tower import TwoTower as TwoTower
from gramtower.model.two_tower import load as load
from gramtower.training.callbacks import ProgressBar as ProgressBar
from gramtower.training.loop import minimize as minimize
from gramtower.training.result import Reason as Reason
from gramtower.training.result import Record as Record
from gramtower.training.result import Result as Result
from gramtower.training.result import read_history as read_history
