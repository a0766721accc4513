"""SPO++ on 128 ALFWorld tasks with Qwen3.5-2B.

Source and command: as alfworld_qwen35_0p8b.py.
Expected: area under the curve .52 -> .68 from SPO to SPO++ (SPO++ Table 1); not
  run here.
"""

from ml_collections import config_dict

from configs import alfworld_qwen35_0p8b


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = alfworld_qwen35_0p8b.get_config(arg)
  config.run.name = 'alfworld_qwen35_2b'
  config.model.preset = 'Qwen3.5-2B'
  return config
