import os
import pathlib
import subprocess
import sys

PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from spopp_jax.runner import compilation
compilation.configure(sys.argv[1])
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
jax.jit(lambda x: x * 2 + 1)(jnp.ones(3)).block_until_ready()
try:
  jnp.ones((2, 3)) + jnp.ones(3)
except ValueError as error:
  print('refused', 'rank_promotion' in str(error))
"""


def test_programs_are_kept_and_ranks_not_promoted(tmp_path):
  """In a process of its own: these settings hold for all of it."""
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM, 'compiled'],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    capture_output=True,
    text=True,
    timeout=100,
    check=True,
  )
  assert done.stdout == 'refused True\n'
  assert list(pathlib.Path(tmp_path, 'compiled').glob('jit_*'))
