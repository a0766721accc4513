import numpy as np
import pytest

from spopp_jax.kernels import overlong


def test_a04_soft_overlong_penalty(vectors):
  vector = vectors['A04_dapo_overlong']
  got = overlong.soft_overlong_penalty(
    np.array(vector['inputs']['len'], np.float32),
    limit=vector['inputs']['Lmax'],
    buffer=vector['inputs']['cache'],
  )
  np.testing.assert_allclose(got, vector['expected']['penalty'], rtol=1e-6)


@pytest.mark.parametrize('buffer', [0, -1, 11])
def test_a_buffer_outside_the_limit_is_refused(buffer):
  with pytest.raises(ValueError, match=rf'buffer \({buffer}\) must lie in'):
    overlong.soft_overlong_penalty(
      np.zeros(1, np.float32), limit=10, buffer=buffer
    )
