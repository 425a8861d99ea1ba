"""The interface of LightFM 1.17; a script for LightFM needs its imports changed.

    - from lightfm import LightFM
    + from gramtower.compat.lightfm import LightFM

:class:`LightFM` has LightFM's model, which is learned from all pairs instead of sampled ones; :class:`Dataset`,
`evaluation` and `cross_validation` have the functions of LightFM's modules of these names.
"""

from gramtower.compat.lightfm.data import Dataset as Dataset
from gramtower.compat.lightfm.lightfm import LightFM as LightFM
