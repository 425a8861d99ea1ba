"""Two-tower nonlinear embeddings learned exactly from all m·n pairs, at the cost of m + n.

problem = gramtower.Problem(pairs)              what is minimised
towers = gramtower.mlp_towers(problem)          two networks
point = problem.at(towers)                      value, gradient() and gauss_newton() @ d
"""

from gramtower.benchmarking.build import Benchmark as Benchmark
from gramtower.benchmarking.runner import benchmark as benchmark
from gramtower.data.interactions import Interactions as Interactions
from gramtower.engine.kernels.losses import Loss as Loss
from gramtower.engine.objective.point import Point as Point
from gramtower.engine.objective.problem import Problem as Problem
from gramtower.engine.towers.layers import InputLinear as InputLinear
from gramtower.engine.towers.mlp import mlp_towers as mlp_towers
from gramtower.engine.towers.parameters import Parameters as Parameters
from gramtower.engine.towers.towers import Towers as Towers
from gramtower.evaluation.cross_validation import CrossValidation as CrossValidation
from gramtower.evaluation.cross_validation import cross_validate as cross_validate
from gramtower.optim.line_search import Backtracking as Backtracking
from gramtower.optim.methods import Descent as Descent
from gramtower.optim.methods import Method as Method
from gramtower.optim.parts import Direction as Direction
from gramtower.optim.parts import DirectionResult as DirectionResult
from gramtower.optim.parts import StepResult as StepResult
from gramtower.optim.parts import StepRule as StepRule
from gramtower.optim.solvers import LBFGS as LBFGS
from gramtower.optim.solvers import DiagonalDescent as DiagonalDescent
from gramtower.optim.solvers import DiagonalSampling as DiagonalSampling
from gramtower.optim.solvers import DiagonalSogram as DiagonalSogram
from gramtower.optim.solvers import GradientDescent as GradientDescent
from gramtower.optim.solvers import Newton as Newton
from gramtower.optim.solvers import NewtonKron as NewtonKron
from gramtower.optim.solvers import Sampling as Sampling
from gramtower.optim.solvers import Sogram as Sogram
from gramtower.optim.solvers import Solver as Solver
from gramtower.training.loop import minimize as minimize
from gramtower.training.result import Reason as Reason
from gramtower.training.result import Record as Record
from gramtower.training.result import Result as Result
from gramtower.training.result import read_history as read_history
from gramtower.two_tower import TwoTower as TwoTower
from gramtower.two_tower import load as load

__version__ = "0.1.0"
