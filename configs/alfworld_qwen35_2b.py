"""SPO++ on 128 ALFWorld tasks with Qwen3.5-2B.

Source and command: as alfworld_qwen35_0p8b.py.
Expected: area under the curve .52 -> .68 from SPO to SPO++ (SPO++ Table 1); not
  run here.
"""

from ml_collections import config_dict

from configs import alfworld_qwen35_0p8b, real_models


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = alfworld_qwen35_0p8b.get_config(arg)
  config.run.name = 'alfworld_qwen35_2b'
  config.model.preset = 'Qwen3.5-2B'
  real_models.lay_out(
    config,
    arg,
    {'gpu8': 4, 'tpu16': 16},
    fsdp={'gpu8': 8, 'tpu16': 8},
    tensor={'gpu8': 1, 'tpu16': 2},
  )
  return config
