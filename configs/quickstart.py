"""SPO++ on generated household games with a tiny decoder, on two CPU cores.

Source: SPO++ (arXiv:2608.24870) Table 3 for the method; sizes and rates are
this project's own, found for a machine without an accelerator.
Command: python experiments/train.py --config=configs/quickstart.py
Expected: 3 minutes on two CPU cores; success over all tasks .37 -> .94, .33 ->
.86 and .34 -> .95 with seeds 0, 1 and 2 (2026-11-30).
"""

from ml_collections import config_dict

from configs import common


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = common.get_config(arg)
  config.run.name = 'quickstart'
  return config
