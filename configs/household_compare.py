"""Matched comparison of SPO and SPO++ on household games, a minute a run.

Source: protocol of SPO++ (arXiv:2608.24870) section 3.1 at a small scale: the
first finished of more requests than a batch holds, one shared start, one set
of offline values and one budget for all methods of a replicate.
Command: python experiments/compare.py --config=configs/household_compare.py
"""

from ml_collections import config_dict

from configs import quickstart


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = quickstart.get_config(arg)
  config.run.name = 'compare'
  config.run.steps = 40
  config.run.checkpoint_every_steps = 40
  config.dispatch.in_flight = 120
  return config
