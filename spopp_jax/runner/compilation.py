"""Settings of jax that every process of a run shares."""

import os
import pathlib

import jax


def configure(cache_directory: str | os.PathLike[str]) -> None:
  """Keeps compiled programs on disk, so that later runs start at once.

  Args:
    cache_directory: created when needed; may be shared between runs.
  """
  path = pathlib.Path(cache_directory).absolute()
  jax.config.update('jax_compilation_cache_dir', str(path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  jax.config.update('jax_numpy_rank_promotion', 'raise')
