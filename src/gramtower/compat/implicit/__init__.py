"""The interface of `implicit` 0.7; a script for implicit needs one changed import.

    - from implicit.als import AlternatingLeastSquares
    + from gramtower.compat.implicit.als import AlternatingLeastSquares

:class:`AlternatingLeastSquares` minimises implicit's own objective; :class:`TwoTower` has the same methods over this
library's model; `evaluation` has the functions of `implicit.evaluation`.
"""

from gramtower.compat.implicit.als import AlternatingLeastSquares as AlternatingLeastSquares
from gramtower.compat.implicit.base import ParameterWarning as ParameterWarning
from gramtower.compat.implicit.two_tower_adapter import TwoTower as TwoTower
