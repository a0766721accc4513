"""TETPO on mathematics at lags up to 32, with Llama-3.2-3B-Instruct.

Source and command: as tetpo_qwen3_1p7b.py.
Expected: not run here; M2PO reports an average of 25.3 on eight benchmarks for
  this model at a lag of 256 (arXiv:2510.01161).
"""

from ml_collections import config_dict

from configs import real_models, tetpo_qwen3_1p7b


def get_config(arg: str = '') -> config_dict.ConfigDict:
  config = tetpo_qwen3_1p7b.get_config(arg)
  config.run.name = 'tetpo_llama32_3b'
  config.model.update(preset='Llama-3.2-3B', chat_format='llama3')
  real_models.lay_out(
    config,
    arg,
    {'gpu8': 16, 'tpu16': 64},
    fsdp={'gpu8': 8, 'tpu16': 8},
    tensor={'gpu8': 1, 'tpu16': 2},
  )
  return config
