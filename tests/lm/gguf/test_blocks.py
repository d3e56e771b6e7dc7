"""The bytes of blocks of GGUF."""

import numpy as np
import pytest

from quaxlike.lm.gguf.blocks import BLOCK_TYPES, read_blocks, write_blocks


@pytest.mark.parametrize("number", BLOCK_TYPES)
def test_what_is_read_is_written(number):
    """Any bytes: those of a block say nothing twice."""
    kind = BLOCK_TYPES[number][1]
    raw = np.random.default_rng(0).integers(0, 256, size=(6, 4 * kind.nbytes), dtype=np.uint8)
    w = read_blocks(kind, raw.reshape(-1), (6, 4 * kind.elements))
    np.testing.assert_array_equal(write_blocks(w, kind), raw)
