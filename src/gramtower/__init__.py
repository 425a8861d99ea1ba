"""Two-tower nonlinear embeddings learned exactly from all m·n pairs, at the cost of m + n.

problem = gramtower.Problem(pairs)              what is minimised
towers = gramtower.mlp_towers(problem)          two networks
point = problem.at(towers)                      value, gradient() and gauss_newton() @ d
"""

from gramtower.model.layers import InputLinear as InputLinear
from gramtower.model.parameters import Parameters as Parameters
from gramtower.model.towers import Towers as Towers
from gramtower.model.towers import mlp_towers as mlp_towers
from gramtower.objective.losses import Loss as Loss
from gramtower.objective.problem import Problem as Problem

__version__ = "0.1.0"
