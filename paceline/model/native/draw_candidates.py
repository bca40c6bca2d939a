"""The tokens that can win a draw, by native code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.model.native.build import NativeUnavailableError
from paceline.model.native.native_library import NativeLibrary


def draw_candidates(
    x_RV: npt.NDArray[np.float32],
    keys_R2: npt.NDArray[np.uint32],
    largest_R: npt.NDArray[np.int64],
    leniency: float,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]] | None:
    """Indices into the flat x_RV of all tokens that can win their row's draw, and their noise integers, both [N].

    x_RV is contiguous and relative to each row's largest logit, which is at index largest_R. keys_R2 are the keys of
    the rows' noise. `leniency`: a factor of the integers' upper limit. None if there is no native code.
    """
    try:
        native = NativeLibrary.instance()
    except NativeUnavailableError:
        return None
    indices, integers = np.empty(x_RV.size, dtype=np.int64), np.empty(x_RV.size, dtype=np.uint32)
    x, keys, largest, found, bits = (each.ctypes.data for each in (x_RV, keys_R2, largest_R, indices, integers))
    count = native.lib.paceline_draw_candidates(x, *x_RV.shape, keys, largest, leniency, found, bits)
    return indices[:count], integers[:count]
