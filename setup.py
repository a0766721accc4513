"""Installs spopp_jax; `pip install -e .[test]` for development."""

import pathlib

import setuptools

_ROOT = pathlib.Path(__file__).parent

setuptools.setup(
  name='spopp_jax',
  version='0.1.0',
  description=(
    'Asynchronous reinforcement learning of language-model agents in JAX: '
    'SPO++ and TETPO.'
  ),
  long_description=(_ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_packages(include=['spopp_jax', 'spopp_jax.*']),
  package_data={'spopp_jax': ['py.typed', 'sampler/*.proto', 'sampler/*.pyi']},
  install_requires=[
    'absl-py>=2.1',
    'chex>=0.1.90',
    'flax>=0.12,<0.14',
    'grpcio>=1.85.1,<2',
    'grpcio-health-checking>=1.85.1,<2',
    'jax>=0.10.2,<0.13',
    'matplotlib>=3.9',
    'ml-collections>=1.1,<2',
    'ml-dtypes>=0.5',
    'numpy>=2.0',
    'optax>=0.2.8,<0.4',
    'orbax-checkpoint>=0.12,<0.14',
    # The generated code of sampler.proto needs at least this runtime.
    'protobuf>=7.35.1,<8',
    'safetensors>=0.5',
    'tensorboardX>=2.6.4',
    'tokenizers>=0.21',
    'tqdm>=4.66',
  ],
  extras_require={
    'gguf': ['gguf>=0.17'],
    # Pretrained tokenizers.
    'models': ['transformers>=5.20,<6'],
    'test': [
      'gguf>=0.17',
      'grpcio-tools>=1.85.1,<2',
      'hypothesis>=6.100',
      'jinja2>=3.1',
      'mypy>=1.15',
      'pre-commit>=4',
      'pytest>=8.3',
      'pytest-timeout>=2.3',
      'pytest-xdist>=3.6',
      'ruff>=0.12',
      'transformers>=5.20,<6',
    ],
    # Only what `experiments/benchmark.py` compares this project with.
    'benchmark': ['torch==2.13.0', 'transformers>=5.20,<6'],
    # Only what the decoders are held against, by tests.
    'parity': ['torch==2.13.0', 'transformers>=5.20,<6'],
    # The official text-game engine, for parity tests only; compiles GPL parts.
    'alfworld': ['alfworld==0.4.2'],
  },
)
