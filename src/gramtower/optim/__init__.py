"""Optimizers, and the parts to build custom ones: gradients, directions and step rules."""

from gramtower.optim.descent import Backtracking as Backtracking
from gramtower.optim.descent import Descent as Descent
from gramtower.optim.descent import Direction as Direction
from gramtower.optim.descent import DirectionResult as DirectionResult
from gramtower.optim.descent import Method as Method
from gramtower.optim.descent import StepResult as StepResult
from gramtower.optim.descent import StepRule as StepRule
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
from gramtower.optim.solvers import TorchOptimizer as TorchOptimizer
