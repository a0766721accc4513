"""SPO++ on official ALFWorld games, all six task types, with a tiny decoder.

Source: ALFWorld (arXiv:2010.03768) games; everything else as quickstart.py,
made larger where the official texts are longer. It shows the whole path on
real games, not a result: the tiny decoder does not come far on them.
Command: python experiments/train.py --config=configs/household_official.py
  --config.environment.path=PATH, PATH being a json_2.1.1 directory, a
  game.tw-pddl file or a .jsonl[.xz] file with one game a row.
"""

from ml_collections import config_dict

from configs import quickstart
from spopp_jax.envs import household


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = quickstart.get_config(arg)
  config.run.name = 'official'
  config.environment.update(
    task_types=household.TASK_TYPES, num_tasks=16, step_limit=30
  )
  config.cold_start.update(num_games=64, batch_size=8, max_turns=40)
  config.sampler.update(slots=16, context_length=1536, max_turn_tokens=12)
  config.dispatch.update(batch_size=16, in_flight=16)
  config.learner.update(row_length=1536, row_buckets=(4, 8))
  return config
